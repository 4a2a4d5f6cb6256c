"""Many requests at the same moment: faults of batching show only there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from assay.coherence.probes.base import Context, Step, Talk, answer_text, user
from assay.coherence.record import AnswerCheck
from assay.engines.base import Capability, Reply

# Short facts that a small model knows, one a stream, so that an answer to another stream's question is seen.
FACTS = (
    ("What do bees make?", "Bees make", "honey"),
    ("What is the chemical formula of water?", "The chemical formula of water is", "h2o"),
    ("What is the capital of Italy?", "The capital of Italy is", "rome"),
    ("Which planet do we live on?", "The planet we live on is called", "earth"),
    ("What is the capital of Japan?", "The capital of Japan is", "tokyo"),
    ("What colour is the sky on a clear day?", "On a clear day the colour of the sky is", "blue"),
    ("What is the capital of Spain?", "The capital of Spain is", "madrid"),
    ("What is frozen water called?", "Frozen water is called", "ice"),
)


@dataclass(frozen=True)
class Burst:
    """`streams` different questions at once."""

    streams: int = 8
    name: str = "burst"
    title: str = "many requests at once"
    needs: frozenset[Capability] = frozenset()
    max_tokens: int = 120

    @property
    def variants(self) -> Sequence[str]:
        """One stream each."""
        return tuple(str(index) for index in range(self.streams))

    def talk(self, context: Context, variant: str) -> Talk:
        """Ask one of the questions, with room for an explanation."""
        question, prompt, _ = _fact(variant)
        yield Step(
            messages=(user(f"{question} Answer, then explain in two sentences."),),
            prompt=f"Question: {question}\nAnswer: {prompt}",
            max_tokens=self.max_tokens,
        )

    def check(self, replies: Sequence[Reply], variant: str) -> tuple[AnswerCheck, ...]:
        """The answer belongs to the question of this stream."""
        expected = _fact(variant)[2]
        text = answer_text(replies[-1]).casefold().replace("₂", "2")
        return (AnswerCheck("answers_own_question", expected in text, f"expected {expected!r}"),)


def _fact(variant: str) -> tuple[str, str, str]:
    return FACTS[int(variant) % len(FACTS)]
