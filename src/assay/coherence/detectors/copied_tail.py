"""A tail that copies what stands one period before it, in a text that the server cut."""

from __future__ import annotations

import numpy as np

from assay.coherence.detection import Detection, Family, quote
from assay.coherence.text import Ending, TextView

MAX_PERIOD = 400
MIN_PERIOD = 8
MIN_COPIED = 60
"""Tokens that must be a copy; in code, where items look alike, twice as many."""
MIN_PERIODS = 0.8
MAX_MARKS = 0.35
MIN_COPIED_LETTERS = 0.4


def detect_copied_tail(view: TextView) -> Detection | None:
    """A tail that copies what stands one period before it, in a text that the server cut."""
    if view.ending is not Ending.CUT or len(view.words) < MIN_COPIED + MIN_PERIOD:
        return None
    ids = view.tokens.ids[-4 * MAX_PERIOD :]
    first = len(view.words) - len(ids)
    for period in range(MIN_PERIOD, min(MAX_PERIOD, len(ids) - MIN_COPIED) + 1):
        differs = np.flatnonzero(ids[period:] != ids[:-period])
        copied = len(ids) - period - (int(differs[-1]) + 1 if len(differs) else 0)
        if copied < max(MIN_COPIED, MIN_PERIODS * period):
            continue
        start = first + len(ids) - copied
        marks = int((~view.is_word[start:]).sum())
        if marks > MAX_MARKS * copied and copied < 2 * MIN_COPIED:
            continue
        unit = view.text[int(view.tokens.starts[start]) :]
        if sum(c.isalpha() for c in unit) < MIN_COPIED_LETTERS * len(unit):
            continue  # a matrix, a table of numbers
        # The first copy is where the loop begins.
        onset, end = int(view.tokens.starts[max(start - period, 0)]), int(view.tokens.ends[-1])
        evidence = {"unit": quote(unit), "period_tokens": period, "copied_tokens": copied}
        return Detection("copied_tail", onset, end, evidence, family=Family.LOOP)
    return None
