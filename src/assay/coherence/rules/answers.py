"""Were the answers right? A wrong one is a warning, unless the reference was always right and this server never."""

from __future__ import annotations

from assay.coherence.record import CheckRecord
from assay.coherence.rules.ruling import Ruling, interval_json, percent
from assay.stats.wilson import wilson
from assay.verdict import Finding, Severity


def answers(record: CheckRecord, reference: CheckRecord | None) -> list[Ruling]:
    """Wrong answers: a warning, and an error only where the reference answered right every time and this one never."""
    theirs = _tally(reference) if reference is not None else {}
    rulings = []
    for (probe, check), (passed, total, detail) in _tally(record).items():
        if passed == total:
            continue
        rate = wilson(passed, total)
        right, asked, _ = theirs.get((probe, check), (0, 0, ""))
        broken = passed == 0 and total >= 3 and asked >= 3 and right == asked
        says = f"{probe}/{check}: {passed} of {total} right"
        finding = Finding(
            id="coherence.wrong_answer",
            severity=Severity.ERROR if broken else Severity.WARNING,
            title=(
                f"{probe}: {check} never passed ({total} tries); the reference passed {right} of {asked}"
                if broken
                else f"{probe}: {check} passed {passed} of {total} ({percent(rate)})"
            ),
            detail=detail,
            evidence={
                "probe": probe, "check": check, "passed": passed, "total": total, "rate": interval_json(rate),
                "reference_passed": right, "reference_total": asked,
            },
        )  # fmt: skip
        rulings.append(Ruling("answers", "bad" if broken else "good", says, (finding,)))
    return rulings


def _tally(record: CheckRecord) -> dict[tuple[str, str], tuple[int, int, str]]:
    """Per probe and check: how many passed, of how many, and the detail of the last failure."""
    tally: dict[tuple[str, str], tuple[int, int, str]] = {}
    for probe in record.probes:
        for sample in probe.samples:
            for check in sample.checks:
                passed, total, detail = tally.get((probe.name, check.name), (0, 0, ""))
                tally[probe.name, check.name] = (
                    passed + check.passed,
                    total + 1,
                    detail if check.passed else check.detail,
                )
    return tally
