"""A loop in changing copies: the end of the text holds nothing new, though no period fits it.

An item gets another of five numbers, a line is dropped, two answers take turns: exact comparison
fails, but every stretch of words has stood in the text before. So each run of a few tokens is
looked up among the earlier ones, and a long tail that is made of known runs alone is a fault.
Data repeat their frame and not their content (records, log lines, getters), and refrains are
short.

Long runs prove more, short ones catch copies that change more: runs of four count in prose that
the server cut. What is said for the third or fourth time counts in code and markup as well, and
so does an end of characters that come again, eight at a time, however words are cut in it.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from assay.coherence.detection import Detection, Family, quote
from assay.coherence.text import Ending, TextView

_COUNTER = re.compile(r"^[ \t#*|]*(\d+)(?=[.):])", re.MULTILINE)
REACH = 1500
"""Tokens within which a run must have stood before: a licence that comes again after pages is no
loop.
"""
COUNTER = 2**40
"""The id of every counter."""


@dataclass(frozen=True)
class Recycled:
    """A tail of at least `runs` runs of `gram` tokens, of which a share of `known` stood in the
    text before.
    """

    gram: int
    runs: int
    known: float
    letters: float = 0.4
    """Share of letters that its characters must hold."""
    marks: float = 0.4
    """Share of marks among its tokens, at most."""
    code: bool = True
    """Whether code counts too, if it has few different tokens."""
    times: int = 1
    """How often each run must have stood before."""


CUT = (
    Recycled(8, 80, 0.9),
    Recycled(4, 57, 0.85, letters=0.6, marks=0.3, code=False),
    Recycled(8, 50, 0.9, letters=0.35, marks=1.0, times=2),
    Recycled(6, 30, 0.9, letters=0.3, marks=1.0, times=3),
)
"""What counts where the server cut the text."""
WHOLE = (Recycled(8, 200, 0.9, letters=0.6, marks=0.35, code=False),)
"""What counts where it ended or nothing is known."""
CHARS = 8
CHAR_TAIL, CHAR_REACH, MIN_KNOWN, MIN_LETTERS = 160, 4000, 0.9, 0.4
"""Code points of a cut end whose runs of `CHARS` stood twice before, how far one looks back, the
share of such runs, and of letters.
"""
LAST = 3
"""Runs at the very end of a text that was not cut, of which one must have stood before."""
MIN_DISTINCT = 20
"""Different tokens of the tail of a text that was not cut: one line said again and again may have
been asked for.
"""
MAX_CODE_DISTINCT = 0.2
"""Share of different tokens in a tail of code or data, where frames repeat by right."""


def detect_recycled_tail(view: TextView) -> Detection | None:
    """A tail of the text in which next to nothing is new."""
    if view.ending is Ending.OPEN:
        return None
    # A numbered list of equal items may have been asked for, but then it comes to an end.
    cut = view.ending is Ending.CUT
    ids = _without_counters(view) if cut else view.tokens.ids
    found = (_tail(view, ids[-2 * REACH :], kind) for kind in (CUT if cut else WHOLE))
    return next((d for d in found if d), None) or (_characters(view) if cut else None)


def _characters(view: TextView) -> Detection | None:
    """An end made of runs of characters that stood twice before."""
    first = max(0, view.visible_end - CHAR_REACH)
    earlier = earlier_runs(view.codes[first : view.visible_end].astype(np.int64), CHARS)
    if len(earlier) < CHAR_TAIL + CHARS:
        return None
    known = earlier >= 0
    known &= known[earlier]
    share = np.cumsum(known[::-1]) / np.arange(1, len(known) + 1)
    end = view.text[view.visible_end - CHAR_TAIL : view.visible_end]
    if share[CHAR_TAIL - 1] < MIN_KNOWN or sum(map(str.isalpha, end)) < MIN_LETTERS * CHAR_TAIL:
        return None
    runs = int(np.flatnonzero(share >= MIN_KNOWN)[-1]) + 1
    at = len(known) - runs + int(np.argmax(known[-runs:]))
    onset = first + int(earlier[earlier[at]])
    evidence = {"again": quote(end), "chars": runs}
    return Detection("recycled_tail", onset, view.visible_end, evidence, family=Family.LOOP)


def _tail(view: TextView, ids: NDArray[np.int64], kind: Recycled) -> Detection | None:
    """The longest tail of one kind, if it is a fault."""
    if len(ids) < kind.runs + kind.gram:
        return None
    earlier = earlier_runs(ids, kind.gram)
    known = (earlier >= 0) & (np.arange(len(earlier)) - earlier <= REACH)
    for _ in range(kind.times - 1):
        known &= known[earlier]  # where there is none, `known` is false already
    share = np.cumsum(known[::-1]) / np.arange(1, len(known) + 1)
    long_enough = np.flatnonzero(share >= kind.known)
    runs = int(long_enough[-1]) + 1 if len(long_enough) else 0
    # Where nothing says that the text was cut, a tail that ends in words of its own came to a
    # conclusion.
    concluded = view.ending is not Ending.CUT and not known[-LAST:].any()
    if runs < kind.runs or concluded or not _is_fault(view, kind, runs):
        return None
    first = len(known) - runs + int(np.argmax(known[-runs:]))
    offset = len(view.tokens) - len(known) - kind.gram + 1
    # The loop begins where the first of the known runs stood first.
    start = int(view.tokens.starts[offset + int(earlier[first])])
    end = int(view.tokens.ends[-1])
    again = view.text[int(view.tokens.starts[offset + first]) :]
    evidence = {"again": quote(again), "tokens": runs}
    return Detection("recycled_tail", start, end, evidence, family=Family.LOOP)


def _is_fault(view: TextView, kind: Recycled, runs: int) -> bool:
    tail = len(view.tokens) - runs
    letters, marks = _letters_and_marks(view, tail)
    distinct = len(set(view.tokens.ids[tail:].tolist()))
    if view.ending is not Ending.CUT and distinct < MIN_DISTINCT:
        return False
    prose = marks <= kind.marks
    return letters >= kind.letters and (
        prose or (kind.code and distinct <= MAX_CODE_DISTINCT * runs)
    )


def _without_counters(view: TextView) -> NDArray[np.int64]:
    """Token ids, with all numbers alike that count the items of a list: at the start of a line,
    before a stop.
    """
    ids = view.tokens.ids.copy()
    for match in _COUNTER.finditer(view.text):
        ids[bisect_left(view.tokens.starts, match.start(1))] = COUNTER
    return ids


def _letters_and_marks(view: TextView, tail: int) -> tuple[float, float]:
    """Share of letters among the characters, and of marks among the tokens, from token
    `tail` on.
    """
    text = view.text[int(view.tokens.starts[tail]) : int(view.tokens.ends[-1])]
    return sum(map(str.isalpha, text)) / len(text), 1.0 - float(view.is_word[tail:].mean())


def earlier_runs(ids: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """For every run of `length` units the place where an equal run last began before it, or −1.

    Shape (len(ids) − length + 1,). Runs are compared by a 64-bit polynomial hash.
    """
    places = max(0, len(ids) - length + 1)
    hashed = np.zeros(places, dtype=np.uint64)
    for k in range(length):
        hashed = hashed * np.uint64(0x9E3779B97F4A7C15) + (ids[k : k + places] + 1).astype(
            np.uint64
        )
    order = np.argsort(hashed, kind="stable")
    same = hashed[order[1:]] == hashed[order[:-1]]
    earlier = np.full(places, -1, dtype=np.int64)
    earlier[order[1:][same]] = order[:-1][same]
    return earlier
