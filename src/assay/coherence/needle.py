"""A probe that asks for one fact hidden in a long text, by depth and length."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from assay.coherence.conversation import Context, Step, Talk, answer_text, user
from assay.coherence.filler import FILLER_CHARS_PER_TOKEN, PLACES, plain_sentences
from assay.coherence.record import AnswerCheck
from assay.engines import Capability, Reply

DEPTHS = (0.1, 0.5, 0.9)
DEFAULT_LONGEST = 8192
_ANSWER_TOKENS = 60
_ANSWER_MARGIN_TOKENS = 128
_CODES = (
    "heron",
    "walnut",
    "copper",
    "meadow",
    "lantern",
    "saffron",
    "granite",
    "willow",
    "falcon",
    "amber",
    "violin",
)


@dataclass(frozen=True)
class Needle:
    """Find one fact in a text of `lengths` tokens at `depths` of it.

    `count_tokens` is the server's own tokenizer; without one, lengths are estimated from
    characters.
    """

    lengths: tuple[int, ...] = ()
    depths: tuple[float, ...] = DEPTHS
    seed: int = 0
    count_tokens: Callable[[str], int] | None = None
    name: str = "needle"
    title: str = "a fact in a long context"
    needs: frozenset[Capability] = frozenset()

    @property
    def variants(self) -> Sequence[str]:
        """One cell of the grid each, as `LENGTH@DEPTH`."""
        return tuple(f"{length}@{depth:g}" for length in self.lengths for depth in self.depths)

    def talk(self, context: Context, variant: str) -> Talk:
        """Ask for the fact after the text."""
        length, depth = _parse(variant)
        place, _ = self._fact(variant)
        text = self._haystack(variant, length, depth)
        question = f"According to the text, which word opens the store room of the {place}?"
        yield Step(
            messages=(user(f"{text}\n\n{question} Answer with that one word."),),
            prompt=(
                f"{text}\n\nQuestion: {question}\nAnswer: The word that opens the store room of the"
                f" {place} is"
            ),
            max_tokens=_ANSWER_TOKENS,
        )

    def check(self, replies: Sequence[Reply], variant: str) -> tuple[AnswerCheck, ...]:
        """The code word is in the answer."""
        code = self._fact(variant)[1]
        passed = code in answer_text(replies[-1]).casefold()
        return (AnswerCheck("finds_needle", passed, f"expected {code!r} at {variant}"),)

    def _fact(self, variant: str) -> tuple[str, str]:
        rng = random.Random(f"{self.seed}/{variant}/fact")
        return rng.choice(PLACES), rng.choice(_CODES)

    def _haystack(self, variant: str, length: int, depth: float) -> str:
        place, code = self._fact(variant)
        needle = f"The word that opens the store room of the {place} is {code}."
        sentences = plain_sentences(f"{self.seed}/{variant}/filler", length)
        count = self.count_tokens or (lambda text: len(text) // FILLER_CHARS_PER_TOKEN)
        # Tokens grow with sentences; two corrections bring the text close to the length that was
        # asked for.
        keep = len(sentences)
        for _ in range(2):
            tokens = max(count(" ".join(sentences[:keep])), 1)
            keep = min(len(sentences), max(1, int(keep * length / tokens)))
        sentences = sentences[:keep]
        sentences.insert(int(len(sentences) * depth), needle)
        return " ".join(sentences)


def needle_lengths(max_model_len: int | None, longest: int = DEFAULT_LONGEST) -> tuple[int, ...]:
    """A quarter, a half and the whole of the usable context, in tokens; at most `longest`."""
    usable = min(max_model_len or longest, longest) - _ANSWER_TOKENS - _ANSWER_MARGIN_TOKENS
    return tuple(sorted({length for length in (usable // 4, usable // 2, usable) if length >= 128}))


def _parse(variant: str) -> tuple[int, float]:
    length, _, depth = variant.partition("@")
    return int(length), float(depth)
