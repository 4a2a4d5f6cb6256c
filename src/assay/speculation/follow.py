"""Follow a growing log, through rotation and truncation, and say how the head is doing whenever it changes."""

from __future__ import annotations

import math
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from assay.errors import AssayError, UsageError
from assay.speculation.combine import Evidence, combine
from assay.speculation.examine import Examined, Options, is_url, judge_run
from assay.speculation.health import Assessment, assess
from assay.speculation.reading import Reading
from assay.speculation.sources import Source
from assay.verdict import Report

POLL_SECONDS = 0.5
SAY_SECONDS = 10.0
"""A line is printed whenever the health changes, and otherwise at most this often."""


def follow(
    name: str,
    options: Options,
    seconds: float | None = None,
    say: Callable[[str], None] | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Read `name` (a file, or `-`) as it grows, until interrupted, until its end (`-`), or for `seconds`."""
    if is_url(name):
        raise UsageError(
            "--follow reads a log; a server is watched with --interval", finding_id="speculation.usage"
        )
    tell = say or (lambda text: print(text, file=sys.stderr, flush=True))
    reading = Reading()
    interrupted = False
    until = None if seconds is None else clock() + seconds
    health, told = None, -math.inf
    try:
        batches = (
            _standard_input(until, clock) if name == "-" else _file(Path(name), reading, until, sleep, clock)
        )
        for batch in batches:
            fresh = [o for raw in batch for o in reading.line(raw)]
            if not fresh:
                continue
            assessment = assess(evidence := combine(reading.settled()))
            if assessment.health is not health or clock() - told >= SAY_SECONDS:
                health, told = assessment.health, clock()
                tell(_status(evidence, assessment, fresh[-1].time))
    except KeyboardInterrupt:
        interrupted = True
    run = Examined(reading, combine(reading.settled()))
    report = judge_run(run, [name], options)
    return replace(report, interrupted=interrupted)


def _status(evidence: Evidence, assessment: Assessment, when: str | None) -> str:
    """One line on the run so far."""
    length = evidence.record.tokens_per_step
    tokens = "" if length is None else f", {length:.2f} tokens per step"
    return f"{when or time.strftime('%H:%M:%S')}  {assessment.health.value}: {assessment.reason}{tokens}"


def _file(
    path: Path,
    reading: Reading,
    until: float | None,
    sleep: Callable[[float], None],
    clock: Callable[[], float],
) -> Iterator[list[bytes]]:
    """Batches of new whole lines. What the file already holds is read first, at full speed."""
    stream = _open(path)
    try:
        growing = _WholeLines(stream)
        if os.fstat(stream.fileno()).st_size:
            reading.add(Source(str(path), growing))
            yield []
        while until is None or clock() < until:
            lines = growing.lines()
            if lines:
                yield lines
                continue
            if _replaced(path, stream):
                # What was written between the last look and the rename is still in the old file.
                yield growing.lines()
                stream.close()
                stream = _open(path)
                growing = _WholeLines(stream)
                continue
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


def _arrives(seconds: float) -> bool:
    """Whether something can be read from standard input within `seconds`."""
    return seconds > 0 and bool(select.select([sys.stdin.fileno()], [], [], seconds)[0])


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise AssayError(
            f"cannot follow {path}: {error.strerror}",
            finding_id="speculation.source_unreadable",
            remedy="check the path and the permissions",
        ) from error


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
    while True:
        if until is not None and not _arrives(until - clock()):
            return
        part = os.read(sys.stdin.fileno(), 1 << 16)
        if not part:
            break
        data = rest + part
        cut = data.rfind(b"\n") + 1
        rest = data[cut:]
        yield data[:cut].splitlines()
    if rest:
        yield [rest]
