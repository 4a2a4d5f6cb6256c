"""From a record to a verdict: a pure function of it and, where there is one, of a reference.

A weak model that is whole must not be called broken, and a subtle fault must not be called sane. So
nothing rests on one text: rates carry intervals, and every rule answers `good`, `bad` or `unclear`.
One bad rule fails the subject; otherwise one unclear rule makes it inconclusive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from assay.coherence.record import CheckRecord
from assay.coherence.rules.answers import answers
from assay.coherence.rules.degenerate import degenerate_rate, hard_texts
from assay.coherence.rules.missing_text import hidden_tokens, think_tag, truncated
from assay.coherence.rules.needs import needs
from assay.coherence.rules.rule import Ruling
from assay.coherence.rules.same_answers import same_answers
from assay.coherence.rules.scores import bits, depth
from assay.coherence.rules.server import counters, prompts
from assay.coherence.rules.streaming import streaming
from assay.coherence.rules.stutter import stutter
from assay.coherence.rules.throughput import throughput, timed_too_bad
from assay.coherence.rules.tool_form import tool_form
from assay.coherence.rules.tools import tools
from assay.coherence.rules.unfinished import unfinished
from assay.verdict import Finding, Severity, Verdict


@dataclass(frozen=True)
class Judgement:
    """The verdict on a record, and how it came about."""

    verdict: Verdict
    rulings: tuple[Ruling, ...]
    throughput_valid: bool
    findings: tuple[Finding, ...] = ()


def judge(
    record: CheckRecord, reference: CheckRecord | None = None, confidence: float = 0.95
) -> Judgement:
    """Judge `record`, against `reference` where there is one, by intervals of this confidence."""
    found = [
        prompts(record, reference),
        hard_texts(record, reference, confidence),
        degenerate_rate(record, reference, confidence),
        hidden_tokens(record, reference, confidence),
        bits(record, reference, confidence),
        depth(record, reference, confidence),
        counters(record),
        think_tag(record, reference),
        truncated(record),
        unfinished(record),
        needs(record),
        streaming(record),
        stutter(record, reference, confidence),
        same_answers(record, reference),
        tool_form(record, reference, confidence),
        tools(record, reference),
        answers(record, reference),
        throughput(record, reference, confidence),
    ]
    rulings = [r for one in found if one for r in (one if isinstance(one, list) else [one])]
    states = {ruling.state for ruling in rulings}
    if "bad" in states:
        verdict = Verdict.FAIL
    elif "unclear" in states or not (
        record.samples or any(level.answers for level in record.tools)
    ):
        verdict = Verdict.INCONCLUSIVE
    else:
        verdict = Verdict.PASS
    findings = tuple(finding for ruling in rulings for finding in ruling.findings)
    if verdict is Verdict.INCONCLUSIVE and not any(
        r.state == "unclear" and r.findings for r in rulings
    ):
        findings = (*findings, _too_little(record, rulings))
    valid = (
        verdict is not Verdict.FAIL and bool(record.timed) and not timed_too_bad(record, reference)
    )
    return Judgement(verdict, tuple(rulings), valid, findings)


def _too_little(record: CheckRecord, rulings: Sequence[Ruling]) -> Finding:
    """Why the verdict is open, where the rules that leave it open have nothing to report."""
    unclear = [ruling.says for ruling in rulings if ruling.state == "unclear"]
    reason = "; ".join(unclear) or record.tools_skipped or "no text was graded"
    return Finding(
        id="coherence.unclear",
        severity=Severity.WARNING,
        title=f"too little was measured for a verdict: {reason}",
        remedies=("run all probes, or more --samples",),
    )
