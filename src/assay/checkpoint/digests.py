"""Hash files in parallel: sha256, and git's blob id where that is what the Hub gives.

One thread per file (hashlib releases the interpreter lock), the largest file first so that no core idles at the end.
Digests are remembered, see `digest_cache`; a second run hashes only what changed.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from assay.checkpoint.digest_cache import DigestCache

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


def hash_stream(path: Path, size: int, progress: Progress, stop: threading.Event) -> tuple[str, str]:
    """(sha256, git blob id) of a file. The blob id is sha1 over `blob SIZE\\0` and the bytes.

    A large file gets no blob id (an empty string): the Hub stores it by sha256.
    """
    sha256 = hashlib.sha256()
    git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False) if size <= MAX_GIT_BYTES else None
    buffer = bytearray(min(BLOCK, max(size, 1)))
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as stream:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := stream.readinto(buffer):
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
    """Put the digest of each (name, path, size) into `digests`; an unreadable file gets a problem, not an exception.

    On an interrupt the digests finished so far are in `digests` and in `cache`, so the next run goes on there.
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
    started = cache.now()
    sha256, git = hash_stream(path, before.st_size, progress, stop)
    after = path.stat()
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        return Digest(problem="it changed while it was being read")
    cache.put(path, before, started, sha256, git)
    return Digest(sha256, git)
