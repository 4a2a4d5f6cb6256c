"""Find the few lines that matter in a log of any size, at the speed of reading it.

What matters is what the parsers look for. Nearly all their needles hold `accep`, or `acc` before
something that is no letter; the pair `cc` is rare, and numpy finds it at memory speed. Needles
without it are searched for one by one. The lines around a hit are kept too, since engines put the
engine's number or the speed on a line of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np

from assay.speculation.parsers.base import Parser
from assay.speculation.parsers.registry import all_parsers

BLOCK = 1 << 19
"""Bytes read at a time."""

CHUNK = 1 << 17
"""Bytes searched at a time. Both are small enough to stay in the processor's cache."""

MARGIN = 1 << 16
"""A line is sure to be read whole up to this length; a longer one is cut."""

LINES_BEFORE = 4

LINES_AFTER = 1

_FEW = 16
"""Pairs in a chunk that are looked at one by one; more are weighed together."""

_SEED = re.compile(rb"[aA]cc(?:ep|[^A-Za-z])")


class ByteReader(Protocol):
    """A stream of bytes; `readinto` may fill less than the buffer, and returns 0 only at
    the end.
    """

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill the start of `buffer`; returns the number of bytes."""
        ...


@dataclass(frozen=True)
class Wanted:
    """What the parsers look for, in lower case: in a line that may count drafts, in one beside it,
    and without a seed.
    """

    counts: tuple[bytes, ...]
    speaks: tuple[bytes, ...]
    others: tuple[bytes, ...]

    @classmethod
    def of(cls, parsers: Sequence[type[Parser] | Parser]) -> Wanted:
        """Made from the parsers' own `needles`, `company` and `near`."""
        counts = {word.encode() for p in parsers for word in p.company or p.needles}
        near = {word.encode() for p in parsers for word in p.near}
        needles = {needle.encode() for p in parsers for needle in p.needles}
        others = {needle for needle in needles if not _SEED.search(needle + b"\n")}
        return cls(_shortest(counts | others), _shortest(counts | near | needles), tuple(others))


def _shortest(words: set[bytes]) -> tuple[bytes, ...]:
    """Words that hold no other of them: where one of these is missing, so are all."""
    return tuple(sorted(w for w in words if not any(o in w for o in words - {w})))


@cache
def _wanted() -> Wanted:
    return Wanted.of(all_parsers())


def interesting_lines(
    reader: ByteReader, block: int = BLOCK, margin: int = MARGIN, wanted: Wanted | None = None
) -> Iterator[bytes]:
    """Lines that may count drafts, and the neighbours that matter, in order and each once; without
    line ends.
    """
    wanted = wanted or _wanted()
    # One buffer for the whole source: fresh pages would cost more than the search.
    buffer = bytearray(block + 2 * margin)
    view = memoryview(buffer)
    search = _Search(buffer, wanted.others)
    filled = 0
    searched = 0  # hits before this offset are done
    sent = 0  # lines before this offset are sent
    passed = 0  # the line before this offset holds a hit, and counts nothing
    while True:
        fresh = reader.readinto(view[filled : filled + block]) or 0
        filled += fresh
        # A hit near the end waits until the lines around it are here.
        limit = max(searched, filled - margin) if fresh else filled
        for hit in search.hits(searched, limit, filled):
            if hit >= max(sent, passed):
                line = buffer.rfind(b"\n", sent, hit) + 1 or sent
                end = _line_end(buffer, hit, filled)
                if not _holds(buffer[line:end], wanted.counts):
                    passed = end
                    continue
                first, sent = _zone(buffer, line, end, sent, filled)
                yield from (
                    row
                    for row in bytes(view[first:sent]).splitlines()
                    if _holds(row, wanted.speaks)
                )
        if not fresh:
            return
        cut = max(0, limit - margin)
        buffer[: filled - cut] = buffer[cut:filled]
        filled, searched = filled - cut, limit - cut
        sent, passed = max(0, sent - cut), max(0, passed - cut)


class _Search:
    """Finds seeds and other needles in a buffer."""

    def __init__(self, buffer: bytearray, others: Sequence[bytes]) -> None:
        self._buffer = buffer
        self._others = others
        self._text = np.frombuffer(buffer, dtype=np.uint8)
        self._found = bytearray(
            CHUNK + 1
        )  # bytes for `find`, which is memchr, and a mask for numpy
        self._mask = np.frombuffer(self._found, dtype=np.bool_)

    def hits(self, start: int, stop: int, filled: int) -> Iterator[int]:
        """Their offsets in [start, stop), in order; the text ends at `filled`."""
        found = self._found
        for low in range(start, stop, CHUNK):
            high = min(low + CHUNK, stop)
            size = min(high + 1, filled) - low
            pair = np.equal(self._text[low : low + size], ord("c"), out=self._mask[:size])
            pair[:-1] &= pair[1:]
            end = min(high - low, size - 1)
            own: list[int] = []
            at = -1
            for _ in range(_FEW):
                at = found.find(1, at + 1, end)
                if at < 0:
                    break
                if low + at and _SEED.match(self._buffer, low + at - 1, filled):
                    own.append(low + at)
            else:
                own += self._fitting(np.flatnonzero(pair[at + 1 : end]) + (low + at + 1), filled)
            yield from sorted(own + self._listed(low, high, filled)) if self._others else own

    def _listed(self, low: int, high: int, filled: int) -> list[int]:
        """Offsets of the needles without a seed; they are written in lower case by those who print
        them.
        """
        at = []
        for needle in self._others:
            place = self._buffer.find(needle, low, min(high + len(needle) - 1, filled))
            while place >= 0:
                at.append(place)
                place = self._buffer.find(needle, place + 1, min(high + len(needle) - 1, filled))
        return at

    def _fitting(self, pairs: np.ndarray[tuple[int], np.dtype[np.intp]], filled: int) -> list[int]:
        """The seeds among many pairs at once ('success' on every line of a log must not make it
        slow).
        """
        text = self._text
        before, third, fourth = (text[(pairs + i).clip(0, filled - 1)] for i in (-1, 2, 3))
        letter = ((third | 32) >= ord("a")) & ((third | 32) <= ord("z"))
        word = (third == ord("e")) & (fourth == ord("p"))
        return list(map(int, pairs[((before | 32) == ord("a")) & (word | ~letter)]))


def _holds(text: bytes | bytearray, words: Sequence[bytes]) -> bool:
    low = text.lower()
    return any(word in low for word in words)


def _zone(buffer: bytearray, line: int, end: int, sent: int, filled: int) -> tuple[int, int]:
    """Where the lines around that of a hit (from `line` to `end`) begin that are not sent yet, and
    where they end.
    """
    first, last = line, end
    for _ in range(LINES_BEFORE):
        if first <= sent:
            break
        first = buffer.rfind(b"\n", sent, first - 1) + 1 or sent
    for _ in range(LINES_AFTER):
        last = _line_end(buffer, last, filled)
    # A summary lists its positions on lines of their own.
    while buffer[last : min(last + 64, filled)].lstrip(b" \t").startswith(b"Position "):
        last = _line_end(buffer, last, filled)
    return first, last


def _line_end(buffer: bytearray, offset: int, filled: int) -> int:
    """Offset just past the line that holds `offset`."""
    return buffer.find(b"\n", offset, filled) + 1 or filled
