"""`assay kv noise`: KL of noise of known size, by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from assay.environment import describe
from assay.progress import NO_PROGRESS, Progress
from assay.stats import Resampling
from assay.verdict import Chart, Metric, Point, Report, Series, Table, Verdict
from assay_lab.kv.attribute import figures, kl_text
from assay_lab.kv.interruption import Unfinished
from assay_lab.kv.layer_coders import kept_layers
from assay_lab.kv.measured import Measured
from assay_lab.kv.noise_growth import NoiseGrowth, noise_growth
from assay_lab.kv.opening import ModelOnText, open_evaluator
from assay_lab.options import NoisePlan


@dataclass(frozen=True)
class _Part:
    """What gets noise in one curve; `layer` None is all of them."""

    layer: int | None
    streams: str

    def __str__(self) -> str:
        return self.streams if self.layer is None else f"{self.layer}.{self.streams}"


def run_noise(plan: NoisePlan, progress: Progress = NO_PROGRESS) -> Report:
    """Measure every size of noise. Interrupted, the report holds the sizes that were measured."""
    sigmas = sorted(set(plan.sigmas))
    points: dict[_Part, list[dict[str, Any]]] = {}
    with open_evaluator(ModelOnText.of(plan), progress=progress) as lab:
        shape = lab.layer_coders.shape
        layers = kept_layers(shape, plan.skip_layers)
        parts = _parts(plan, layers)
        with Unfinished(lambda: points) as cut:
            lab.expect(len(parts) * len(sigmas))
            for part in parts:
                for sigma in sigmas:
                    measured = lab.measure(
                        f"noise(sigma={sigma!r}, seed={plan.seed})",
                        label=f"noise {sigma:g} in {part}",
                        layers=tuple(layers) if part.layer is None else (part.layer,),
                        streams=part.streams,
                        measure_windows=1,
                    )
                    points.setdefault(part, []).append({"sigma": sigma, **_point(measured)})
        text, notices = lab.text, lab.notices()
    curves = [_curve(part, found, plan.seed) for part, found in points.items()]
    return Report(
        command="kv noise",
        verdict=cut.verdict(Verdict.PASS if curves else Verdict.INCONCLUSIVE),
        subject={"model": plan.model, "plan": plan.facts()},
        findings=[*cut.findings(), *notices],
        results={"mode": plan.mode, "curves": curves, "text": text, "cache": shape.to_json()},
        environment=describe(),
        headline=[_noise_headline(c) for c in sorted(curves, key=_harm, reverse=True)[:3]],
        blocks=[_noise_table(curves), _noise_chart(curves)] if curves else [],
        interrupted=cut.interrupted,
        summary=(
            f"{sum(map(len, points.values()))} measurements on {plan.windows} windows of"
            f" {plan.length} tokens, {plan.mode}"
        ),
    )


def _parts(plan: NoisePlan, layers: Sequence[int]) -> list[_Part]:
    if plan.each == "stream":
        return [_Part(None, s) for s in plan.streams]
    if plan.each == "layer":
        return [_Part(layer, plan.streams) for layer in layers]
    return [_Part(None, plan.streams)]


def _point(measured: Measured) -> dict[str, Any]:
    """Figures of one size, and the sums of each window, which intervals of the curve need."""
    found = figures(measured)
    nll = found["dnll"]
    return {
        "kld": found["kld"],
        "dppl_pct": {k: 100 * math.expm1(v) if v < 700 else math.inf for k, v in nll.items()},
        "kl_sums": [float(w.kl[w.finite].sum()) for w in measured.seen],
        "tokens": [int(w.finite.sum()) for w in measured.seen],
    }


def _curve(part: _Part, points: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    found = noise_growth(
        [p["sigma"] for p in points],
        [p["kl_sums"] for p in points],
        points[0]["tokens"],
        Resampling(2000, seed),
    )
    shown = [{k: p[k] for k in ("sigma", "kld", "dppl_pct")} for p in points]
    return {
        "layer": part.layer,
        "stream": part.streams,
        "points": [{**p, "tokens": sum(points[0]["tokens"])} for p in shown],
        "slope": _bounds(found, "slope"),
        "quadratic_range": None if found.lo is None else [found.lo, found.hi],
        "kld_per_squared_sigma": _bounds(found, "coefficient"),
    }


def _bounds(found: NoiseGrowth, name: str) -> dict[str, float] | None:
    interval = getattr(found, name)
    return None if interval is None else asdict(interval)


def _harm(curve: Mapping[str, Any]) -> float:
    return float(curve["points"][-1]["kld"]["value"])


def _name(curve: Mapping[str, Any]) -> str:
    return str(_Part(curve["layer"], curve["stream"]))


def _noise_headline(curve: Mapping[str, Any]) -> Metric:
    slope, reach, level = curve["slope"], curve["quadratic_range"], curve["kld_per_squared_sigma"]
    text = "no slope: the noise changed nothing"
    if slope:
        text = f"KL grows as σ^{slope['value']:.2f} [{slope['lo']:.2f}, {slope['hi']:.2f}]"
    if reach and level:
        text += (
            f"; quadratic from σ = {reach[0]:g} to {reach[1]:g}: "
            f"{level['value']:.3g} [{level['lo']:.3g}, {level['hi']:.3g}] nats · σ²"
        )
    return Metric(f"noise in {_name(curve)}", text)


def _noise_table(curves: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        [
            _name(c),
            f"{p['sigma']:g}",
            kl_text(p),
            (
                f"{p['dppl_pct']['value']:+.2f} [{p['dppl_pct']['lo']:+.2f},"
                f" {p['dppl_pct']['hi']:+.2f}]"
            ),
        ]
        for c in sorted(curves, key=_harm, reverse=True)[:8]
        for p in c["points"]
    ]
    return Table(
        "Noise and what it costs", ("where", "σ / rms", "KL (nats)", "Δppl %"), rows, frozenset({1})
    )


def _noise_chart(curves: Sequence[Mapping[str, Any]]) -> Chart:
    series = [
        Series(
            _name(c),
            [
                Point(p["sigma"], p["kld"]["value"], p["kld"]["lo"], p["kld"]["hi"])
                for p in c["points"]
                if p["kld"]["value"] > 0
            ],
        )
        for c in sorted(curves, key=_harm, reverse=True)[:6]
    ]
    return Chart(
        "KL by size of the noise",
        "line",
        series,
        x_label="σ / rms",
        y_label="KL (nats)",
        log_x=True,
        log_y=True,
    )
