"""From what was measured to a verdict: a pure function of one record and, where there is one, of a reference record.

A weak model that is whole must not be called broken, and a subtle fault must not be called sane. So nothing rests on
one text: rates carry intervals, and every rule answers `good`, `bad` or `unclear`. One bad rule fails the subject;
otherwise one unclear rule makes it inconclusive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from assay.coherence.record import CheckRecord
from assay.coherence.rules.answers import answers
from assay.coherence.rules.bits import bits, depth
from assay.coherence.rules.counters import counters
from assay.coherence.rules.prompts import prompts
from assay.coherence.rules.ruling import Ruling
from assay.coherence.rules.sameness import same_answers
from assay.coherence.rules.speed import throughput, timed_too_bad
from assay.coherence.rules.texts import degenerate_rate, hard_texts, hidden_tokens, truncated, unfinished
from assay.verdict import Finding, Severity, Verdict


@dataclass(frozen=True)
class Judgement:
    """The verdict on a record, and how it came about."""

    verdict: Verdict
    rulings: tuple[Ruling, ...]
    throughput_valid: bool
    findings: tuple[Finding, ...] = field(default=())


def judge(record: CheckRecord, reference: CheckRecord | None = None) -> Judgement:
    """Judge `record`, against `reference` where there is one."""
    rulings = [
        *prompts(record, reference),
        *hard_texts(record, reference),
        *degenerate_rate(record, reference),
        *hidden_tokens(record, reference),
        *bits(record, reference),
        *depth(record, reference),
        *counters(record),
        *truncated(record, reference),
        *unfinished(record),
    ]
    rulings += same_answers(record, reference)
    rulings += answers(record, reference)
    rulings += throughput(record, reference)
    states = {ruling.state for ruling in rulings}
    if "bad" in states:
        verdict = Verdict.FAIL
    elif "unclear" in states or not record.samples:
        verdict = Verdict.INCONCLUSIVE
    else:
        verdict = Verdict.PASS
    findings = tuple(finding for ruling in rulings for finding in ruling.findings)
    if verdict is Verdict.INCONCLUSIVE and not any(r.state == "unclear" and r.findings for r in rulings):
        findings = (*findings, _too_little(rulings))
    valid = verdict is not Verdict.FAIL and bool(record.timed) and not timed_too_bad(record, reference)
    return Judgement(verdict, tuple(rulings), valid, findings)


def _too_little(rulings: Sequence[Ruling]) -> Finding:
    """Why the verdict is open, where the rules that leave it open have nothing to report."""
    unclear = [ruling.says for ruling in rulings if ruling.state == "unclear"]
    return Finding(
        id="coherence.unclear",
        severity=Severity.WARNING,
        title=f"too little was measured for a verdict: {'; '.join(unclear) or 'no text was graded'}",
        remedies=("run all probes, or more --samples",),
    )
