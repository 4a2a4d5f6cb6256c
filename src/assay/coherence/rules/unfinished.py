"""The rule on steps that a server can do and did not finish."""

from __future__ import annotations

from assay.coherence.record import CheckRecord
from assay.coherence.rules.rule import Rule, Ruling, Rulings
from assay.verdict import Finding, Severity


def unfinished(record: CheckRecord) -> Rulings:
    """Steps that the server can do and did not finish leave the verdict open."""
    steps = [
        ("coherence.probe", f"the probe {p.name}", p.failed, len(p.samples)) for p in record.probes
    ]
    steps += [
        ("coherence.scores", "scoring fixed texts", record.passages_failed, len(record.passages)),
        ("throughput.", "timing", record.timed_failed, len(record.timed)),
    ]
    steps += [
        (
            "coherence.tools",
            f"the tools suite with {v.concurrency} at a time",
            v.error,
            len(v.answers),
        )
        for v in record.tools
    ]
    return [
        Ruling(
            Rule.UNFINISHED,
            "unclear",
            f"{step}: {reason}",
            (_unfinished(area, step, reason, samples),),
        )
        for area, step, reason, samples in steps
        if reason
    ]


def _unfinished(area: str, step: str, reason: str, samples: int) -> Finding:
    id_ = f"{area}unfinished" if area.endswith(".") else f"{area}_unfinished"
    title = f"{step} could not be finished: {reason}"
    return Finding(id_, Severity.WARNING, title, evidence={"step": step, "samples": samples})
