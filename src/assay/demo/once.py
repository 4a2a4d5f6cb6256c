"""Something costly in the cache, built once, whole or not at all, by one process."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from assay.runs import cache_dir


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock `name` of the cache; a second process waits here. The system drops it with the
    process.
    """
    with (cache_dir("locks") / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache, made by `make(folder)` unless it is there.

    `make` fills a temporary folder beside it, which is renamed when it returns: what an interrupt
    or an error leaves behind is never taken for the real thing.
    """
    parent = cache_dir(str(Path(name).parent))
    final = parent / Path(name).name
    if final.exists():
        return final
    with locked(name.replace("/", "-")):
        if final.exists():
            return final
        temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=parent))
        try:
            temporary.chmod(0o755)  # mkdtemp makes it private
            make(temporary)
            temporary.rename(final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return final
