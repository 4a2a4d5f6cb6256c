"""The rule that speed counts only where its text is sane."""

from __future__ import annotations

from assay.coherence.record import CheckRecord
from assay.coherence.rules.degenerate import TOLERATED
from assay.coherence.rules.rule import Rule, Ruling, Rulings
from assay.stats import interval_json, wilson
from assay.verdict import Finding, Severity


def timed_too_bad(record: CheckRecord, reference: CheckRecord | None) -> bool:
    """More than a third of the timed texts are degenerate, and more than those of the reference."""
    if not record.timed:
        return False
    share = sum(text.degenerate for text in record.timed) / len(record.timed)
    allowed = TOLERATED
    if reference is not None and reference.timed:
        allowed = max(
            allowed, sum(text.degenerate for text in reference.timed) / len(reference.timed)
        )
    return share > allowed


def throughput(record: CheckRecord, reference: CheckRecord | None, confidence: float) -> Rulings:
    """The speed does not count where its text is not sane."""
    n, bad = len(record.timed), sum(text.degenerate for text in record.timed)
    if not n:
        return Ruling(Rule.THROUGHPUT, "not_examined", record.timed_skipped or "nothing was timed")
    says = f"{bad} of {n} timed texts are degenerate"
    if not timed_too_bad(record, reference):
        return Ruling(Rule.THROUGHPUT, "good", says)
    rate = wilson(bad, n, confidence)
    certain = (reference is not None and bool(reference.timed)) or rate.lo > TOLERATED
    finding = Finding(
        id="throughput.invalid",
        severity=Severity.ERROR if certain else Severity.WARNING,
        title=f"the speed does not count: {says}",
        evidence={"timed": n, "degenerate": bad, "rate": interval_json(rate)},
    )
    return Ruling(Rule.THROUGHPUT, "bad" if certain else "unclear", says, (finding,))
