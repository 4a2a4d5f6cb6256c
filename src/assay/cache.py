"""Where assay keeps what is costly to make again: `ASSAY_CACHE`, else the user's cache directory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

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
