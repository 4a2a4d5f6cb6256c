"""One process at a time works on a run; a second one waits or is told."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType


class RunLock:
    """The folders that this run has claimed. Use as a context manager; the system drops them with
    the process too.
    """

    def __init__(self) -> None:
        self._folders: dict[Path, Path] = {}
        self._locks: list[int] = []

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def folder(self, wanted: Path) -> Path:
        """`wanted`, made if it is missing; where another run has it, a folder of this run's own,
        gone at its end.
        """
        if wanted not in self._folders:
            self._folders[wanted] = wanted if self._lock(wanted) else _private(wanted)
        return self._folders[wanted]

    def release(self) -> None:
        """Give the folders back. What is in those of other names cannot be gone on from, so it is
        deleted.
        """
        for wanted, folder in self._folders.items():
            if folder != wanted:
                shutil.rmtree(folder, ignore_errors=True)
        for lock in self._locks:
            os.close(lock)
        self._folders, self._locks = {}, []

    def _lock(self, folder: Path) -> bool:
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                lock = os.open(folder, os.O_RDONLY)
            except FileNotFoundError:  # deleted by its owner a moment ago
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                return False
            if _is_at(folder, lock):
                self._locks.append(lock)
                return True
            os.close(lock)  # deleted by its owner before the lock was ours


def _is_at(folder: Path, lock: int) -> bool:
    try:
        return os.path.samestat(folder.stat(), os.fstat(lock))
    except FileNotFoundError:
        return False


def _private(wanted: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"{wanted.name}.", dir=wanted.parent))
