"""The report of `assay verify`: results for machines, figures and tables for people."""

from __future__ import annotations

from collections import Counter
from typing import Any

from assay.checkpoint.findings import plural
from assay.checkpoint.flags.versions import TABLED
from assay.checkpoint.state import VerifyState
from assay.checkpoint.trusted import FileResult
from assay.report.text import size_text
from assay.verdict import Metric, Report, Severity, Table

_ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.INFO: 2}

SHOWN_FILES = 40


def build_report(state: VerifyState) -> Report:
    """The report on what the stages have found."""
    findings = sorted(state.findings, key=lambda f: _ORDER[f.severity])
    return Report(
        command="verify",
        verdict=state.verdict(),
        subject=_subject(state),
        findings=findings,
        results=_results(state),
        headline=_headline(state),
        blocks=(_files_table(state.files.results), _model_table(state)),
        interrupted=state.interrupted,
    )


def _subject(state: VerifyState) -> dict[str, Any]:
    return {
        "checkpoint": state.source,
        "layout": state.opened.checkpoint.kind,
        "repo": state.files.repo,
        "revision": state.files.revision,
    }


def _results(state: VerifyState) -> dict[str, Any]:
    config, declared = state.opened.checkpoint.text_config, state.stored.declared
    return {
        "files": [
            {
                "path": f.path,
                "size": f.size,
                "sha256": f.sha256,
                "status": f.status,
                "against": f.against,
            }
            for f in state.files.results
        ],
        "statuses": dict(Counter(f.status for f in state.files.results)),
        "tensors": state.stored.count,
        "expected_from": state.stored.expected_from,
        "model_type": config.get("model_type"),
        "quantization": (
            None
            if declared is None
            else {
                "method": declared.method,
                "bits": declared.bits,
                "group_size": declared.group_size,
                "algorithm": declared.algorithm,
                "source": declared.source,
            }
        ),
        "kv_cache": {
            "declared": state.stored.cache.declared,
            "layers_with_scales": len(state.stored.cache.layers),
        },
        "mtp": state.stored.head.to_json(),
        "advice": state.advice,
        "engine_version": str(state.options.version or TABLED),
        "bytes": {
            "total": sum(f.size or 0 for f in state.files.results if f.status != "missing"),
            "hashed": state.files.hashed_bytes,
            "from_cache": state.files.cached_bytes,
            "scanned": state.scanned_bytes,
        },
        "seconds": state.seconds,
    }


def _headline(state: VerifyState) -> list[Metric]:
    counts = Counter(f.status for f in state.files.results)
    here = sum(counts.values()) - counts["missing"]
    metrics = [
        Metric(
            "files verified",
            f"{counts['verified']} of {here}",
            counts["mismatch"] + counts["missing"] == 0,
        ),
        Metric(
            "tensors",
            str(state.stored.count),
            note=f"expected by {state.stored.expected_from}" if state.stored.expected_from else "",
        ),
        Metric("quantisation", _method(state)),
    ]
    if state.stored.mtp is not None and state.stored.mtp.status != "none":
        healthy = state.stored.mtp.status in {"ok", "declared_quantized"}
        metrics.append(Metric("draft head", state.stored.mtp.status.replace("_", " "), healthy))
    if state.files.written:
        metrics.append(Metric("manifest written", str(state.options.write_manifest)))
    if state.files.revision:
        metrics.append(Metric("revision", state.files.revision))
    return metrics


def _method(state: VerifyState) -> str:
    if state.stored.declared is None:
        return "none declared"
    return state.stored.declared.method + (
        " (not examined)" if state.stored.declared.unexamined else ""
    )


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
    return Table(
        "Files", ("file", "size", "status", "sha256", "held against"), rows, frozenset({1}), note
    )


def _model_table(state: VerifyState) -> Table:
    rows = [("serve it with", str(state.advice.get("command", "")))]
    notes = state.advice.get("notes")
    rows.extend(("note", str(note)) for note in (notes if isinstance(notes, list) else ()))
    mtp = state.stored.mtp
    if mtp is not None and (mtp.announced or mtp.present):
        owed = f" of {mtp.expected}" if mtp.expected else ""
        text = (
            f"{plural(mtp.announced, 'layer')} announced, {mtp.present}{owed} tensors,"
            f" {mtp.quantized or 'plain'}"
        )
        rows.append((f"draft head ({mtp.family})", text))
    return Table(f"Serving (vLLM {state.options.version or TABLED})", ("what", "how"), rows)
