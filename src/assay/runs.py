"""Where assay keeps what is costly to make again: `ASSAY_CACHE`, else the user's cache directory."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from assay.errors import AssayError


def cache_dir(name: str) -> Path:
    """The folder `name` inside the cache, made if it is missing; AssayError where that cannot be."""
    root = os.environ.get("ASSAY_CACHE")
    if root is None:
        from platformdirs import user_cache_dir

        root = user_cache_dir("assay")
    folder = Path(root) / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AssayError(
            f"cannot make the cache folder {folder}: {error.strerror}",
            finding_id="server.cache",
            remedy="name a folder that can be written to by ASSAY_CACHE",
        ) from error
    return folder


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the whole new one."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as temporary:
        temporary.write(text)
    Path(temporary.name).replace(path)


# -----------------------------------------------------------------------------
# Folders in which a run keeps what it has scored: each is one run's at a time, or one would delete the other's.


class Claims:
    """The folders that this run has claimed. Use as a context manager; the system drops them with the process too."""

    def __init__(self) -> None:
        self._folders: dict[Path, Path] = {}
        self._locks: list[int] = []

    def __enter__(self) -> Claims:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def folder(self, wanted: Path) -> Path:
        """`wanted`, made if it is missing; where another run has it, a folder of this run's own, gone at its end."""
        if wanted not in self._folders:
            self._folders[wanted] = wanted if self._lock(wanted) else _private(wanted)
        return self._folders[wanted]

    def release(self) -> None:
        """Give the folders back. What is in those of other names cannot be gone on from, so it is deleted."""
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
