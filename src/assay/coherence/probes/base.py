"""What a probe is: a short conversation with the model, and checks of the answer.

A probe is a small frozen dataclass whose fields are its parameters. Its `talk` is a generator: it yields the next
step of the conversation and receives the reply. So the same probe runs against a server, one thread a conversation,
and against an engine in this process, many conversations in one batch.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from assay.coherence.record import AnswerCheck
from assay.engines.base import Capability, Message, Reply


@dataclass(frozen=True)
class Step:
    """One question. `messages` for a chat model, `prompt` for one that only continues text."""

    messages: tuple[Message, ...]
    prompt: str
    max_tokens: int
    tools: tuple[dict[str, Any], ...] = ()


Talk = Generator[Step, Reply, None]


@dataclass(frozen=True)
class Context:
    """What a probe may need to know of the subject."""

    chat: bool = True
    max_model_len: int | None = None
    chars_per_token: float = 4.0
    token_budget: float = 1.0
    """Factor on the length limit of every answer, for models that reason at length."""
    thinking: bool = True


class Probe(Protocol):
    """One kind of text that a sane model can write."""

    @property
    def name(self) -> str:
        """Stable name in results."""
        ...

    @property
    def title(self) -> str:
        """What a person reads."""
        ...

    @property
    def needs(self) -> frozenset[Capability]:
        """Capabilities without which the probe is skipped."""
        ...

    @property
    def variants(self) -> Sequence[str]:
        """Forms that are asked once each, greedily; empty for a probe that is sampled several times."""
        ...

    def talk(self, context: Context, variant: str) -> Talk:
        """The conversation; every reply of it is graded."""
        ...

    def check(self, replies: Sequence[Reply], variant: str) -> tuple[AnswerCheck, ...]:
        """Checks of the answer beyond its form."""
        ...


def user(text: str) -> Message:
    """A turn of the user."""
    return Message(role="user", content=text)


def answer_text(reply: Reply) -> str:
    """The text in which the answer is looked for: the content, or the reasoning where there is none."""
    return reply.content if reply.content.strip() else reply.reasoning
