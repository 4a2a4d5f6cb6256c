"""Is the text that was timed sane? Only then the speed counts."""

from __future__ import annotations

from assay.coherence.record import CheckRecord
from assay.coherence.rules.ruling import Ruling, interval_json
from assay.coherence.rules.texts import TOLERATED
from assay.stats.wilson import wilson
from assay.verdict import Finding, Severity


def timed_too_bad(record: CheckRecord, reference: CheckRecord | None) -> bool:
    """More than a third of the timed texts are degenerate, and more than those of the reference."""
    if not record.timed:
        return False
    share = sum(text.degenerate for text in record.timed) / len(record.timed)
    allowed = TOLERATED
    if reference is not None and reference.timed:
        allowed = max(allowed, sum(text.degenerate for text in reference.timed) / len(reference.timed))
    return share > allowed


def throughput(record: CheckRecord, reference: CheckRecord | None) -> list[Ruling]:
    """The speed does not count where its text is not sane."""
    if not timed_too_bad(record, reference):
        return []
    bad = sum(text.degenerate for text in record.timed)
    n = len(record.timed)
    certain = reference is not None or wilson(bad, n).lo > TOLERATED
    says = f"{bad} of {n} timed texts are degenerate"
    finding = Finding(
        id="throughput.invalid",
        severity=Severity.ERROR if certain else Severity.WARNING,
        title=f"the speed does not count: {says}",
        evidence={"timed": n, "degenerate": bad, "rate": interval_json(wilson(bad, n))},
    )
    return [Ruling("throughput", "bad" if certain else "unclear", says, (finding,))]
