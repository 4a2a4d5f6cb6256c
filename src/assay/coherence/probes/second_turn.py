"""A second turn in the same conversation: faults of caches and templates often show only there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from assay.coherence.probes.base import Context, Step, Talk, answer_text, user
from assay.coherence.record import AnswerCheck
from assay.engines.base import Capability, Message, Reply

_FIRST = "My dog is called Bruno and he is afraid of thunder. Give me three short tips to calm him."
_SECOND = "Thank you. Now write two sentences to my neighbour about it. What was my dog's name again? Use it."


@dataclass(frozen=True)
class SecondTurn:
    """Ask, then ask again with the first answer in the context."""

    name: str = "second_turn"
    title: str = "second turn of a conversation"
    needs: frozenset[Capability] = frozenset({Capability.CHAT})
    variants: Sequence[str] = ()
    max_tokens: int = 200

    def talk(self, context: Context, variant: str) -> Talk:
        """Two turns; the model's own first answer is handed back."""
        first = yield Step(messages=(user(_FIRST),), prompt=_FIRST, max_tokens=self.max_tokens)
        said = Message(role="assistant", content=first.content or "(no answer)")
        yield Step(messages=(user(_FIRST), said, user(_SECOND)), prompt=_SECOND, max_tokens=self.max_tokens)

    def check(self, replies: Sequence[Reply], variant: str) -> tuple[AnswerCheck, ...]:
        """The name from the first turn is remembered."""
        passed = "bruno" in answer_text(replies[-1]).casefold()
        return (
            AnswerCheck("remembers_name", passed, "" if passed else "the second answer does not name Bruno"),
        )
