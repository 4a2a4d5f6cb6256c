"""Something costly in the cache, built once, whole or not at all, by one process."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from assay.errors import AssayError
from assay.runs import cache_dir


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock `name` of the cache; a second process waits here. The system drops it with the
    process.
    """
    lock = cache_dir("locks") / f"{name}.lock"
    try:
        file = lock.open("w")
    except OSError as error:
        raise _unwritable(lock.parent, error) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache, made by `make(folder)` unless it is there.

    `make` fills a temporary folder beside it, which is renamed when it returns: what an interrupt
    or an error leaves behind is never taken for the real thing.
    """
    parent = cache_dir(str(Path(name).parent))
    final = parent / Path(name).name
    if _is_made(final):
        return final
    with locked(name.replace("/", "-")):
        if _is_made(final):
            return final
        try:
            temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=parent))
        except OSError as error:
            raise _unwritable(parent, error) from error
        try:
            temporary.chmod(0o755)  # mkdtemp makes it private
            make(temporary)
            temporary.rename(final)
        except AssayError:
            raise
        except Exception as error:
            # A library that writes for `make` may have an error type of its own.
            if os.strerror(errno.ENOSPC) in str(error):
                raise _unwritable(parent, OSError(errno.ENOSPC, "no space left")) from error
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return final


def _unwritable(folder: Path, error: OSError) -> AssayError:
    return AssayError(
        f"the cache folder {folder} cannot be written: {error.strerror}",
        finding_id="server.cache",
        remedy="make room, or name a folder of your own by ASSAY_CACHE",
    )


def _is_made(folder: Path) -> bool:
    """Whether the folder holds something: an empty one is what another program left."""
    return folder.is_dir() and any(folder.iterdir())
