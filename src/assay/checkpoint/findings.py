"""Short ways to write the findings of `assay verify`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from assay.verdict import Finding, Severity

SHOWN = 20


def found(
    name: str,
    title: str,
    *,
    severity: Severity = Severity.ERROR,
    detail: str = "",
    causes: Sequence[str] = (),
    remedies: Sequence[str] = (),
    references: Sequence[str] = (),
    **evidence: Any,
) -> Finding:
    """The finding `checkpoint.NAME`; an `error` unless said otherwise."""
    return Finding(
        f"checkpoint.{name}",
        severity,
        title,
        detail,
        evidence,
        tuple(causes),
        tuple(remedies),
        tuple(references),
    )


def warned(name: str, title: str, **rest: Any) -> Finding:
    """The finding `checkpoint.NAME` as a warning."""
    return found(name, title, severity=Severity.WARNING, **rest)


def noted(name: str, title: str, **rest: Any) -> Finding:
    """The finding `checkpoint.NAME` as information."""
    return found(name, title, severity=Severity.INFO, **rest)


def unexamined(title: str, *, severity: Severity = Severity.INFO, **rest: Any) -> Finding:
    """The finding that a part of the checkpoint is of a form that assay does not know: it keeps the
    verdict from pass.
    """
    return found("not_examined", title, severity=severity, unexamined=True, **rest)


def some(names: Iterable[str], limit: int = 3) -> str:
    """`a, b, c and 7 more`."""
    listed = list(names)
    rest = len(listed) - limit
    return ", ".join(listed[:limit]) + (f" and {rest} more" if rest > 0 else "")


def plural(count: int, noun: str) -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
