"""Runs of zeros long enough to be a part of the file that was never written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

PAGE_BYTES = 4096
"""A run of zeros of at least a memory page is a hole."""

_BLOCK = PAGE_BYTES // 2
"""Every such run covers at least one whole block of half that size, wherever it begins."""


@dataclass
class Holes:
    """The longest run of zero words seen so far, chunk by chunk."""

    longest: tuple[int, int] | None = None
    """(first element, length), None while no run spans a page."""
    _open: int = 0
    """Zeros at the end of the last chunk, which the next may continue."""

    def add(self, words: np.ndarray[Any, Any], start: int) -> None:
        """Look at the next chunk, whose first element has the index `start`.

        A hole covers at least two neighbours among the words at every half page: only what lies
        between two zeros there is looked at whole.
        """
        before, self._open = self._open, _zeros_at(words[::-1])
        if self._open == words.size:
            self._open += before
            self._keep(start - before, self._open, words.itemsize)
            return
        if before or words[0] == 0:
            self._keep(start - before, before + _zeros_at(words), words.itemsize)
        step = _BLOCK // words.itemsize
        zero = words[::step] == 0
        first, count = _longest(_whole_blocks(words, zero[:-1] & zero[1:], step))
        if count:
            low, high = first * step, (first + count) * step
            low -= _zeros_at(words[max(low - step, 0) : low][::-1])
            high += _zeros_at(words[high : high + step])
            self._keep(start + low, high - low, words.itemsize)

    def _keep(self, start: int, length: int, width: int) -> None:
        if length * width >= PAGE_BYTES and (self.longest is None or length > self.longest[1]):
            self.longest = (start, length)


def _whole_blocks(
    words: np.ndarray[Any, Any], candidates: np.ndarray[Any, Any], step: int
) -> np.ndarray[Any, Any]:
    """Those of the candidate blocks that hold nothing but zeros."""
    at = np.flatnonzero(candidates)
    flags = np.zeros_like(candidates)
    if at.size:
        flags[at] = ~words[: candidates.size * step].reshape(-1, step)[at].any(axis=1)
    return flags


def _zeros_at(words: np.ndarray[Any, Any]) -> int:
    """How many zeros the array begins with; windows that double find a near end soon."""
    done, window = 0, 64
    while done < words.size:
        present = words[done : done + window] != 0
        index = int(present.argmax())
        if present[index]:
            return done + index
        done, window = done + present.size, 2 * window
    return done


def _longest(flags: np.ndarray[Any, Any]) -> tuple[int, int]:
    """(first index, length) of the longest run of true flags."""
    if not flags.any():
        return 0, 0
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    lengths = edges[1::2] - edges[::2]
    at = int(lengths.argmax())
    return int(edges[2 * at]), int(lengths[at])
