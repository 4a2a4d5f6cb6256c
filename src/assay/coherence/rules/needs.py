"""The rule on what the deployment must be able to do."""

from __future__ import annotations

from assay.coherence.record import CheckRecord
from assay.coherence.rules.rule import Rule, Ruling, Rulings, State, coherence_finding
from assay.verdict import Finding, Severity

_REMEDIES = {
    "tools": ("start it with --enable-auto-tool-choice and the model's --tool-call-parser",),
    "reasoning": ("start it with the model's --reasoning-parser",),
    "json": ("see whether guided decoding is switched on, and in which form it takes a schema",),
    "streaming": ("look for a proxy that does not pass streams on",),
}


def needs(record: CheckRecord) -> Rulings:
    """A server that cannot do what `--need` names fails."""
    rulings = []
    for need in record.needs:
        state: State = {"good": "good", "bad": "bad"}.get(need.state, "unclear")  # type: ignore[assignment]
        says = f"{need.name}: {need.says}"
        findings: tuple[Finding, ...] = ()
        if state != "good":
            bad = state == "bad"
            finding = coherence_finding(
                "need",
                Severity.ERROR if bad else Severity.WARNING,
                f"{need.name} {'is needed and does not work' if bad else 'could not be tried'}",
                {"need": need.name, "asked": need.asked},
                detail=need.says[:300],
                remedies=_REMEDIES[need.name],
            )
            findings = (finding,)
        rulings.append(Ruling(Rule.NEEDS, state, says, findings))
    return rulings
