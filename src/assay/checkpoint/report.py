"""The outcome of `assay verify` as a report: results for machines, a few figures and tables for people."""

from __future__ import annotations

from collections import Counter
from typing import Any

from assay.checkpoint.digests import FileResult
from assay.checkpoint.files import Outcome
from assay.checkpoint.findings import plural
from assay.checkpoint.serve_args import TABLED
from assay.report.text import size_text
from assay.verdict import Metric, Report, Severity, Table

_ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.INFO: 2}
SHOWN_FILES = 40


def build(outcome: Outcome) -> Report:
    """The report of a finished verification."""
    findings = sorted(outcome.findings, key=lambda f: _ORDER[f.severity])
    return Report(
        command="verify",
        verdict=outcome.verdict(),
        subject=_subject(outcome),
        findings=findings,
        results=_results(outcome),
        headline=_headline(outcome),
        blocks=(_files_table(outcome.files), _model_table(outcome)),
        interrupted=outcome.interrupted,
    )


def _subject(outcome: Outcome) -> dict[str, Any]:
    return {
        "checkpoint": outcome.source, "layout": outcome.opened.checkpoint.kind, "repo": outcome.repo,
        "revision": outcome.revision,
    }  # fmt: skip


def _results(outcome: Outcome) -> dict[str, Any]:
    config, declared, mtp = outcome.opened.checkpoint.text_config, outcome.declared, outcome.mtp
    return {
        "files": [
            {"path": f.path, "size": f.size, "sha256": f.sha256, "status": f.status, "against": f.against}
            for f in outcome.files
        ],
        "statuses": dict(Counter(f.status for f in outcome.files)),
        "tensors": outcome.tensors,
        "expected_from": outcome.expected_from,
        "model_type": config.get("model_type"),
        "quantization": None
        if declared is None
        else {
            "method": declared.method, "bits": declared.bits, "group_size": declared.group_size,
            "algorithm": declared.algorithm, "source": declared.source,
        },
        "kv_cache": {"declared": outcome.cache.declared, "layers_with_scales": len(outcome.cache.layers)},
        "mtp": mtp.to_json() if mtp else _NO_HEAD,
        "advice": outcome.advice,
        "engine_version": str(outcome.options.version or TABLED),
        "bytes": {
            "total": sum(f.size or 0 for f in outcome.files if f.status != "missing"), "hashed": outcome.hashed_bytes,
            "from_cache": outcome.cached_bytes, "scanned": outcome.scanned_bytes,
        },
        "seconds": outcome.seconds,
    }  # fmt: skip


_NO_HEAD: dict[str, Any] = {
    "announced": 0,
    "present": 0,
    "complete": None,
    "quantized": None,
    "status": "none",
}


def _headline(outcome: Outcome) -> list[Metric]:
    counts = Counter(f.status for f in outcome.files)
    here = sum(counts.values()) - counts["missing"]
    metrics = [
        Metric(
            "files verified", f"{counts['verified']} of {here}", counts["mismatch"] + counts["missing"] == 0
        ),
        Metric(
            "tensors",
            str(outcome.tensors),
            note=f"expected by {outcome.expected_from}" if outcome.expected_from else "",
        ),
        Metric("quantisation", _method(outcome)),
    ]
    if outcome.mtp is not None and outcome.mtp.status != "none":
        healthy = outcome.mtp.status in {"ok", "declared_quantized"}
        metrics.append(Metric("draft head", outcome.mtp.status.replace("_", " "), healthy))
    if outcome.written:
        metrics.append(Metric("manifest written", str(outcome.options.write_manifest)))
    if outcome.revision:
        metrics.append(Metric("revision", outcome.revision))
    return metrics


def _method(outcome: Outcome) -> str:
    if outcome.declared is None:
        return "none declared"
    return outcome.declared.method + (" (not examined)" if outcome.declared.unexamined else "")


def _files_table(files: list[FileResult]) -> Table:
    worst_first = {"mismatch": 0, "missing": 1, "extra": 2, "unverified": 3, "verified": 4}
    ordered = sorted(files, key=lambda f: (worst_first[f.status], f.path))
    rows = [
        (
            f.path,
            "" if f.size is None else size_text(f.size),
            f.status,
            (f.sha256 or "")[:16],
            f.against or "",
        )
        for f in ordered[:SHOWN_FILES]
    ]
    rest = len(ordered) - len(rows)
    note = f"{plural(rest, 'more file')} in the JSON report" if rest else ""
    return Table("Files", ("file", "size", "status", "sha256", "held against"), rows, frozenset({1}), note)


def _model_table(outcome: Outcome) -> Table:
    rows = [("serve it with", str(outcome.advice.get("command", "")))]
    notes = outcome.advice.get("notes")
    rows.extend(("note", str(note)) for note in (notes if isinstance(notes, list) else ()))
    mtp = outcome.mtp
    if mtp is not None and (mtp.announced or mtp.present):
        owed = f" of {mtp.expected}" if mtp.expected else ""
        text = f"{plural(mtp.announced, 'layer')} announced, {mtp.present}{owed} tensors, {mtp.quantized or 'plain'}"
        rows.append((f"draft head ({mtp.family})", text))
    return Table(f"Serving (vLLM {outcome.options.version or TABLED})", ("what", "how"), rows)
