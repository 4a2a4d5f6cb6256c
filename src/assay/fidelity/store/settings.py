"""The settings with which a reference was stored, which its candidates have to share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass
from assay.fidelity.llama_base import open_base
from assay.fidelity.store.manifest import StoreHeader, read_manifest
from assay.fidelity.store.reader import stored_path


def stored_settings(spec: str) -> dict[str, Any]:
    """`windows`, `length`, `scored` and `path` of what `run:PATH` names; AssayError where it cannot
    be read.
    """
    path = stored_path(spec)
    if path.is_file():
        base = open_base(path)
        return _settings(len(base.tokens), base.length, base.scored_from, "prefill")
    manifest = read_manifest(path)
    header = manifest.header
    return stored_settings_of(header, len(manifest.windows))


def stored_settings_of(header: StoreHeader, windows: int) -> dict[str, Any]:
    """The same of a header."""
    return _settings(windows, header.length, header.scored_from, header.path)


def _settings(windows: int, length: int, scored_from: int, path: str) -> dict[str, Any]:
    scored = "all" if scored_from == 1 else "second-half"
    return {"windows": windows, "length": length, "scored": scored, "path": path}
