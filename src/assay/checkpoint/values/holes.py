"""Runs of zeros long enough to be a part of the file that was never written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

    def add(self, words: np.ndarray[Any, Any], start: int, any_zero: bool) -> None:
        """Look at the next chunk, whose first element has the index `start`; `any_zero` says whether to look at all."""
        if not any_zero:
            self._open = 0
            return
        before, self._open = self._open, _zeros_at(words[::-1])
        if self._open == words.size:
            self._open += before
            self._keep(start - before, self._open, words.itemsize)
            return
        if head := _zeros_at(words):
            self._keep(start - before, before + head, words.itemsize)
        per_block = _BLOCK // words.itemsize
        blocks = (
            words[: words.size // per_block * per_block].view("<u8").reshape(-1, _BLOCK // 8).max(axis=1) == 0
        )
        first, count = _longest(blocks)
        if count:
            low, high = first * per_block, (first + count) * per_block
            low -= _zeros_at(words[max(low - per_block, 0) : low][::-1])
            high += _zeros_at(words[high : high + per_block])
            self._keep(start + low, high - low, words.itemsize)

    def _keep(self, start: int, length: int, width: int) -> None:
        if length * width >= PAGE_BYTES and (self.longest is None or length > self.longest[1]):
            self.longest = (start, length)


def _zeros_at(words: np.ndarray[Any, Any]) -> int:
    """How many zeros the array begins with."""
    if not words.size or words[0] != 0:
        return 0
    present = words != 0
    index = int(present.argmax())
    return index if present[index] else int(words.size)


def _longest(flags: np.ndarray[Any, Any]) -> tuple[int, int]:
    """(first index, length) of the longest run of true flags."""
    import numpy as np

    if not flags.any():
        return 0, 0
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    lengths = edges[1::2] - edges[::2]
    at = int(lengths.argmax())
    return int(edges[2 * at]), int(lengths[at])
