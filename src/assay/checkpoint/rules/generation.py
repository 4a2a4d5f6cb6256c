"""Sampling settings of generation_config.json that spoil the output."""

from __future__ import annotations

from collections.abc import Iterator

from assay.checkpoint.draft import is_draft
from assay.checkpoint.findings import found, warned
from assay.checkpoint.subject import BrokenDocument, Checkpoint
from assay.verdict import Finding

NAME = "generation_config.json"


def check_generation(checkpoint: Checkpoint) -> Iterator[Finding]:
    """A generation config, whose sampling settings a server takes over, that is missing, broken, or
    hides a fault.
    """
    document = checkpoint.document(NAME)
    if isinstance(document, BrokenDocument):
        yield found("config_conflict", f"{NAME} cannot be read: {document.reason}", path=NAME)
    elif document is None and checkpoint.config.get("architectures") and not is_draft(checkpoint):
        title = (
            f"no {NAME}: servers fall back on their own sampling defaults and on config.json's end"
            " tokens"
        )
        yield warned("config_conflict", title, path=NAME)
    penalty = checkpoint.object(NAME).get("repetition_penalty") or 1
    if penalty >= 1.2:
        title = (
            f"{NAME} sets repetition_penalty to {penalty:g}, which hides loops of a broken model"
        )
        yield warned("config_conflict", title, repetition_penalty=penalty)
