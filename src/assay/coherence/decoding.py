"""Read one file of model output in bounded memory, and its bytes as text.

What was odd about the bytes (broken ones, NULs) is kept beside the text.
"""

from __future__ import annotations

import codecs
import re
import sys
from dataclasses import dataclass

from assay.errors import AssayError
from assay.files import read_beginning

MAX_BYTES = 16 * 2**20
"""Bytes of one file that are read; of a longer one the beginning is graded, and the report says so.
"""
FIFO_WAIT_S = 10.0
"""Seconds that a named pipe may stay silent."""
UNREADABLE = "coherence.unreadable"
_REMEDY = "give a text file with one model output, or the body or stream that a server sent"
_ALLOWED_INVALID = 0.1
_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_HOLE = re.compile(rb"\A\0+|\0{16,}|\0+\Z")
_INNER_NUL = re.compile(
    rb"(?<=[^}\]\n\0])\0{1,3}(?=[^{\[\n\0])"
)  # elsewhere one may stand between two values
_CONTROL = re.compile(rb"[\x01-\x08\x0e-\x1a\x7f]")
LEAST_BESIDE_HOLES = 16


@dataclass(frozen=True)
class Reading:
    """The text of a file, and what was odd about its bytes."""

    text: str
    truncated: bool = False
    invalid_bytes: int = 0
    first_invalid: int | None = None
    """Byte offset of the first byte that is not UTF-8."""
    nul_bytes: int = 0
    """NUL bytes that were left out: holes that a log rotation or a crash leaves."""


def read_text(path: str) -> Reading:
    """Read the text in a file.

    Args:
        path: A regular file or a named pipe; `-` is stdin.

    Returns:
        The text of the first `MAX_BYTES`, and what was odd about the bytes.

    Raises:
        AssayError: The file cannot be read, or holds no text.
    """
    if path != "-":
        data, longer = read_beginning(
            path,
            MAX_BYTES,
            what="a text to grade",
            finding_id=UNREADABLE,
            remedy=_REMEDY,
            pipe_wait_s=FIFO_WAIT_S,
        )
        return decode(data, path, truncated=longer)
    try:
        data = sys.stdin.buffer.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise unreadable(path, getattr(error, "strerror", None) or str(error)) from None
    return decode(data[:MAX_BYTES], path, truncated=len(data) > MAX_BYTES)


def decode(data: bytes, path: str, *, truncated: bool = False) -> Reading:
    """Bytes as text: UTF-8, with or without a byte order mark, or UTF-16 with one. Broken bytes
    become U+FFFD.
    """
    bom, encoding = next(((b, name) for b, name in _BOMS if data.startswith(b)), (b"", "utf-8"))
    data = data[len(bom) :]
    holes = 0
    if encoding == "utf-8" and 0 in data:
        whole = _INNER_NUL.sub(b"", _HOLE.sub(b"", data))
        holes = len(data) - len(whole)
        if holes and (len(whole) < LEAST_BESIDE_HOLES or _CONTROL.search(whole)):
            raise unreadable(path, "a binary file, not text")
        if whole.count(0) > max(8, len(whole) // 50):
            raise unreadable(path, "a binary file, not text")
        data = whole
    decoder = codecs.getincrementaldecoder(encoding)("strict")
    try:
        return Reading(decoder.decode(data, final=not truncated), truncated, nul_bytes=holes)
    except UnicodeDecodeError as error:
        first = error.start
    text = codecs.getincrementaldecoder(encoding)("replace").decode(data, final=not truncated)
    invalid = text.count("\ufffd")
    if invalid > _ALLOWED_INVALID * len(text):
        raise unreadable(path, f"not UTF-8 text (first invalid byte at offset {first})")
    return Reading(text, truncated, invalid, first, holes)


def unreadable(path: str, reason: str) -> AssayError:
    """The error for a file (`-` is stdin) that holds no text."""
    shown = "stdin" if path == "-" else path
    return AssayError(
        f"{shown}: {reason}", finding_id=UNREADABLE, remedy=_REMEDY, evidence={"path": path}
    )
