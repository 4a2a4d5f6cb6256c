"""Hash files in parallel, and remember the digests.

sha256, and git's blob id where the Hub gives that. One thread hashes one file (hashlib releases the
interpreter lock), the largest file first so that no core idles at the end.

Digests are remembered by path, size, modification time, inode and change time. A file's owner can
set the modification time back, but not the change time. As in git's index, a file that was written
in the very moment of hashing is not remembered: a later change within the clock's granularity would
look the same.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from assay.errors import AssayError
from assay.files import read_beginning
from assay.runs import Kept

WEIGHTS = (".safetensors", ".gguf")

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5", ".onnx", ".npz")


def read_bounded(path: Path, most: int) -> bytes:
    """Read a regular file of at most `most` bytes.

    Raises:
        OSError: The file is absent, no regular file, unreadable or longer.
    """
    try:
        data, longer = read_beginning(path, most)
    except AssayError as error:
        raise OSError(errno.EINVAL, str(error).removeprefix(f"{path}: ")) from error
    if longer:
        raise OSError(errno.EFBIG, f"it is longer than {most} bytes")
    return data


GRANULARITY_NS = 50_000_000
"""Generous bound on how coarse a file system's clock is; Linux' own tick is 1 to 10 ms."""

WORTH_BYTES = 1 << 20
"""A smaller file is hashed faster than its digest is stored."""


class DigestCache:
    """Digests in a folder of the cache (`assay.runs.Kept`); without a folder it remembers nothing.
    Safe to use from threads.
    """

    def __init__(self, folder: Path | None) -> None:
        self._kept = Kept(folder) if folder else None

    def get(self, path: Path, status: os.stat_result) -> tuple[str, str] | None:
        """(sha256, git blob id) if the file is the one that was hashed."""
        known = self._kept.get(_key(path, status)) if self._kept else None
        return None if known is None else (known["sha256"], known["git"])

    def look(self, path: Path) -> tuple[str, str] | None:
        """Like `get`, for a file whose state is not known yet."""
        try:
            return self.get(path, path.stat())
        except OSError:
            return None

    def put(self, path: Path, status: os.stat_result, started: int, sha256: str, git: str) -> None:
        """Remember digests of a file whose hashing began at `started`."""
        if self._kept is None or status.st_size < WORTH_BYTES:
            return
        if max(status.st_mtime_ns, status.st_ctime_ns) > started - GRANULARITY_NS:
            return
        self._kept.put(_key(path, status), {"sha256": sha256, "git": git})


def _key(path: Path, status: os.stat_result) -> list[str | int]:
    return [
        os.fspath(path.absolute()),
        status.st_size,
        status.st_mtime_ns,
        status.st_ino,
        status.st_ctime_ns,
    ]


BLOCK = 1 << 20

Progress = Callable[[int], None]
"""Called with the number of bytes just read, from several threads."""


@dataclass(frozen=True)
class Digest:
    """The digests of one file, or the reason why it could not be read."""

    sha256: str | None = None
    git_sha1: str | None = None
    cached: bool = False
    problem: str | None = None


def hash_stream(
    path: Path, size: int, progress: Progress, stop: threading.Event
) -> tuple[str, str]:
    """(sha256, git blob id) of a file. The blob id is sha1 over `blob SIZE\\0` and the bytes.

    A large file gets no blob id (an empty string): the Hub stores it by sha256.
    """
    sha256 = hashlib.sha256()
    git = (
        hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False) if size <= MAX_GIT_BYTES else None
    )
    buffer = bytearray(min(BLOCK, max(size, 1)))
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as stream:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        read = 0
        while count := stream.readinto(buffer):
            read += count
            if read > size + BLOCK:  # a file that grows without end, or a view of the system
                raise OSError(errno.EFBIG, f"it is longer than its {size} bytes")
            sha256.update(view[:count])
            if git is not None:
                git.update(view[:count])
            progress(count)
            if stop.is_set():
                raise InterruptedError
    return sha256.hexdigest(), git.hexdigest() if git is not None else ""


MAX_GIT_BYTES = 64 << 20
"""Files above this size are never stored as plain git blobs (the Hub's own limit is 10 MB)."""


def hash_bytes(data: bytes) -> Digest:
    """Digests of bytes that are already in memory."""
    git = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
    return Digest(hashlib.sha256(data).hexdigest(), git.hexdigest())


def hash_files(
    files: Sequence[tuple[str, Path, int]],
    cache: DigestCache,
    digests: dict[str, Digest],
    progress: Progress = lambda count: None,
    workers: int | None = None,
) -> None:
    """Put the digest of each (name, path, size) into `digests`; an unreadable file gets a problem,
    not an exception.

    On an interrupt the digests finished so far are in `digests` and in `cache`, so the next run
    goes on there.
    """
    stop = threading.Event()

    def one(item: tuple[str, Path, int]) -> None:
        name, path, size = item
        try:
            digests[name] = _hash_or_remember(path, size, cache, progress, stop)
        except InterruptedError:
            return
        except OSError as error:
            digests[name] = Digest(problem=error.strerror or str(error))

    ordered = sorted(files, key=lambda item: -item[2])
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        try:
            list(pool.map(one, ordered))
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _hash_or_remember(
    path: Path, size: int, cache: DigestCache, progress: Progress, stop: threading.Event
) -> Digest:
    before = path.stat()
    known = cache.get(path, before)
    if known is not None:
        progress(size)
        return Digest(*known, cached=True)
    started = time.time_ns()
    sha256, git = hash_stream(path, before.st_size, progress, stop)
    after = path.stat()
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        return Digest(problem="it changed while it was being read")
    cache.put(path, before, started, sha256, git)
    return Digest(sha256, git)
