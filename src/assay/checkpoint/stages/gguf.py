"""The GGUF files of a checkpoint: header, tensor table, and the draft head where there is no other model."""

from __future__ import annotations

from pathlib import Path

from assay.checkpoint.findings import SHOWN, found, plural, some, warned
from assay.checkpoint.gguf.reader import read_gguf
from assay.checkpoint.gguf.rules import check_gguf, examine_gguf
from assay.checkpoint.gguf.splits import check_splits
from assay.checkpoint.mtp.rule import check_mtp
from assay.checkpoint.outcome import Outcome


def examine(outcome: Outcome) -> None:
    """Read every GGUF file that lies here; those on the Hub are listed, not read."""
    checkpoint, layout = outcome.opened.checkpoint, outcome.opened.layout
    names = [n for n in checkpoint.files if n.endswith(".gguf")]
    if layout is None:
        if names:
            title = f"{plural(len(names), 'GGUF file')} not examined: {some(names)}"
            detail = "On the Hub only the headers of safetensors files are read."
            outcome.findings.append(warned("not_examined", title, detail=detail, paths=names[:SHOWN]))
        return
    for name in names:
        _one(outcome, name, layout.files[name].real)
    beside = checkpoint.files if layout.kind == "folder" else _siblings(layout.root)
    outcome.add(check_splits(outcome.ggufs, beside))


def _siblings(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []


def _one(outcome: Outcome, name: str, path: Path) -> None:
    try:
        gguf = read_gguf(path, name)
    except OSError as error:
        title = f"cannot read {name}: {error.strerror}"
        outcome.findings.append(found("not_examined", title, path=name))
        return
    outcome.ggufs.append(gguf)
    outcome.add(check_gguf(gguf))
    if outcome.opened.checkpoint.tensors or not gguf.tensors:
        return
    head = examine_gguf(gguf)
    if outcome.mtp is None or head.status != "none":
        outcome.mtp = head
        outcome.add(check_mtp(head, True, outcome.options.version))
