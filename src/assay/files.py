"""Files from outside, read within bounds: regular files only, and no more of them than is wanted.

A named pipe waits for a writer for ever, `/dev/zero` has no end, a socket cannot be read: whoever
names a file on a command line or in a contract could otherwise stop a program or fill its memory.
Every failure is an `AssayError` with one clear line.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from pathlib import Path
from typing import Any, BinaryIO

from assay.bounded_json import loads
from assay.errors import AssayError

UNREADABLE = "file.unreadable"
"""The finding of a file that cannot be read, unless the caller names its own."""
MOST_TEXT_BYTES = 4 << 30
"""The longest text that is read whole."""
MOST_JSON_BYTES = 64 << 20
"""The longest JSON file that is read, unless the caller sets another limit."""
_PIECE, _CHUNK = 1 << 16, 1 << 24


def read_bounded(
    path: str | os.PathLike[str],
    most_bytes: int,
    *,
    what: str = "the file",
    finding_id: str = UNREADABLE,
    remedy: str = "",
    pipe_wait_s: float | None = None,
) -> bytes:
    """Read the whole of a regular file.

    Args:
        path: The file.
        most_bytes: The longest file that is read.
        what: What the file is to the user, for the message: "the contract".
        finding_id: The finding that the error becomes.
        remedy: What the user should do about a file that cannot be read.
        pipe_wait_s: Seconds that a named pipe may stay silent; None refuses pipes.

    Returns:
        The bytes of the file, at most `most_bytes`.

    Raises:
        AssayError: The file is absent, no regular file, unreadable or too long.
    """
    data, longer = read_beginning(
        path, most_bytes, what=what, finding_id=finding_id, remedy=remedy, pipe_wait_s=pipe_wait_s
    )
    if longer:
        reason = f"it has more than {most_bytes:,} bytes, the most that {what} may have"
        raise _error(path, reason, finding_id, remedy)
    return data


def read_beginning(
    path: str | os.PathLike[str],
    most_bytes: int,
    *,
    what: str = "the file",
    finding_id: str = UNREADABLE,
    remedy: str = "",
    pipe_wait_s: float | None = None,
) -> tuple[bytes, bool]:
    """Read the first `most_bytes` of a regular file. The arguments are those of `read_bounded`.

    Returns:
        The bytes, and whether the file goes on after them.

    Raises:
        AssayError: The file is absent, no regular file or unreadable.
    """
    try:
        with _opened(path, what, pipe_wait_s is not None) as file:
            if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
                data = _from_pipe(file.fileno(), most_bytes + 1, pipe_wait_s or 0.0)
            else:
                data = _at_most(file, most_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        reason = getattr(error, "strerror", None) or str(error)
        raise _error(path, reason, finding_id, remedy) from None
    return data[:most_bytes], len(data) > most_bytes


def open_regular(
    path: str | os.PathLike[str],
    *,
    what: str = "the file",
    finding_id: str = UNREADABLE,
    remedy: str = "",
) -> BinaryIO:
    """Open a regular file to read its bytes piece by piece, for a caller that bounds them itself.

    Args: As for `read_bounded`.

    Returns:
        The open file; use it in a `with` statement.

    Raises:
        AssayError: The file is absent, no regular file or unreadable.
    """
    try:
        return _opened(path, what, pipes=False)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _error(path, reason, finding_id, remedy) from None


def read_json(
    path: str | os.PathLike[str],
    *,
    most_bytes: int = MOST_JSON_BYTES,
    what: str = "the JSON file",
    finding_id: str = UNREADABLE,
    remedy: str = "",
) -> Any:
    """Read one JSON value from a regular file, within the bounds of `bounded_json`.

    Args: As for `read_bounded`.

    Returns:
        The value, as `json.loads` gives it.

    Raises:
        AssayError: The file cannot be read, or holds no JSON value within the bounds.
    """
    data = read_bounded(path, most_bytes, what=what, finding_id=finding_id, remedy=remedy)
    try:
        return loads(data)
    except ValueError as error:  # no JSON, no UTF-8, or out of bounds
        raise _error(path, f"it holds no JSON that can be read: {error}", finding_id, remedy) from (
            None
        )


def bytes_of(path: str | os.PathLike[str], most_bytes: int = MOST_TEXT_BYTES) -> bytes:
    """The whole of a regular file, for a caller that words the error itself.

    Raises:
        OSError: The file is absent, no regular file, unreadable or longer than `most_bytes`.
    """
    with _opened(path, "it", pipes=False) as file:
        data = _at_most(file, most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", os.fspath(path))
    return data


def json_of(path: str | os.PathLike[str], most_bytes: int = MOST_JSON_BYTES) -> Any:
    """The JSON value in a regular file, for a caller that words the error itself.

    Raises:
        OSError: As `bytes_of`.
        ValueError: The file holds no JSON value within the bounds of `bounded_json`.
    """
    return loads(bytes_of(path, most_bytes))


def kind_of(mode: int) -> str | None:
    """What a file that is not regular is, in words, by its mode; None for a regular file.

    >>> import stat
    >>> kind_of(stat.S_IFIFO | 0o600), kind_of(stat.S_IFREG)
    ('a named pipe', None)
    """
    if stat.S_ISREG(mode):
        return None
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")


def _opened(path: str | os.PathLike[str], what: str, pipes: bool) -> BinaryIO:
    """The file, opened without waiting. Its kind is looked at before it is opened and after."""
    _refuse_kind(Path(path).stat().st_mode, what, pipes)
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        _refuse_kind(os.fstat(file.fileno()).st_mode, what, pipes)
    except OSError:
        file.close()
        raise
    return file


def _refuse_kind(mode: int, what: str, pipes: bool) -> None:
    kind = kind_of(mode)
    if kind and not (pipes and stat.S_ISFIFO(mode)):
        raise OSError(0, f"it is {kind}, and {what} must be a regular file")


def _at_most(file: BinaryIO, most: int) -> bytes:
    """At most `most` bytes; memory grows with what is there, not with what would be allowed."""
    chunks: list[bytes] = []
    while most > 0 and (chunk := file.read(min(most, _CHUNK))):
        chunks.append(chunk)
        most -= len(chunk)
    return b"".join(chunks)


def _from_pipe(fd: int, most: int, wait_s: float) -> bytes:
    """At most `most` bytes of a pipe, up to its end or to a silence of `wait_s` seconds."""
    chunks: list[bytes] = []
    size = 0
    poll = select.poll()
    poll.register(fd, select.POLLIN | select.POLLHUP)
    while size < most:
        if not poll.poll(wait_s * 1000):
            raise OSError(0, f"a named pipe to which nothing was written for {wait_s:g} s")
        chunk = os.read(fd, min(_PIECE, most - size))
        if not chunk:
            break
        chunks.append(chunk)
        size += len(chunk)
    return b"".join(chunks)


def _error(path: str | os.PathLike[str], reason: str, finding_id: str, remedy: str) -> AssayError:
    shown = str(Path(os.fsdecode(path)))
    return AssayError(
        f"{shown}: {reason}", finding_id=finding_id, remedy=remedy, evidence={"path": shown}
    )
