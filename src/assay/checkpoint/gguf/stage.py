"""Examine the GGUF files of a checkpoint, as a stage of `assay verify`."""

from __future__ import annotations

from pathlib import Path

from assay.checkpoint.findings import SHOWN, found, plural, some, warned
from assay.checkpoint.gguf.head import examine_gguf
from assay.checkpoint.gguf.header import read_gguf
from assay.checkpoint.gguf.rules import check_gguf
from assay.checkpoint.gguf.splits import check_splits
from assay.checkpoint.mtp_findings import check_mtp
from assay.checkpoint.state import VerifyState


def examine_gguf_files(state: VerifyState) -> None:
    """Read every GGUF file that lies here; those on the Hub are listed, not read."""
    checkpoint, layout = state.opened.checkpoint, state.opened.layout
    names = [n for n in checkpoint.files if n.endswith(".gguf")]
    if layout is None:
        if names:
            title = f"{plural(len(names), 'GGUF file')} not examined: {some(names)}"
            detail = "On the Hub only the headers of safetensors files are read."
            state.findings.append(warned("not_examined", title, detail=detail, paths=names[:SHOWN]))
        return
    for name in names:
        _one(state, name, layout.files[name].real)
    beside = checkpoint.files if layout.kind == "folder" else _siblings(layout.root)
    state.add(check_splits(state.stored.ggufs, beside))


def _siblings(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []


def _one(state: VerifyState, name: str, path: Path) -> None:
    try:
        gguf = read_gguf(path, name)
    except OSError as error:
        title = f"cannot read {name}: {error.strerror}"
        state.findings.append(found("not_examined", title, path=name))
        return
    state.stored.ggufs.append(gguf)
    state.add(check_gguf(gguf))
    if state.opened.checkpoint.tensors or not gguf.tensors:
        return
    head = examine_gguf(gguf)
    if state.stored.mtp is None or head.status != "none":
        state.stored.mtp = head
        state.add(check_mtp(head, True, state.options.version))
