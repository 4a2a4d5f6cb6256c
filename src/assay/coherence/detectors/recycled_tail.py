"""A loop in changing copies: the end of the text holds nothing new, though no period fits it.

An item gets another of five numbers, a line is dropped, two answers take turns: exact comparison fails, but every
stretch of words has stood in the text before. So each run of `GRAM` tokens is looked up among the earlier ones, and a
long tail that is made of known runs alone is a fault. Data repeat their frame and not their content (records, log
lines, getters), and refrains are short.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import TYPE_CHECKING

from assay.coherence.detectors.base import Detection, quote
from assay.coherence.textview import Ending, TextView

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_COUNTER = re.compile(r"^[ \t#*|]*(\d+)(?=[.):])", re.MULTILINE)
GRAM = 8
REACH = 1500
"""Tokens within which a run must have stood before: a licence that comes again after pages is no loop."""
COUNTER = 2**40
"""The id of every counter."""
MIN_KNOWN = 0.9
CUT_TAIL, WHOLE_TAIL = 80, 200
"""Runs that the tail must hold where the server cut the text, and where it ended or nothing is known."""
MIN_DISTINCT = 20
"""Different tokens of the tail of a text that was not cut: one line said again and again may have been asked for."""
MAX_CODE_DISTINCT = 0.2
"""Share of different tokens in a tail of code or data, where frames repeat by right."""


def detect(view: TextView) -> Detection | None:
    """A tail of the text in which next to nothing is new."""
    import numpy as np

    if view.ending is Ending.OPEN or len(view.tokens) < CUT_TAIL + GRAM:
        return None
    # A numbered list of equal items may have been asked for, but then it comes to an end.
    ids = _without_counters(view) if view.ending is Ending.CUT else view.tokens.ids
    earlier = earlier_runs(ids[-2 * REACH :], GRAM)
    known = (earlier >= 0) & (np.arange(len(earlier)) - earlier <= REACH)
    share = np.cumsum(known[::-1]) / np.arange(1, len(known) + 1)
    long_enough = np.flatnonzero(share >= MIN_KNOWN)
    runs = int(long_enough[-1]) + 1 if len(long_enough) else 0
    tail = len(view.tokens) - runs
    if not runs or not _is_fault(view, runs, tail):
        return None
    first = len(known) - runs + int(np.argmax(known[-runs:]))
    offset = len(view.tokens) - len(known) - GRAM + 1
    # The loop begins where the first of the known runs stood first.
    start = int(view.tokens.starts[offset + int(earlier[first])])
    end = int(view.tokens.ends[-1])
    again = view.text[int(view.tokens.starts[offset + first]) :]
    return Detection("recycled_tail", start, end, {"again": quote(again), "tokens": runs})


def _is_fault(view: TextView, runs: int, tail: int) -> bool:
    letters, marks = _letters_and_marks(view, tail)
    distinct = len(set(view.tokens.ids[tail:].tolist()))
    if view.ending is not Ending.CUT:
        return runs >= WHOLE_TAIL and distinct >= MIN_DISTINCT and letters >= 0.6 and marks <= 0.35
    prose = marks <= 0.4
    return runs >= CUT_TAIL and letters >= 0.4 and (prose or distinct <= MAX_CODE_DISTINCT * runs)


def _without_counters(view: TextView) -> NDArray[np.int64]:
    """Token ids, with all numbers alike that count the items of a list: at the start of a line, before a stop."""
    ids = view.tokens.ids.copy()
    for match in _COUNTER.finditer(view.text):
        ids[bisect_left(view.tokens.starts, match.start(1))] = COUNTER
    return ids


def _letters_and_marks(view: TextView, tail: int) -> tuple[float, float]:
    """Share of letters among the characters, and of marks among the tokens, from token `tail` on."""
    text = view.text[int(view.tokens.starts[tail]) : int(view.tokens.ends[-1])]
    return sum(map(str.isalpha, text)) / len(text), 1.0 - float(view.is_word[tail:].mean())


def earlier_runs(ids: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """For every run of `length` units the place where an equal run last began before it, or −1.

    Shape (len(ids) − length + 1,). Runs are compared by a 64-bit polynomial hash.
    """
    import numpy as np

    places = max(0, len(ids) - length + 1)
    hashed = np.zeros(places, dtype=np.uint64)
    for k in range(length):
        hashed = hashed * np.uint64(0x9E3779B97F4A7C15) + (ids[k : k + places] + 1).astype(np.uint64)
    order = np.argsort(hashed, kind="stable")
    same = hashed[order[1:]] == hashed[order[:-1]]
    earlier = np.full(places, -1, dtype=np.int64)
    earlier[order[1:][same]] = order[:-1][same]
    return earlier
