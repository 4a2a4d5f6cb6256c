"""Find the few lines that matter in a log of any size, at the speed of reading it.

Every line that counts drafts, of every engine, contains `accep` or `#acc`. Both hold the letters `cc`, a rare pair
that numpy finds at memory speed. The lines around such a line are kept too, since engines put the engine's number
or the speed on a line of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

BLOCK = 1 << 20
CHUNK = 1 << 17
"""Bytes searched at a time: what stays in the processor's cache."""
MARGIN = 1 << 16
"""A line is sure to be read whole up to this length; a longer one is cut."""
LINES_BEFORE = 4
LINES_AFTER = 1

_NEIGHBOURS = re.compile(rb"ccep|#acc|throughput:|eval time|draft|n_predict|Position ", re.I)
"""What a line needs, itself a hit or beside one, to say anything."""


class ByteReader(Protocol):
    """A stream of bytes; `read(n)` may return fewer, and b'' only at the end."""

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes."""
        ...


def interesting_lines(reader: ByteReader, block: int = BLOCK, margin: int = MARGIN) -> Iterator[bytes]:
    """Lines that may count drafts, and the neighbours that matter, in order and each once; without line ends."""
    import numpy as np

    mask = np.empty(CHUNK + 1, dtype=np.bool_)
    buffer = b""
    searched = 0  # hits before this offset are done
    sent = 0  # lines before this offset are sent
    while True:
        fresh = reader.read(block)
        buffer = buffer + fresh if buffer else fresh
        # A hit near the end waits until the lines around it are here.
        limit = max(searched, len(buffer) - margin) if fresh else len(buffer)
        for hit in _hits(buffer, searched, limit, mask):
            if hit >= sent:
                first, sent = _zone(buffer, hit, sent)
                yield from (row for row in buffer[first:sent].splitlines() if _NEIGHBOURS.search(row))
        if not fresh:
            return
        cut = max(0, limit - margin)
        buffer = buffer[cut:]
        searched, sent = limit - cut, max(0, sent - cut)


def _hits(
    buffer: bytes, start: int, stop: int, mask: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> Iterator[int]:
    """Offsets in [start, stop) of the `cc` in 'accep', 'Accep' or '#acc'; `mask` is scratch space for one chunk."""
    import numpy as np

    view: np.ndarray[tuple[int], np.dtype[np.uint8]] = np.frombuffer(buffer, dtype=np.uint8)
    for low in range(start, stop, CHUNK):
        high = min(low + CHUNK, stop)
        part = view[low : high + 1]
        pair = np.equal(part, ord("c"), out=mask[: len(part)])
        pair[:-1] &= pair[1:]
        for hit in (np.flatnonzero(pair[: high - low]) + low).tolist():
            if buffer[hit + 2 : hit + 4] == b"ep" or buffer[max(0, hit - 2) : hit] == b"#a":
                yield hit


def _zone(buffer: bytes, hit: int, sent: int) -> tuple[int, int]:
    """Offsets of the lines around `hit` that are not sent yet."""
    first = buffer.rfind(b"\n", sent, hit) + 1 or sent
    for _ in range(LINES_BEFORE):
        if first <= sent:
            break
        first = buffer.rfind(b"\n", sent, first - 1) + 1 or sent
    last = _line_end(buffer, hit)
    for _ in range(LINES_AFTER):
        last = _line_end(buffer, last)
    # A summary lists its positions on lines of their own.
    while buffer[last : last + 64].lstrip(b" \t").startswith(b"Position "):
        last = _line_end(buffer, last)
    return first, last


def _line_end(buffer: bytes, offset: int) -> int:
    """Offset just past the line that holds `offset`."""
    return buffer.find(b"\n", offset) + 1 or len(buffer)
