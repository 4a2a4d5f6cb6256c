"""`assay gap`: take the difference of two deployments apart, and say what would make it smaller."""

from __future__ import annotations

from assay.environment import describe
from assay.fidelity.identity import label_of
from assay.gap.assemble import outcome_of, own_effect
from assay.gap.baseline import Corners
from assay.gap.bench import Bench
from assay.gap.blocks import blocks, headline
from assay.gap.findings import findings_of, verdict_of
from assay.gap.measure import measure_all
from assay.gap.plan import GapPlan
from assay.progress import NO_PROGRESS, Progress
from assay.verdict import Finding, Report, Severity, Verdict


def run_gap(plan: GapPlan, progress: Progress = NO_PROGRESS, *, keep: bool = False) -> Report:
    """Decompose, attribute and recommend.

    Everything that is scored is kept until the run ends (with `keep` longer), so that the same command goes on where
    an interrupted one stopped.
    """
    subject = {"reference": plan.reference, "candidate": plan.candidate, "codec": plan.codec}
    Corners(plan).refuse()
    bench = Bench(plan, progress)
    try:
        with bench:
            outcome = outcome_of(bench, measure_all(bench))
            if not keep:
                bench.forget()
    except KeyboardInterrupt:
        finding = Finding(
            "gap.interrupted",
            Severity.INFO,
            "interrupted: what was scored is kept, the same command goes on from there",
        )
        measured = {name: own_effect(m).to_json() for name, m in bench.measured.items()}
        return Report(
            "gap", Verdict.INCONCLUSIVE, subject, [finding], {"measured": measured}, interrupted=True
        )
    return Report(
        command="gap",
        verdict=verdict_of(outcome),
        subject=subject,
        findings=findings_of(outcome),
        results=outcome.to_json(),
        environment=describe(),
        headline=headline(outcome),
        blocks=blocks(outcome),
        summary=f"{label_of(plan.candidate)} with {plan.codec} against {label_of(plan.reference)}, {plan.mode}",
    )
