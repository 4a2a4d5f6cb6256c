"""Follow a log that grows, through rotation and truncation."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from assay.speculation.sources import Source, open_file

POLL_SECONDS = 0.5


def grow(
    name: str,
    add: Callable[[Source], None],
    until: float | None,
    sleep: Callable[[float], None],
    clock: Callable[[], float],
) -> Iterator[list[bytes]]:
    """Batches of new whole lines of a growing file, through rotation and truncation, or of standard
    input (`-`).

    What the file already holds is given to `add`.
    """
    return (
        _standard_input(until, clock)
        if name == "-"
        else _growing(Path(name), add, until, sleep, clock)
    )


def _growing(
    path: Path,
    add: Callable[[Source], None],
    until: float | None,
    sleep: Callable[[float], None],
    clock: Callable[[], float],
) -> Iterator[list[bytes]]:
    stream = open_file(path)
    try:
        growing = _WholeLines(stream)
        if os.fstat(stream.fileno()).st_size:
            add(Source(str(path), growing))
            yield []
        while until is None or clock() < until:
            lines = growing.lines()
            if lines:
                yield lines
            elif _replaced(path, stream):
                # What was written between the last look and the rename is still in the old file.
                yield growing.lines()
                stream.close()
                stream = open_file(path)
                growing = _WholeLines(stream)
            else:
                sleep(POLL_SECONDS)
    finally:
        stream.close()


class _WholeLines:
    """Reads a growing file up to its last whole line; the rest waits for its end."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._rest = b""
        self._ready = b""

    def read(self, size: int, /) -> bytes:
        """New whole lines, about `size` bytes of them; b'' where there are none yet."""
        while part := self._stream.read(size):
            data = self._rest + part
            cut = data.rfind(b"\n") + 1
            self._rest = data[cut:]
            if cut:
                return data[:cut]
        return b""

    def readinto(self, buffer: memoryview, /) -> int:
        """The same into `buffer`."""
        if not self._ready:
            self._ready = self.read(len(buffer))
        part, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)

    def lines(self) -> list[bytes]:
        """New whole lines."""
        return self.read(-1).splitlines()


def _replaced(path: Path, stream: BinaryIO) -> bool:
    """Whether the log was rotated (another file has its name) or truncated."""
    try:
        now = path.stat()
    except OSError:
        return False  # between the rename and the new file
    own = os.fstat(stream.fileno())
    return (now.st_dev, now.st_ino) != (own.st_dev, own.st_ino) or now.st_size < stream.tell()


def _standard_input(until: float | None, clock: Callable[[], float]) -> Iterator[list[bytes]]:
    """Lines of standard input in the batches in which they arrive."""
    rest = b""
    handle = sys.stdin.fileno()
    while until is None or (
        (left := until - clock()) > 0 and select.select([handle], [], [], left)[0]
    ):
        part = os.read(handle, 1 << 16)
        if not part:
            if rest:
                yield [rest]
            return
        *lines, rest = (rest + part).split(b"\n")
        yield lines
