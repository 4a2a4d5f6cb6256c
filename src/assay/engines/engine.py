"""What every engine offers: it answers requests and scores texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from assay.engines.capabilities import CapabilityReport
from assay.engines.requests import OnText, Reply, Request


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities (natural log) of given tokens, each under the tokens before it.

    `token_logprobs` has one entry for each token; the first is None, as nothing comes before it.
    `bytes` is the number of UTF-8 bytes of the text that the scored tokens cover, None where it is
    not known.
    """

    token_logprobs: tuple[float | None, ...]
    token_count: int
    bytes: int | None = None
    token_ids: tuple[int, ...] | None = None

    @property
    def scored(self) -> tuple[float, ...]:
        """The log-probabilities without the first token's missing one."""
        return tuple(value for value in self.token_logprobs if value is not None)

    @property
    def nll(self) -> float:
        """Negative log-likelihood of all scored tokens, in nats."""
        return -sum(self.scored)

    @property
    def bits_per_byte(self) -> float | None:
        """NLL in bits divided by the bytes scored; None where the bytes are not known."""
        if not self.bytes:
            return None
        return self.nll / (self.bytes * math.log(2.0))


@runtime_checkable
class Engine(Protocol):
    """The verbs of an engine. All may be called from several threads at once."""

    @property
    def capabilities(self) -> CapabilityReport:
        """What this engine can do."""
        ...

    def describe(self) -> dict[str, Any]:
        """What answered: kind, version, model, settings that were sent; plain JSON types, no
        secret.
        """
        ...

    def generate(self, request: Request) -> Reply:
        """Answer in one piece, without timing."""
        ...

    def stream(self, request: Request, on_text: OnText | None = None) -> Reply:
        """Answer piece by piece; the reply carries its timing."""
        ...

    def score(self, source: str | tuple[int, ...]) -> TokenScores:
        """Log-probabilities of the tokens of a text, or of given token ids, in one pass."""
        ...

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, without special tokens added."""
        ...

    def close(self) -> None:
        """Give back what the engine holds (connections, memory)."""
        ...


def score_all(engine: Engine, sources: Sequence[str | tuple[int, ...]]) -> list[TokenScores]:
    """Scores of several texts or rows of ids, together where the engine has `score_many`."""
    many = getattr(engine, "score_many", None)
    return list(many(sources)) if many else [engine.score(source) for source in sources]
