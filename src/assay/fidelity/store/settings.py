"""With what a stored reference was scored, which is how its candidates have to be scored too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from assay.errors import UsageError
from assay.fidelity.store.llama_base import open_base
from assay.fidelity.store.manifest import read_manifest


def stored_path(spec: str) -> Path:
    """The folder or file of `run:PATH`; UsageError where it names none."""
    name = spec.removeprefix("run:")
    if not name:
        raise UsageError(
            "run: names no stored reference",
            remedy="write run:DIR, with the folder that assay reference wrote",
            finding_id="fidelity.usage",
        )
    return Path(name).expanduser()


def stored_settings(spec: str) -> dict[str, Any]:
    """`windows`, `length`, `scored` and `path` of what `run:PATH` names; AssayError where it cannot be read."""
    path = stored_path(spec)
    if path.is_file():
        base = open_base(path)
        return _settings(len(base.tokens), base.length, base.scored_from, "prefill")
    manifest = read_manifest(path)
    header = manifest.header
    return _settings(len(manifest.windows), header.length, header.scored_from, header.path)


def _settings(windows: int, length: int, scored_from: int, path: str) -> dict[str, Any]:
    scored = "all" if scored_from == 1 else "second-half"
    return {"windows": windows, "length": length, "scored": scored, "path": path}
