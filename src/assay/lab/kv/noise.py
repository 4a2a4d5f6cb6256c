"""`assay kv noise`: how much an error of known size in keys and values costs a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.environment import describe
from assay.errors import UsageError
from assay.lab.kv.allocate import figures, kl_text
from assay.lab.kv.fit import kept_layers
from assay.lab.kv.lab import Measured, Unfinished, open_lab
from assay.lab.options import NoisePlan
from assay.progress import NO_PROGRESS, Progress
from assay.stats.intervals import Interval, Resampling, resampled_counts
from assay.verdict import Chart, Metric, Point, Report, Series, Table, Verdict

# -----------------------------------------------------------------------------
# How the KL of a model grows with the size σ of an error in its cache: slope, and the range where it is quadratic.
#
# A small error changes the logits in proportion, and their KL by its square: KL = c σ², slope 2 in a log-log plot. Above
# that range the model saturates; below it, errors drown in the rounding of the cache's own type.

QUADRATIC = 2.0
TOLERANCE = 0.3
"""A slope between neighbours within this of 2 belongs to the quadratic range."""


@dataclass(frozen=True)
class NoiseGrowth:
    """`slope` of log KL over log σ; the quadratic range from `lo` to `hi` with c = KL / σ² in it, None without one."""

    slope: Interval | None
    lo: float | None
    hi: float | None
    coefficient: Interval | None


def noise_growth(
    sigmas: Sequence[float],
    kl: Sequence[Sequence[float]],
    tokens: Sequence[int],
    resampling: Resampling,
    confidence: float = 0.95,
) -> NoiseGrowth:
    """From the KL sums [sigmas][windows] and the tokens of each window; windows are resampled for intervals.

    Sizes whose KL is 0 say nothing about a slope and are left out.
    """
    sums, weights = np.asarray(kl, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
    some = sums.sum(axis=1) > 0
    x, sums = np.log(np.asarray(sigmas)[some]), sums[some]
    if x.size < 2:
        return NoiseGrowth(None, None, None, None)
    y = np.log(sums.sum(axis=1) / weights.sum())
    draws = np.concatenate(
        [_logs(c, sums, weights) for c in resampled_counts(weights.size, resampling)]
    )  # [draws, sigmas]
    tail = (1 - confidence) / 2

    def between(value: float, drawn: NDArray[np.float64]) -> Interval:
        lo, hi = np.quantile(drawn, [tail, 1 - tail])
        return Interval(value, float(lo), float(hi))

    slope = between(float(_slope(x, y[None])[0]), _slope(x, draws))
    run = longest_run([abs(float(s) - QUADRATIC) <= TOLERANCE for s in np.diff(y) / np.diff(x)])
    if run is None:
        return NoiseGrowth(slope, None, None, None)
    first, last = run
    inside = slice(first, last + 2)
    level = (y - QUADRATIC * x)[inside].mean()
    drawn = np.exp((draws - QUADRATIC * x)[:, inside].mean(axis=1))
    return NoiseGrowth(slope, math.exp(x[first]), math.exp(x[last + 1]), between(math.exp(float(level)), drawn))


def longest_run(good: Sequence[bool]) -> tuple[int, int] | None:
    """First and last index of the longest run of true values, the earliest of equals; None without any."""
    best: tuple[int, int] | None = None
    start: int | None = None
    for i, value in enumerate([*good, False]):
        if value and start is None:
            start = i
        elif not value and start is not None:
            if best is None or i - start > best[1] - best[0] + 1:
                best = start, i - 1
            start = None
    return best


def _logs(counts: NDArray[np.float64], sums: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log of the mean KL of every size in each draw [draws, sigmas]."""
    found: NDArray[np.float64] = np.log(np.maximum(counts @ sums.T, 1e-300) / (counts @ weights)[:, None])
    return found


def _slope(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least-squares slope of each row of y over x."""
    off = x - x.mean()
    found: NDArray[np.float64] = (y @ off) / (off @ off)
    return found


# -----------------------------------------------------------------------------

EACH = ("all", "stream", "layer")


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
    with open_lab(
        plan.model,
        plan.text,
        windows=plan.windows,
        length=plan.length,
        mode=plan.mode,
        batch=plan.batch,
        progress=progress,
    ) as lab:
        shape = lab.bench.shape
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
        headline=[_headline(c) for c in sorted(curves, key=_harm, reverse=True)[:3]],
        blocks=[_table(curves), _chart(curves)] if curves else [],
        interrupted=cut.interrupted,
        summary=f"{sum(map(len, points.values()))} measurements on {plan.windows} windows of {plan.length} tokens, "
        f"{plan.mode}",
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
        [p["sigma"] for p in points], [p["kl_sums"] for p in points], points[0]["tokens"], Resampling(2000, seed)
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


def _headline(curve: Mapping[str, Any]) -> Metric:
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


def _table(curves: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        [
            _name(c),
            f"{p['sigma']:g}",
            kl_text(p),
            f"{p['dppl_pct']['value']:+.2f} [{p['dppl_pct']['lo']:+.2f}, {p['dppl_pct']['hi']:+.2f}]",
        ]
        for c in sorted(curves, key=_harm, reverse=True)[:8]
        for p in c["points"]
    ]
    return Table("Noise and what it costs", ("where", "σ / rms", "KL (nats)", "Δppl %"), rows, frozenset({1}))


def _chart(curves: Sequence[Mapping[str, Any]]) -> Chart:
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
        "KL by size of the noise", "line", series, x_label="σ / rms", y_label="KL (nats)", log_x=True, log_y=True
    )


def _usage(message: str, remedy: str) -> UsageError:
    return UsageError(message, remedy=remedy, finding_id="kv.usage")
