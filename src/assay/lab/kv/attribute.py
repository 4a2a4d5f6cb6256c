"""`assay kv attribute`: which layers and streams a codec hurts, each alone, and how they add up.

Every layer and stream is coded alone while the others stay exact; then all together. The additivity ratio is the sum
of the KLs of the single ones over that of all: near 1 where errors do not meet, below where they feed each other.
"""

from __future__ import annotations

from typing import Any

from assay.environment import describe
from assay.lab.kv.cache_hook import Mode
from assay.lab.kv.fit import kept_layers
from assay.lab.kv.lab import Lab, Ledger, Measured, Session, session
from assay.lab.kv.live_stream import Coders
from assay.lab.kv.spec import KvSpec, parse_spec
from assay.lab.options import AttributionPlan
from assay.progress import NO_PROGRESS, Progress
from assay.stats.cluster import cluster_ratio
from assay.verdict import Chart, Metric, Point, Report, Series, Table, Verdict


def run_attribute(plan: AttributionPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Measure each part alone, and all together. Interrupted, the same command goes on where it stopped."""
    spec = parse_spec(plan.codec)
    ledger = Ledger({"attribute": plan.facts()})
    with session(
        plan.model, plan.text, windows=plan.windows, length=plan.length, calibration=plan.calibration
    ) as opened:
        lab = opened.lab(opened.windows, Mode(plan.mode), plan.batch)
        parts = alone(opened, lab, spec, plan, ledger, progress)
        coders = opened.bench.fit_all(
            lambda _, s: spec.of(s), kept_layers(opened.bench.shape, plan.skip_layers)
        )
        joint = ledger.get("joint", lambda: figures(measure(lab, coders.by_stream, progress, "all together")))
        text, shape = opened.text, opened.bench.shape
    total = sum(p["kld"]["value"] for p in parts)
    ratio = total / joint["kld"]["value"] if joint["kld"]["value"] else None
    ledger.forget()
    return Report(
        command="kv attribute",
        verdict=Verdict.PASS,
        subject={"model": plan.model, "plan": plan.facts()},
        results={
            "codec": str(spec),
            "mode": plan.mode,
            "parts": parts,
            "joint": joint,
            "additivity_ratio": ratio,
            "text": text,
            "cache": shape.to_json(),
        },
        environment=describe(),
        headline=[
            Metric("all together", f"KL {_text(joint['kld'])} nats, {joint['ratio']:.2f}× smaller"),
            Metric("sum of the single ones", f"{total:.3g} nats"),
            Metric("additivity", "–" if ratio is None else f"{ratio:.2f}"),
        ],
        blocks=[_table(parts), _chart(parts)],
        summary=f"{len(parts)} parts measured on {plan.windows} windows of {plan.length} tokens, {plan.mode}",
    )


def alone(
    opened: Session, lab: Lab, spec: KvSpec, plan: Any, ledger: Ledger, progress: Progress
) -> list[dict[str, Any]]:
    """Figures of every layer (or stream of a layer) coded alone, in order."""
    found = []
    for layer in kept_layers(opened.bench.shape, plan.skip_layers):
        for streams in ("k", "v") if plan.each == "stream" else ("kv",):
            if not any(spec.of(s) for s in streams):
                continue
            name = f"{layer}.{streams}"

            def measured(layer: int = layer, streams: str = streams, name: str = name) -> dict[str, Any]:
                coders = opened.bench.fit_all(lambda _, stream: spec.of(stream), [layer], streams)
                return figures(measure(lab, coders.by_stream, progress, name))

            key = f"{spec}|{name}"
            found.append({"layer": layer, "stream": streams, **ledger.get(key, measured)})
    return found


def measure(lab: Lab, coders: Coders, progress: Progress, label: str) -> Measured:
    """One configuration; the bytes of one window are enough, they hardly vary."""
    return lab.measure(coders, table_tokens=32_768, measure_windows=1, progress=progress, label=label)


def figures(measured: Measured) -> dict[str, Any]:
    """KL and ΔNLL with intervals, and the ratio."""
    tokens = [int(w.finite.sum()) for w in measured.seen]
    figures: dict[str, Any] = {}
    for name, values in (("kld", "kl"), ("dnll", "dnll")):
        sums = [float(getattr(w, values)[w.finite].sum()) for w in measured.seen]
        estimate = cluster_ratio(sums, tokens)
        figures[name] = {
            "value": estimate.value,
            "lo": estimate.interval.lo,
            "hi": estimate.interval.hi,
        }
    return figures | {"ratio": measured.bytes.ratio, "windows": len(tokens), "tokens": sum(tokens)}


def _text(interval: dict[str, float]) -> str:
    return f"{interval['value']:.3g} [{interval['lo']:.3g}, {interval['hi']:.3g}]"


def _table(parts: list[dict[str, Any]]) -> Table:
    ranked = sorted(parts, key=lambda p: -p["kld"]["value"])
    total = sum(p["kld"]["value"] for p in parts) or 1.0
    rows = [
        [str(p["layer"]), p["stream"], _text(p["kld"]), f"{100 * p['kld']['value'] / total:.1f}"]
        for p in ranked[:20]
    ]
    return Table(
        "What hurts most, coded alone",
        ("layer", "stream", "KL (nats)", "% of the sum"),
        rows,
        numeric=frozenset({0, 3}),
    )


def _chart(parts: list[dict[str, Any]]) -> Chart:
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
