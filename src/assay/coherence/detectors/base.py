"""What a detector is: a function from a text view to the first place where the text went wrong, or None."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from assay.coherence.textview import TextView


@dataclass(frozen=True)
class Detection:
    """A degenerate passage: its kind (a stable snake_case name) and where it begins, in code points.

    `end` is where the passage ends, as far as the detector followed it.
    """

    kind: str
    onset: int
    end: int
    evidence: Mapping[str, Any] = field(default_factory=dict)


Detector = Callable[[TextView], Detection | None]


def quote(text: str, limit: int = 60) -> str:
    """A short piece of `text` for evidence, cut in the middle."""
    return text if len(text) <= limit else f"{text[: limit - 20]}…{text[-19:]}"
