"""What a detector finds: a degenerate passage, its kind, family and likely causes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Family(StrEnum):
    """Families of degenerate text; they decide how a check counts a text.

    A small whole model writes loops at times, so loops count by their rate alone; no whole model
    writes a flood, a salad or a leak. A plug-in may name a family of its own.
    """

    LOOP = "loop"
    FLOOD = "flood"
    """One character or token over and over."""
    MARKS = "marks"
    """Blanks and marks in turns."""
    SALAD = "salad"
    """Characters, words or word order of no language."""
    LEAK = "leak"
    """Tokens of the template, and turns, that no reader should see."""
    TOKEN_FLOOD = "token_flood"
    """Special tokens in a row."""
    BYTES = "bytes"
    """Broken bytes, control characters, marks of a tokenizer."""
    STUTTER = "stutter"
    CALLS = "calls"
    """Tool calls that no parser takes."""
    OTHER = "other"
    """A detector that names none."""


NAN = "NaN or infinite logits: every step then picks one fixed token"
WEAK = (
    "a model that is weak, or damaged by quantisation or a low-bit KV cache, in greedy or cold"
    " sampling"
)
WEIGHTS = "wrong weights: a corrupt shard, a wrong quantisation flag, a wrong rope_theta"
TOKENIZER = "a tokenizer or chat template that does not belong to the checkpoint"
LOW_BIT_CACHE = "a KV cache with too few bits"
CORRUPT_CACHE = "a KV cache that is corrupt or has too few bits"
ENDLESS_BLANKS = "a grammar or JSON mode that allows blanks without end"

CAUSES: Mapping[str, tuple[str, ...]] = {
    Family.LOOP: (WEAK,),
    Family.FLOOD: (NAN, "a corrupt shard or missing scale"),
    Family.MARKS: (WEAK,),
    Family.SALAD: (WEIGHTS, CORRUPT_CACHE),
    Family.LEAK: (TOKENIZER, "an end-of-turn token that is missing from the stop tokens"),
    Family.TOKEN_FLOOD: (NAN, TOKENIZER),
    Family.BYTES: (TOKENIZER, WEIGHTS),
    Family.STUTTER: (LOW_BIT_CACHE, WEIGHTS),
    Family.CALLS: ("a tool parser that does not fit the model", LOW_BIT_CACHE),
}
"""The likely causes of each family, the likeliest first; a detection may name its own."""


@dataclass(frozen=True)
class Detection:
    """A degenerate passage.

    Attributes:
        kind: A stable snake_case name.
        onset_char: Where the passage begins, in code points.
        end: Where it ends, as far as the detector followed it.
        evidence: What shows it: units, counts, shares.
        family: One of `Family`, or a name of the plug-in's own.
        causes: What it most likely comes from, the likeliest first; empty for those of the family.
    """

    kind: str
    onset_char: int
    end: int
    evidence: Mapping[str, Any] = field(default_factory=dict)
    family: str = Family.OTHER
    causes: tuple[str, ...] = ()

    @property
    def likely_causes(self) -> tuple[str, ...]:
        """The causes that the detection names, else those of its family."""
        return self.causes or CAUSES.get(self.family, ())


def quote(text: str, limit: int = 60) -> str:
    """A short piece of `text` for evidence, cut in the middle."""
    return text if len(text) <= limit else f"{text[: limit - 20]}…{text[-19:]}"
