"""The rule on wrong answers."""

from __future__ import annotations

from assay.coherence.record import CheckRecord
from assay.coherence.rules.rule import Rule, Ruling, Rulings, coherence_finding, percent
from assay.stats import interval_json, wilson
from assay.verdict import Severity


def answers(record: CheckRecord, reference: CheckRecord | None) -> Rulings:
    """Wrong answers: a warning, and an error only where the reference answered right every time and
    this one never.
    """
    theirs = _tally(reference) if reference is not None else {}
    rulings = []
    for (probe, check), (passed, total, detail) in _tally(record).items():
        if passed == total:
            continue
        rate = wilson(passed, total)
        right, asked, _ = theirs.get((probe, check), (0, 0, ""))
        broken = passed == 0 and total >= 3 and asked >= 3 and right == asked
        title = f"{probe}: {check} passed {passed} of {total}, {percent(rate)}"
        if broken:
            title = (
                f"{probe}: {check} never passed ({total} tries); the reference passed {right} of"
                f" {asked}"
            )
        evidence = {
            "probe": probe,
            "check": check,
            "passed": passed,
            "total": total,
            "rate": interval_json(rate),
            "reference_passed": right,
            "reference_total": asked,
        }
        severity = Severity.ERROR if broken else Severity.WARNING
        finding = coherence_finding("wrong_answer", severity, title, evidence, detail=detail)
        says = f"{probe}/{check}: {passed} of {total} right"
        rulings.append(Ruling(Rule.ANSWERS, "bad" if broken else "good", says, (finding,)))
    return rulings


def _tally(record: CheckRecord) -> dict[tuple[str, str], tuple[int, int, str]]:
    """Per probe and check: how many passed, of how many, and the detail of the last failure."""
    tally: dict[tuple[str, str], tuple[int, int, str]] = {}
    for probe in record.probes:
        for check in (check for sample in probe.samples for check in sample.checks):
            passed, total, detail = tally.get((probe.name, check.name), (0, 0, ""))
            detail = detail if check.passed else check.detail
            tally[probe.name, check.name] = (passed + check.passed, total + 1, detail)
    return tally
