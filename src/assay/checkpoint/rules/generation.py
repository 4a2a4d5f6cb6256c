"""generation_config.json: sampling settings that a server takes over as its defaults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from assay.checkpoint.findings import found, warned
from assay.checkpoint.subject import BrokenDocument, Checkpoint
from assay.verdict import Finding

NAME = "generation_config.json"


def check_generation(checkpoint: Checkpoint) -> Iterator[Finding]:
    """A missing, broken or nonsensical generation config."""
    document = checkpoint.document(NAME)
    if document is None:
        if checkpoint.config.get("architectures"):
            title = (
                f"no {NAME}: servers fall back on their own sampling defaults and on config.json's end tokens"
            )
            yield warned("config_conflict", title, path=NAME)
        return
    if isinstance(document, BrokenDocument):
        yield found("config_conflict", f"{NAME} cannot be read: {document.reason}", path=NAME)
        return
    for key, (holds, rule) in _SANE.items():
        value = document.get(key)
        if value is not None and not holds(value):
            title = f"{NAME} sets {key} to {str(value)[:40]}, which is not {rule}"
            yield found(
                "config_conflict",
                title,
                key=key,
                value=value if isinstance(value, int | float) else str(value),
            )
    penalty = document.get("repetition_penalty")
    if isinstance(penalty, int | float) and penalty >= 1.2:
        title = f"{NAME} sets repetition_penalty to {penalty:g}, which hides loops of a broken model"
        yield warned("config_conflict", title, repetition_penalty=penalty)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_SANE: dict[str, tuple[Any, str]] = {
    "temperature": (lambda v: _number(v) and 0 <= v <= 10, "a number from 0 to 10"),
    "top_p": (lambda v: _number(v) and 0 < v <= 1, "above 0 and at most 1"),
    "min_p": (lambda v: _number(v) and 0 <= v <= 1, "from 0 to 1"),
    "top_k": (lambda v: type(v) is int and v >= -1, "a natural number"),
    "repetition_penalty": (lambda v: _number(v) and 0 < v <= 5, "above 0 and at most 5"),
    "max_new_tokens": (lambda v: type(v) is int and v > 0, "a positive number"),
    "max_length": (lambda v: type(v) is int and v > 0, "a positive number"),
}
