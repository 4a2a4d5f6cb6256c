"""The tensor files of a stored reference, each checked against its hash as it is read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from assay.errors import AssayError

if TYPE_CHECKING:
    import torch
from assay.fidelity.store.manifest import StoredFile, damaged


def write_tensors(folder: Path, kind: str, tensors: Mapping[str, torch.Tensor]) -> StoredFile:
    """Write `folder`/`kind`/SHA.safetensors, whole or not at all; a file that is there already is
    left alone.
    """
    from safetensors.torch import save

    raw = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
    digest = hashlib.sha256(raw).hexdigest()
    stored = StoredFile(f"{kind}/{digest}.safetensors", digest, len(raw))
    path = folder / stored.file
    if not is_whole(folder, stored):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        try:
            with part.open("wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise AssayError(
                f"cannot write {path}: {error.strerror}",
                finding_id="fidelity.store_unwritable",
                remedy="make room, or give another folder; the windows stored so far are kept",
            ) from error
    return stored


def read_tensors(folder: Path, stored: StoredFile) -> dict[str, torch.Tensor]:
    """The tensors of a file, checked first; AssayError names it where it is missing or has
    changed.
    """
    from safetensors.torch import load

    path = folder / stored.file
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error.strerror})") from error
    if len(raw) != stored.bytes:
        raise damaged(path, f"it has {len(raw):,} bytes in place of {stored.bytes:,}")
    if hashlib.sha256(raw).hexdigest() != stored.sha256:
        raise damaged(path, "its SHA-256 is not the one that was stored")
    tensors: dict[str, torch.Tensor] = load(raw)
    return tensors


def is_whole(folder: Path, stored: StoredFile) -> bool:
    """Whether the file is there with the right content."""
    path = folder / stored.file
    try:
        if path.stat().st_size != stored.bytes:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == stored.sha256
    except OSError:
        return False
