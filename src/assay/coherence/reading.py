"""Read one file of model output as text, in bounded memory, and say what was odd about it."""

from __future__ import annotations

import codecs
import os
import select
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from assay.errors import AssayError

MAX_BYTES = 16 * 2**20
"""Bytes of one file that are read; of a longer one the beginning is graded, and the report says so."""
FIFO_WAIT_S = 10.0
"""Seconds that a named pipe may stay silent."""
_ALLOWED_INVALID = 0.1
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


@dataclass(frozen=True)
class Reading:
    """The text of a file, and what was odd about its bytes."""

    text: str
    truncated: bool = False
    invalid_bytes: int = 0
    first_invalid: int | None = None
    """Byte offset of the first byte that is not UTF-8."""


def read_text(path: str) -> Reading:
    """The text in `path`, or on stdin for `-`. Raises `AssayError` for what holds no text."""
    try:
        data = sys.stdin.buffer.read(MAX_BYTES + 1) if path == "-" else _read_file(Path(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise unreadable(path, reason) from None
    return decode(data[:MAX_BYTES], path, truncated=len(data) > MAX_BYTES)


def decode(data: bytes, path: str, *, truncated: bool = False) -> Reading:
    """Bytes as text: UTF-8, with or without a byte order mark, or UTF-16 with one. Broken bytes become U+FFFD."""
    bom, encoding = next(((b, name) for b, name in _BOMS if data.startswith(b)), (b"", "utf-8"))
    data = data[len(bom) :]
    if encoding == "utf-8" and data.count(0) > max(8, len(data) // 50):
        raise unreadable(path, "a binary file, not text")
    decoder = codecs.getincrementaldecoder(encoding)("strict")
    try:
        return Reading(decoder.decode(data, final=not truncated), truncated)
    except UnicodeDecodeError as error:
        first = error.start
    text = codecs.getincrementaldecoder(encoding)("replace").decode(data, final=not truncated)
    invalid = text.count("\ufffd")
    if invalid > _ALLOWED_INVALID * len(text):
        raise unreadable(path, f"not UTF-8 text (first invalid byte at offset {first})")
    return Reading(text, truncated, invalid, first)


def _read_file(path: Path) -> bytes:
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(0, "a directory, not a file")
    if stat.S_ISFIFO(mode):
        return _read_fifo(path)
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def _read_fifo(path: Path) -> bytes:
    """Read a pipe to its end. A plain open would wait for a writer for ever."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        chunks: list[bytes] = []
        size = 0
        poll = select.poll()
        poll.register(fd, select.POLLIN | select.POLLHUP)
        while size <= MAX_BYTES:
            if not poll.poll(FIFO_WAIT_S * 1000):
                raise OSError(0, f"a named pipe to which nothing was written for {FIFO_WAIT_S:g} s")
            chunk = os.read(fd, 2**16)
            if not chunk:
                break
            chunks.append(chunk)
            size += len(chunk)
        return b"".join(chunks)
    finally:
        os.close(fd)


def unreadable(path: str, reason: str) -> AssayError:
    """The error for a file (`-` is stdin) that holds no text."""
    shown = "stdin" if path == "-" else path
    return AssayError(
        f"{shown}: {reason}",
        finding_id="coherence.unreadable",
        remedy="give a text file with one model output, or one chat-completion response as JSON",
        evidence={"path": path},
    )
