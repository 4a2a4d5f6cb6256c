"""The GGUF files of a checkpoint: header, tensor table, and the draft head where there is no other model."""

from __future__ import annotations

from pathlib import Path

from assay.checkpoint.findings import found
from assay.checkpoint.gguf.reader import read_gguf
from assay.checkpoint.gguf.rules import check_gguf, examine_gguf
from assay.checkpoint.mtp.rule import check_mtp
from assay.checkpoint.outcome import Outcome


def examine(outcome: Outcome) -> None:
    """Read every GGUF file that lies here. Remote ones are listed, not read."""
    layout = outcome.opened.layout
    for name, file in layout.files.items() if layout is not None else ():
        if name.endswith(".gguf"):
            _one(outcome, name, file.real)


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
