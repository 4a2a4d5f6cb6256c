"""`assay kv attribute`: every layer and stream coded alone, and how their KLs add up.

The additivity ratio is the sum of the KLs of the single ones over that of all: near 1 where
errors do not meet, below where they feed each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from assay.environment import describe
from assay.fidelity.budget import Budget
from assay.fidelity.plan import QUICK_MINUTES
from assay.progress import NO_PROGRESS, Progress
from assay.stats import cluster_ratio, not_negative
from assay.verdict import Chart, Metric, Point, Report, Series, Table, Verdict
from assay_lab.kv.cache_shape import CacheShape
from assay_lab.kv.evaluator import CodecEvaluator
from assay_lab.kv.interruption import Unfinished
from assay_lab.kv.layer_coders import kept_layers
from assay_lab.kv.measured import Measured
from assay_lab.kv.opening import ModelOnText, Work, open_evaluator
from assay_lab.kv.spec import KvSpec, parse_spec
from assay_lab.options import AttributionPlan


def run_attribute(plan: AttributionPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Measure all together, then each part alone. Interrupted, the report holds the parts that were
    measured.
    """
    spec, budget = parse_spec(plan.codec), Budget.of(plan.budget, plan.quick, QUICK_MINUTES)
    parts: list[dict[str, Any]] = []
    joint: dict[str, Any] | None = None
    work = Work(
        budget, lambda shape: 1 + count_alone(shape, spec, plan.each, plan.skip_layers), least=2
    )
    with open_evaluator(ModelOnText.of(plan), work, progress) as lab:
        plan = replace(plan, windows=len(lab.windows), length=lab.length)
        shape = lab.layer_coders.shape
        count = count_alone(shape, spec, plan.each, plan.skip_layers)
        with Unfinished(lambda: joint, budget) as cut:
            measured = lab.measure(
                plan.codec, skip_layers=plan.skip_layers, label="all together", measure_windows=1
            )
            joint = figures(measured)
            for part in alone(lab, spec, plan.each, plan.skip_layers):
                parts.append(part)
                if budget.left() <= 0 and (missing := count - len(parts)):
                    after = f"{part['layer']}.{part['stream']}"
                    budget.leave_out(
                        f"{missing} of {count} parts, those behind {after}", "what these lose alone"
                    )
                    break
        text, notices = lab.text, lab.notices()
    total, whole = sum(p["kld"]["value"] for p in parts), len(parts) == count
    ratio = total / joint["kld"]["value"] if whole and joint and joint["kld"]["value"] else None
    headline = (
        [Metric("sum of the single ones", f"{total:.3g} nats of {len(parts)} parts")]
        if parts
        else []
    )
    if joint:
        headline = [
            Metric("all together", f"KL {kl_text(joint)} nats, {joint['ratio']:.2f}× smaller"),
            *headline,
            Metric("additivity", "–" if ratio is None else f"{ratio:.2f}"),
        ]
    return Report(
        command="kv attribute",
        verdict=cut.verdict(Verdict.PASS if whole else Verdict.INCONCLUSIVE),
        subject={"model": plan.model, "plan": plan.facts()},
        findings=[*cut.findings(), *budget.findings(), *notices],
        results={
            "codec": str(spec),
            "mode": plan.mode,
            "parts": parts,
            "joint": joint,
            "additivity_ratio": ratio,
            "text": text,
            **budget.results(),
            "cache": shape.to_json(),
        },
        environment=describe(),
        headline=headline,
        blocks=[parts_table(parts), _parts_chart(parts)] if parts else [],
        interrupted=cut.interrupted,
        summary=(
            f"{len(parts)} parts measured on {plan.windows} windows of {plan.length} tokens,"
            f" {plan.mode}"
        ),
    )


def count_alone(shape: CacheShape, spec: KvSpec, each: str, skip_layers: Sequence[int] = ()) -> int:
    """How many parts `alone` measures of a model with that cache."""
    streams = sum(spec.of(s) is not None for s in "kv") if each == "stream" else 1
    return streams * len(kept_layers(shape, skip_layers))


def alone(
    lab: CodecEvaluator, spec: KvSpec, each: str, skip_layers: Sequence[int] = ()
) -> Iterator[dict[str, Any]]:
    """Figures of every layer (or `each` stream of a layer) coded alone, in order."""
    for layer in kept_layers(lab.layer_coders.shape, skip_layers):
        for streams in ("k", "v") if each == "stream" else ("kv",):
            if any(spec.of(s) for s in streams):
                measured = lab.measure(
                    str(spec),
                    layers=(layer,),
                    streams=streams,
                    label=f"{layer}.{streams}",
                    measure_windows=1,
                )
                yield {"layer": layer, "stream": streams, **figures(measured)}


def figures(measured: Measured) -> dict[str, Any]:
    """KL and ΔNLL with intervals by window, and the ratio."""
    tokens = [int(w.finite.sum()) for w in measured.seen]
    found: dict[str, Any] = {}
    for name, values in (("kld", "kl"), ("dnll", "dnll")):
        sums = [float(getattr(w, values)[w.finite].sum()) for w in measured.seen]
        estimate = cluster_ratio(sums, tokens)
        interval = (not_negative(estimate) if name == "kld" else estimate).interval
        found[name] = {"value": interval.value, "lo": interval.lo, "hi": interval.hi}
    ratio = measured.bytes.ratio if measured.bytes else None
    return found | {"ratio": ratio, "windows": len(tokens), "tokens": sum(tokens)}


def kl_text(found: Mapping[str, Any]) -> str:
    """The KL of `figures` with its interval."""
    kld = found["kld"]
    return f"{kld['value']:.3g} [{kld['lo']:.3g}, {kld['hi']:.3g}]"


def parts_table(parts: list[dict[str, Any]]) -> Table:
    """The twenty parts with the largest KL."""
    ranked = sorted(parts, key=lambda p: -p["kld"]["value"])
    total = sum(p["kld"]["value"] for p in parts) or 1.0
    rows = [
        [str(p["layer"]), p["stream"], kl_text(p), f"{100 * p['kld']['value'] / total:.1f}"]
        for p in ranked[:20]
    ]
    return Table(
        "What hurts most, coded alone",
        ("layer", "stream", "KL (nats)", "% of the sum"),
        rows,
        numeric=frozenset({0, 3}),
    )


def _parts_chart(parts: list[dict[str, Any]]) -> Chart:
    streams = dict.fromkeys(p["stream"] for p in parts)
    series = [
        Series(
            s,
            [
                Point(p["layer"], p["kld"]["value"], p["kld"]["lo"], p["kld"]["hi"])
                for p in parts
                if p["stream"] == s
            ],
        )
        for s in streams
    ]
    return Chart("KL of each layer alone", "line", series, x_label="layer", y_label="KL (nats)")
