"""Digests that were computed before, by path, size, modification time, inode and change time.

The change time is in the key because a file's owner can set the modification time back, but not that one. As in
git's index, a file that was written in the very moment of hashing is not remembered: a later change within the
clock's granularity would look the same.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from pathlib import Path

GRANULARITY_NS = 50_000_000
"""Generous bound on how coarse a file system's clock is; Linux' own tick is 1 to 10 ms."""
WORTH_BYTES = 1 << 20
"""A smaller file is hashed faster than its digest is stored."""

_SCHEMA = """CREATE TABLE IF NOT EXISTS digest (
    path TEXT PRIMARY KEY, size INTEGER, mtime INTEGER, inode INTEGER, ctime INTEGER, sha256 TEXT, git TEXT)"""


class DigestCache:
    """A table of digests in one SQLite file; without a file it remembers nothing. Safe to use from threads."""

    def __init__(self, file: Path | None) -> None:
        self._lock = threading.Lock()
        self._table: sqlite3.Connection | None = None
        if file is None:
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._table = sqlite3.connect(file, check_same_thread=False, isolation_level=None, timeout=10)
            self._table.execute(_SCHEMA)
        except (OSError, sqlite3.Error):
            self._table = None  # a cache that cannot be kept costs time, not correctness

    def __enter__(self) -> DigestCache:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    @staticmethod
    def default_file() -> Path:
        """Where the table lies unless told otherwise (`ASSAY_CACHE` moves it)."""
        import platformdirs

        return Path(os.environ.get("ASSAY_CACHE") or platformdirs.user_cache_dir("assay")) / "digests.sqlite"

    @staticmethod
    def now() -> int:
        """The wall clock in nanoseconds, as file times count it."""
        return time.time_ns()

    def get(self, path: Path, status: os.stat_result) -> tuple[str, str] | None:
        """(sha256, git blob id) if the file is the one that was hashed."""
        if self._table is None:
            return None
        try:
            with self._lock:
                row = self._table.execute(
                    "SELECT sha256, git FROM digest WHERE path=? AND size=? AND mtime=? AND inode=? AND ctime=?",
                    _key(path, status),
                ).fetchone()
        except sqlite3.Error:
            return None
        return (row[0], row[1]) if row else None

    def look(self, path: Path) -> tuple[str, str] | None:
        """Like `get`, for a file whose state is not known yet."""
        try:
            return self.get(path, path.stat())
        except OSError:
            return None

    def put(self, path: Path, status: os.stat_result, started: int, sha256: str, git: str) -> None:
        """Remember digests of a file whose hashing began at `started`."""
        if self._table is None or status.st_size < WORTH_BYTES:
            return
        if max(status.st_mtime_ns, status.st_ctime_ns) > started - GRANULARITY_NS:
            return
        try:
            with self._lock:
                self._table.execute(
                    "INSERT OR REPLACE INTO digest VALUES (?,?,?,?,?,?,?)", (*_key(path, status), sha256, git)
                )
        except sqlite3.Error:
            return

    def close(self) -> None:
        """Release the file."""
        if self._table is not None:
            self._table.close()
            self._table = None


def _key(path: Path, status: os.stat_result) -> tuple[str, int, int, int, int]:
    inode = status.st_ino & 0x7FFF_FFFF_FFFF_FFFF
    return os.fspath(path.absolute()), status.st_size, status.st_mtime_ns, inode, status.st_ctime_ns
