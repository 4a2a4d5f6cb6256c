"""The head as its checkpoint stores it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from assay.speculation.clues import Clue
from assay.verdict import Finding, Severity

if TYPE_CHECKING:
    from assay.checkpoint.flags.versions import Version
    from assay.checkpoint.opening import Opened


@dataclass(frozen=True)
class HeadFile:
    """The head as the checkpoint stores it: a status of `results.mtp`, and findings."""

    status: str
    findings: tuple[Finding, ...]

    def softened(self) -> HeadFile:
        """The same with errors as warnings: for a run whose acceptance is fine although the file
        is not.
        """
        soft = [
            replace(f, severity=max(f.severity, Severity.WARNING, key=list(Severity).index))
            for f in self.findings
        ]
        return replace(self, findings=tuple(soft))


def examine_head(path: str, clues: Sequence[Clue] = ()) -> HeadFile:
    """The head at `path`, with all its values: a draft of its own, or the multi-token-prediction
    head of a checkpoint.
    """
    from assay.checkpoint.draft import is_draft
    from assay.checkpoint.mtp import examine
    from assay.checkpoint.mtp_findings import check_mtp
    from assay.checkpoint.opening import open_checkpoint

    opened = open_checkpoint(path)
    if is_draft(opened.checkpoint):
        return _examine_draft(path)
    report = examine(path)
    status = str(report.status)
    found = list(check_mtp(report, _quantized(path), _version(clues)))
    bad = _head_values(opened) if status == "ok" else []
    found += bad
    # Statuses that are no fault but tell something about a dead head.
    plain = {
        "ok": (
            "the checkpoint holds a complete head of the declared dtype: look at the engine, not at"
            " the file"
        ),
        "none": "the checkpoint announces no head: the draft comes from elsewhere",
    }
    if status in plain and not bad:
        evidence = {"status": status}
        found.append(
            Finding("speculation.head_file", Severity.INFO, plain[status], evidence=evidence)
        )
    return HeadFile(status, tuple(found))


def _head_values(opened: Opened) -> list[Finding]:
    from assay.checkpoint.mtp import head_prefixes
    from assay.checkpoint.values.judgement import judge_values
    from assay.checkpoint.values.norms import check_norms
    from assay.checkpoint.values.scan import scan

    held, layout = opened.checkpoint, opened.layout
    if layout is None:  # on the Hub
        return []
    prefixes = head_prefixes(held)
    jobs = [
        (t, layout.files[t.file].real) for n, t in held.tensors.items() if n.startswith(prefixes)
    ]
    statistics, _ = scan(jobs)
    return [*judge_values(statistics), *check_norms(statistics, held.model_type)]


def _examine_draft(path: str) -> HeadFile:
    from assay.checkpoint.options import VerifyOptions
    from assay.checkpoint.verify import verify

    about = (
        "unverified",
        "not_examined",
        "tokenizer",
        "chat_template",
        "extra",
    )  # of files, not of the head
    report = verify(path, VerifyOptions(values=True, allow_unverified=True))
    shown = [
        f
        for f in report.findings
        if f.severity is not Severity.INFO and not f.id.partition(".")[2].startswith(about)
    ]
    if not shown:
        title = (
            "the draft's file is whole, and its values are sane: look at the engine, and at the"
            " target"
        )
        shown = [Finding("speculation.head_file", Severity.INFO, title, evidence={"status": "ok"})]
        return HeadFile("ok", tuple(shown))
    return HeadFile("draft", tuple(shown))


def _quantized(path: str) -> bool:
    """Whether the config declares a quantization."""
    try:
        config = json.loads((Path(path) / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    parts = [config, config.get("text_config")] if isinstance(config, dict) else []
    return any(isinstance(p, dict) and p.get("quantization_config") for p in parts)


def _version(clues: Sequence[Clue]) -> Version | None:
    """The engine's version in the form that the checkpoint rules take; None where no start-up line
    names it.
    """
    from assay.checkpoint.flags.versions import Version

    text = next((c.text for c in clues if c.id == "version"), "")
    match = re.search(r"\d+\.\d+(?:\.\d+)?", text)
    if match is None or "sglang" in text.lower() or text.startswith("build"):
        return None
    return Version.parse(match[0])
