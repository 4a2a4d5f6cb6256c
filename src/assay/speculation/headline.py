"""The few figures of a judged source that are read first."""

from __future__ import annotations

from assay.speculation.benefit import Benefit
from assay.speculation.judged import Judged
from assay.verdict import Metric


def headline(judged: Judged) -> list[Metric]:
    """The few figures that are read first."""
    a, record, b = judged.assessment, judged.record, judged.benefit
    metrics = [Metric("health", a.health.value, note=a.reason)]
    if a.pooled is not None:
        note = "of all draft tokens; prose 40–70 %, code 20–50 %"
        metrics.append(Metric("acceptance", a.pooled.percent(), note=note))
    elif record.acceptance_rate is not None:
        metrics.append(
            Metric(
                "acceptance", f"{100 * record.acceptance_rate:.1f} %", note="printed, no interval"
            )
        )
    if record.tokens_per_step is not None:
        metrics.append(_tokens_per_step(judged, record.tokens_per_step))
    if b is not None and a.judged:
        metrics += _multiplier(b)
    if judged.advice:
        metrics.append(Metric("advice", judged.advice))
    return metrics


def _tokens_per_step(judged: Judged, length: float) -> Metric:
    """Over all steps, where the source counts those without a draft too: that is what is
    paid for.
    """
    steps = judged.evidence.steps
    if steps.coverage is None or steps.coverage > 0.98 or steps.overall is None:
        return Metric("tokens per step", f"{length:.2f}", note="bonus token included")
    drafted = steps.tokens_per_step or length
    note = f"over all steps; {drafted:.2f} at the {100 * steps.coverage:.3g} % that drafted"
    return Metric("tokens per step", f"{steps.overall:.2f}", note=note)


def _multiplier(b: Benefit) -> list[Metric]:
    if b.measured_multiplier is not None:
        return [
            Metric(
                "net multiplier", str(b.measured_multiplier), note="measured against the baseline"
            )
        ]
    if b.multiplier is None:
        return []
    span = "" if b.interval is None else f" [{b.interval[0]:.2f}, {b.interval[1]:.2f}]"
    note = f"predicted over all steps, {b.cost.source} draft cost {b.cost}"
    return [Metric("net multiplier", f"{b.multiplier:.2f}{span}", note=note)]
