"""Flags, counts and spans over the positions of a text, each in linear time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Spans:
    """Membership in a union of spans, by bisection."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        self._edges: list[int] = []
        for start, end in sorted(spans):
            if self._edges and start < self._edges[-1]:
                self._edges[-1] = max(self._edges[-1], end)
            else:
                self._edges += (start, end)

    def __contains__(self, position: int) -> bool:
        return bisect_right(self._edges, position) % 2 == 1


def mapped(codes: NDArray[np.uint32], function: Callable[[str], int]) -> NDArray[Any]:
    """`function` of the character at every code point of `codes`, shape (len(codes),).

    A long text looks its characters up in a table over all code points up to its highest; sorting
    would cost more.
    """
    if len(codes) == 0:
        return np.zeros(0, dtype=np.int64)
    if int(codes.max()) > len(codes):
        known, inverse = np.unique(codes, return_inverse=True)
        return np.array([function(chr(c)) for c in known.tolist()], dtype=np.int64)[inverse]
    present = np.flatnonzero(np.bincount(codes))
    table = np.zeros(int(present[-1]) + 1, dtype=np.int64)
    table[present] = [function(chr(c)) for c in present.tolist()]
    return table[codes]


def has_stretch(flags: NDArray[np.bool_], length: int) -> bool:
    """Whether the largest power of two ≤ `length` flags in a row are true: a cheap test by
    doubling.
    """
    width = 1
    while 2 * width <= length and len(flags) > width and flags.any():
        flags = flags[:-width] & flags[width:]
        width *= 2
    return bool(flags.any())


def true_stretches(flags: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Starts and ends of the stretches where `flags` is true."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return edges[::2].astype(np.int64), edges[1::2].astype(np.int64)


def running_count(flags: NDArray[Any]) -> NDArray[np.int64]:
    """How many flags are true before each position, shape (len(flags) + 1,)."""
    counts = np.zeros(len(flags) + 1, dtype=np.int64)
    np.cumsum(flags, out=counts[1:])
    return counts


def distinct_in_windows(words: Sequence[str], window: int) -> NDArray[np.int64]:
    """How many different words each window of so many holds, shape (max(0, len(words) − window +
    1),).
    """
    counts: dict[str, int] = {}
    found = []
    for index, word in enumerate(words):
        counts[word] = counts.get(word, 0) + 1
        if index >= window:
            old = words[index - window]
            counts[old] -= 1
            if not counts[old]:
                del counts[old]
        if index >= window - 1:
            found.append(len(counts))
    return np.array(found, dtype=np.int64)


def count_in_windows(flags: Sequence[bool] | NDArray[np.bool_], window: int) -> NDArray[np.int64]:
    """How many flags are true in each window of so many."""
    counts = running_count(np.asarray(flags, dtype=bool))
    return counts[window:] - counts[:-window]


def running_sum(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Running sums with a leading 0: the sum over [a, b) is sums[b] − sums[a]."""
    return np.concatenate(([0.0], np.cumsum(values, dtype=float)))
