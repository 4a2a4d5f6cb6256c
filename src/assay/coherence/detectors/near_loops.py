"""Loops with small changes: a counter that grows, a word swapped, a clause dropped now and then.

Numbers are masked, and a stretch counts when at least 85 % of its tokens equal the token one
period before. Data does the same (logs, tables, JSON), so only running prose is judged: few
marks, and copies that do not stand on lines of their own. Copies on lines count only where the
server says that the text was cut off.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.coherence.arrays import mapped, running_count, true_stretches
from assay.coherence.detection import Detection, Family, quote
from assay.coherence.text import Ending, TextView

MAX_PERIOD = 64
"""Longest period in tokens."""
MIN_REPEATS = 8
MIN_TOKENS = 48
MIN_SAME = 0.85
MIN_CHARS = 200
LONG_PERIOD = 8
"""Tokens from which a line says something: shorter ones must come again more often."""
MAX_MARKS = 0.3
MIN_LETTERS = 0.6


def detect_near_loop(view: TextView) -> Detection | None:
    """The first near-loop in running prose."""
    ids = view.masked_tokens.ids
    if len(ids) < MIN_TOKENS:
        return None
    counts = Counts(view)
    found = [d for p in range(2, MAX_PERIOD + 1) if (d := _with_period(view, counts, ids, p))]
    return min(found, key=lambda d: d.onset_char, default=None)


def _with_period(
    view: TextView, counts: Counts, ids: NDArray[Any], period: int
) -> Detection | None:
    width = max((MIN_REPEATS - 1) * period, MIN_TOKENS)
    if len(ids) < width + period:
        return None
    same = running_count(ids[period:] == ids[:-period])
    alike = same[width:] - same[:-width] >= MIN_SAME * width
    if not alike.any():
        return None
    starts, ends = true_stretches(alike)
    for first, end in zip(starts.tolist(), ends.tolist(), strict=True):
        start = first + int(
            np.argmax(np.diff(same[first : first + width + 1]))
        )  # the first token that comes again
        last = min(end + width + period - 2, len(ids) - 1)
        a, b = int(view.tokens.starts[start]), int(view.tokens.ends[last])
        if _is_prose_loop(view, counts, a, b, start, last, period):
            unit = view.text[a : int(view.tokens.starts[start + period])]
            exact = bool(same[end + width - 1] - same[start] == end + width - 1 - start)
            kind = "counter_loop" if exact and any(c.isdigit() for c in unit) else "near_loop"
            evidence = {
                "unit": quote(unit),
                "period_tokens": period,
                "repeats": round((last + 1 - start) / period, 1),
            }
            return Detection(kind, a, b, evidence, family=Family.LOOP)
    return None


def _is_prose_loop(
    view: TextView, counts: Counts, a: int, b: int, first: int, last: int, period: int
) -> bool:
    tokens = last + 1 - first
    marks = tokens - int(counts.words[last + 1] - counts.words[first])
    letters = int(counts.letters[b] - counts.letters[a])
    if b - a < MIN_CHARS or marks > MAX_MARKS * tokens or letters < MIN_LETTERS * (b - a):
        return False
    if int(counts.breaks[b] - counts.breaks[a]) * 4 * period < tokens:
        return True
    at_end = len(view.words) - 1 - last <= period
    repeats = MIN_REPEATS if period >= LONG_PERIOD else 12
    return view.ending is Ending.CUT and at_end and tokens >= repeats * period


@dataclass(frozen=True)
class Counts:
    """Running counts with a leading 0, so that a passage of any length is counted in one step."""

    view: TextView

    @cached_property
    def words(self) -> NDArray[np.int64]:
        """Tokens that are no marks, before each token."""
        return running_count(self.view.is_word)

    @cached_property
    def letters(self) -> NDArray[np.int64]:
        """Letters before each code point."""
        return running_count(mapped(self.view.codes, str.isalpha))

    @cached_property
    def breaks(self) -> NDArray[np.int64]:
        """Line breaks before each code point."""
        return running_count(self.view.codes == ord("\n"))
