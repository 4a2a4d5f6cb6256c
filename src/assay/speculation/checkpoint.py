"""What the checkpoint says about the head, by way of the checkpoint area (`assay verify`)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from assay.speculation.clues import Clue
from assay.verdict import Finding, Severity


@dataclass(frozen=True)
class HeadFile:
    """The head as the checkpoint stores it: a status of `results.mtp` (None where not examined), and findings."""

    status: str | None
    findings: tuple[Finding, ...]

    def softened(self) -> HeadFile:
        """The same with errors as warnings: for a run whose acceptance is fine whatever the file says."""
        return replace(
            self,
            findings=tuple(
                replace(f, severity=Severity.WARNING) if f.severity is Severity.ERROR else f
                for f in self.findings
            ),
        )


def examine_head(path: str, clues: Sequence[Clue] = ()) -> HeadFile:
    """The multi-token-prediction head in the checkpoint at `path`. What cannot be examined is said, never left out."""
    if find_spec("assay.checkpoint") is None:
        return HeadFile(None, (_not_examined("this build of assay has no checkpoint area"),))
    report = import_module("assay.checkpoint.mtp").examine(path)
    check = import_module("assay.checkpoint.mtp.rule").check_mtp
    status = str(report.status)
    found: list[Finding] = list(check(report, _quantized(path), _version(clues)))
    return HeadFile(status, (*found, *_plain(status)))


def _plain(status: str) -> list[Finding]:
    """Statuses that are no fault but tell something about a dead head."""
    text = {
        "ok": "the checkpoint holds a complete head of the declared dtype: look at the engine, not at the file",
        "none": "the checkpoint announces no head: the draft comes from elsewhere",
    }.get(status)
    return (
        []
        if text is None
        else [Finding("speculation.head_file", Severity.INFO, text, evidence={"status": status})]
    )


def _not_examined(reason: str) -> Finding:
    return Finding(
        "speculation.head_not_examined",
        Severity.INFO,
        f"the head in the checkpoint was not examined: {reason}",
        remedies=("assay verify CHECKPOINT",),
    )


def _quantized(path: str) -> bool:
    """Whether the config declares a quantization."""
    try:
        config = json.loads((Path(path) / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    parts = [config, config.get("text_config")] if isinstance(config, dict) else []
    return any(isinstance(p, dict) and p.get("quantization_config") for p in parts)


def _version(clues: Sequence[Clue]) -> Any:
    """The engine's version in the form that the checkpoint rules take; None where no start-up line names it."""
    text = next((c.text for c in clues if c.id == "version"), "")
    match = re.search(r"\d+\.\d+(?:\.\d+)?", text)
    if match is None or "sglang" in text.lower() or text.startswith("build"):
        return None
    return import_module("assay.checkpoint.serving.versions").Version.parse(match[0])
