"""Open a file or standard input as one stream of UTF-8 bytes: plain, compressed or UTF-16."""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from assay.errors import AssayError
from assay.files import kind_of

HEAD = 4 << 20
"""Bytes kept from the start of a source; start-up messages are looked for in them."""

MOST_NULLS = 4 << 30
"""NULs at the start that are passed over."""

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bz2"),
    (b"\xfd7zXZ\x00", "xz"),
)

_UNREADABLE = ((b"\x28\xb5\x2f\xfd", "zstd"), (b"PK\x03\x04", "zip"), (b"\x04\x22\x4d\x18", "lz4"))

_HOST_PORT = re.compile(r"^[\w.-]+:\d{2,5}(?:/|$)")

_ROTATED = re.compile(r"^(.*?)(?:[.-](\d{1,4}))?(\.(?:gz|bz2|xz))?$")


class Stream(Protocol):
    """What a source is read from."""

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes; b'' only at the end."""
        ...

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill the start of `buffer`; returns the number of bytes."""
        ...


class Source:
    """A stream with its first bytes at hand. `read` starts at the beginning and ends with b''."""

    def __init__(self, name: str, stream: Stream) -> None:
        self.name = name
        self.size = 0
        self._stream = stream
        parts: list[bytes] = []
        held = nulls = 0
        while held < HEAD and (part := self._pull(HEAD - held)):
            if not parts:  # logrotate's copytruncate leaves NULs where the copied part was
                nulls += len(part) - len(part := part.lstrip(b"\0"))
                if nulls > MOST_NULLS:
                    break
            if part:
                parts.append(part)
                held += len(part)
        self.head = b"".join(parts)
        self.complete = held < HEAD
        self._offset = 0
        if nulls and not self.head.strip():
            raise _binary(name)
        _refuse_unreadable(name, self.head)

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes from where the last call ended."""
        if self._offset < len(self.head):
            part = self.head[self._offset : self._offset + size]
            self._offset += len(part)
        else:
            part = b"" if self.complete else self._pull(size)
        self.size += len(part)
        return part

    def readinto(self, buffer: memoryview, /) -> int:
        """The same into `buffer`, without a copy where the stream can."""
        if self._offset < len(self.head) or self.complete:
            part = self.read(len(buffer))
            buffer[: len(part)] = part
            return len(part)
        with self._named():
            size = self._stream.readinto(buffer) or 0
        self.size += size
        return size

    def _pull(self, size: int) -> bytes:
        with self._named():
            return self._stream.read(size)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Turn what goes wrong while reading into an error that names the source."""
        try:
            yield
        except EOFError as error:
            raise _truncated(self.name, "the compressed data end early") from error
        except (zlib.error, lzma.LZMAError) as error:
            raise _truncated(self.name, f"the compressed data are broken ({error})") from error
        except OSError as error:
            raise unreadable(self.name, error) from error


def open_source(name: str) -> Source:
    """The source called `name` on the command line: a file, or `-` for standard input."""
    stream: Any  # a buffered reader: `peek` is not in typing.IO
    if name == "-":
        shown, stream = "standard input", sys.stdin.buffer
    else:
        shown = name
        path = Path(name)
        if path.is_dir():
            raise AssayError(
                f"{name} is a directory",
                finding_id="speculation.source_unreadable",
                remedy="name the log files in it",
            )
        stream = open_file(path)
    try:
        start = stream.peek(8)
    except OSError as error:
        raise unreadable(shown, error) from error
    kind = next((kind for magic, kind in _MAGIC if start.startswith(magic)), None)
    foreign = next((kind for magic, kind in _UNREADABLE if start.startswith(magic)), None)
    if foreign:
        raise AssayError(
            f"{shown} is {foreign}-compressed, which assay does not read",
            finding_id="speculation.source_binary",
            remedy=f"decompress it first, or pipe it: {foreign} -dc FILE | assay spec -",
        )
    return Source(shown, _Recoded(_decompressed(stream, kind)))


def open_file(path: Path) -> BinaryIO:
    """A file opened without waiting: regular, or a pipe that the shell has already opened.

    Raises:
        AssayError: It is absent or unreadable, or a named pipe, a device or a socket.
    """
    given = str(path).startswith(("/dev/fd/", "/proc/self/fd/", "/dev/stdin"))
    try:
        kind = kind_of(path.stat().st_mode)
        if kind is None or given:
            return path.open("rb")
    except (OSError, ValueError) as error:
        raise unreadable(str(path), error) from error
    raise AssayError(
        f"{path} is {kind}, not a file",
        finding_id="speculation.source_unreadable",
        remedy=f"pipe it in: assay spec - < {path}",
    )


def in_time_order(names: Sequence[str]) -> list[str]:
    """`names` with the parts of one rotated log oldest first (`server.log.2.gz`, `server.log.1`,
    `server.log`).
    """
    bases: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        match = _ROTATED.match(name)
        if name == "-" or match is None:
            bases.setdefault(f"\0{name}", []).append((0, name))
            continue
        bases.setdefault(match[1], []).append((int(match[2] or 0), name))
    return [name for parts in bases.values() for _, name in sorted(parts, key=lambda p: -p[0])]


def _decompressed(stream: Any, kind: str | None) -> Any:
    match kind:
        case "gzip":
            return gzip.GzipFile(fileobj=stream)
        case "bz2":
            return bz2.BZ2File(stream)
        case "xz":
            return lzma.LZMAFile(stream)
    return stream


class _Recoded:
    """A stream of UTF-8, whether the file is UTF-8 or UTF-16 (as PowerShell writes)."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._decoder: codecs.IncrementalDecoder | None = None
        self._begun = False

    def read(self, size: int, /) -> bytes:
        """Up to about `size` bytes; b'' at the end."""
        while part := bytes(self._stream.read(size)):
            if not self._begun:
                self._begun = True
                encoding = _utf16(part[:4096])
                self._decoder = (
                    codecs.getincrementaldecoder(encoding)(errors="replace") if encoding else None
                )
            if self._decoder is None:
                return part
            text = self._decoder.decode(part).lstrip("\ufeff")
            if text:
                return text.encode("utf-8", "replace")
        return (
            self._decoder.decode(b"", final=True).encode("utf-8", "replace")
            if self._decoder
            else b""
        )

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the start of `buffer`: straight from the file, unless it has to be decoded."""
        if self._begun and self._decoder is None:
            return self._stream.readinto(buffer) or 0
        part = self.read(len(buffer) // 2)  # two bytes of UTF-16 become up to three
        buffer[: len(part)] = part
        return len(part)


def _utf16(start: bytes) -> str | None:
    """The UTF-16 flavour that `start` is written in; None for anything else."""
    if start.startswith(codecs.BOM_UTF16_LE):
        return "utf-16-le"
    if start.startswith(codecs.BOM_UTF16_BE):
        return "utf-16-be"
    half = len(start) // 2
    even, odd = start[0::2].count(0), start[1::2].count(0)
    if half >= 8 and max(even, odd) > 0.8 * half > 4 * min(even, odd):
        return "utf-16-le" if odd > even else "utf-16-be"
    return None


def _refuse_unreadable(name: str, head: bytes) -> None:
    if not head.strip(b" \t\r\n\xef\xbb\xbf"):
        raise AssayError(
            f"{name} is empty",
            finding_id="speculation.source_empty",
            remedy="check that the server writes its log there",
        )
    sample = re.sub(rb"\0{16,}", b"", head[:65536])
    control = sum(sample.count(bytes([c])) for c in range(32) if c not in (9, 10, 12, 13, 27, 8))
    # U+FFFD counts what a wrong encoding leaves behind; a multi-byte character cut by the slice is
    # at most one.
    broken = sample.decode("utf-8", "replace").count("\ufffd")
    if control > 0.02 * len(sample) or broken > 0.1 * len(sample) + 1:
        raise _binary(name)


def _binary(name: str) -> AssayError:
    return AssayError(
        f"{name} is binary, not a log, metrics page or JSON response",
        finding_id="speculation.source_binary",
        remedy="give the server's text log, its /metrics page or a JSON response",
    )


def _truncated(name: str, why: str) -> AssayError:
    return AssayError(
        f"{name}: {why}",
        finding_id="speculation.source_truncated",
        remedy="copy the file again, whole",
    )


def unreadable(name: str, error: OSError | ValueError) -> AssayError:
    """The error of a source that cannot be opened or read."""
    reason = getattr(error, "strerror", None) or str(error)
    return AssayError(
        f"cannot read {name}: {reason}",
        finding_id="speculation.source_unreadable",
        remedy=f"a server is written http://{name}"
        if _HOST_PORT.match(name)
        else "check the path and the permissions",
    )
