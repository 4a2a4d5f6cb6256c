"""What an error in each layer and stream costs: `assay kv attribute`, `assay kv allocate` and
`assay kv noise`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.environment import describe
from assay.errors import UsageError
from assay.fidelity.budget import Budget
from assay.fidelity.plan import QUICK_MINUTES
from assay.progress import NO_PROGRESS, Progress
from assay.stats import Interval, Resampling, cluster_ratio, not_negative, resampled_counts
from assay.verdict import Chart, Metric, Point, Report, Series, Table, Verdict
from assay_lab.kv.cache_shape import CacheShape
from assay_lab.kv.evaluator import CodecEvaluator
from assay_lab.kv.interruption import Unfinished
from assay_lab.kv.layer_coders import kept_layers
from assay_lab.kv.measured import Measured
from assay_lab.kv.opening import ModelOnText, Work, open_evaluator
from assay_lab.kv.spec import KvSpec, Recipe, parse_spec, with_parameters
from assay_lab.kv.stream_coder import Key
from assay_lab.options import EXACT_BITS, AllocationPlan, AttributionPlan, NoisePlan

# Attribution: every layer and stream is coded alone while the others stay exact; then all together.
#
# The additivity ratio is the sum of the KLs of the single ones over that of all: near 1 where
# errors do not meet, below where they feed each other.


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


# Allocation: bits for every layer and stream under a budget of stored bytes, from measured
# sensitivity.
#
# Each part is coded alone at the codec's own bits b₀; its KL falls by about 4 for every bit (the
# error of a quantiser is quartered), so KL(b) ≈ KL(b₀) · 4^(b₀ - b). Bits are given out in steps
# where they save most KL for their bytes, until the budget is spent; a part that would need more
# than the most bits the codec has stays exact, so boundary layers are found rather than guessed.
# The choice is then measured again on windows that took no part in it, beside the same codec with
# equal bits everywhere.


SEARCHES = 8
"""Rounds in which the budget of bits is corrected until the real streams have the ratio asked for.
"""
TOLERANCE = 0.01
AFTER = 5
"""What choosing bits and measuring them again takes, in measurements of one part."""


def run_allocate(plan: AllocationPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Measure, choose, and measure the choice on fresh windows. Interrupted, the report holds what
    was measured.
    """
    spec, budget = parse_spec(plan.codec), Budget.of(plan.budget, plan.quick, QUICK_MINUTES)
    start = {s: bits_of(r) for s in ("k", "v") if (r := spec.of(s))}
    parts: list[dict[str, Any]] = []
    bits: dict[Key, float] = {}
    measured: dict[str, dict[str, Any]] = {}
    predicted: float | None = None
    work = Work(budget, lambda shape: AFTER + count_alone(shape, spec, plan.each))
    with open_evaluator(ModelOnText.of(plan), work, progress) as lab:
        plan = replace(plan, windows=len(lab.windows), length=lab.length)
        with Unfinished(lambda: parts, budget) as cut:
            for part in alone(lab, spec, plan.each):
                if budget.left() <= 0:
                    budget.leave_out(
                        f"{part['layer']}.{part['stream']} and what comes after it",
                        "which bits to give",
                    )
                    break
                parts.append(part)
            if len(parts) == count_alone(lab.layer_coders.shape, spec, plan.each):
                sensitivity = {
                    (p["layer"], p["stream"]): (p["kld"]["value"], start[p["stream"]])
                    for p in parts
                }
                search = _Search(plan, spec, lab.on(lab.windows[:1], batch=1))
                bits = search.aim(
                    lambda mean: allocate(sensitivity, mean, plan.step, plan.least, plan.most)
                )
                predicted = sum(predicted_kl(*sensitivity[key], bits[key]) for key in bits)
                equal = search.aim(lambda mean: dict.fromkeys(sensitivity, mean))
                again = lab.on(lab.fresh)
                for name, where, given in (
                    ("same_windows", lab, bits),
                    ("fresh_windows", again, bits),
                    ("equal_bits", again, equal),
                ):
                    found = where.measure(
                        plan.codec, label=name.replace("_", " "), **placed(spec, given)
                    )
                    measured[name] = figures(found)
                measured["equal_bits"]["bits"] = next(iter(equal.values()))
        text, notices = lab.text, lab.notices()
    rows = [{"layer": key[0], "stream": key[1], "bits": b} for key, b in sorted(bits.items())]
    curse = None
    if "fresh_windows" in measured:
        curse = measured["fresh_windows"]["kld"]["value"] - measured["same_windows"]["kld"]["value"]
    return Report(
        command="kv allocate",
        verdict=cut.verdict(Verdict.PASS if bits else Verdict.INCONCLUSIVE),
        subject={"model": plan.model, "plan": plan.facts()},
        findings=[*cut.findings(), *budget.findings(), *notices],
        results={
            "codec": str(spec),
            "parts": parts,
            "bits": rows,
            "exact_layers": sorted({layer for (layer, _), b in bits.items() if b >= EXACT_BITS}),
            "predicted_kld": predicted,
            **{
                name: measured.get(name) for name in ("same_windows", "fresh_windows", "equal_bits")
            },
            "winners_curse": curse,
            "text": text,
            **budget.results(),
        },
        environment=describe(),
        headline=[Metric("measured", f"{len(parts)} parts alone"), *_headline(measured, curse)],
        blocks=[_table(rows), _chart(rows)] if rows else [parts_table(parts)] if parts else [],
        interrupted=cut.interrupted,
        summary=f"bits for {len(bits)} streams at {plan.target_ratio:g}×",
    )


def _headline(measured: Mapping[str, Mapping[str, Any]], curse: float | None) -> list[Metric]:
    titles = {
        "fresh_windows": "allocated bits, fresh windows",
        "equal_bits": "equal bits, fresh windows",
    }
    found = [
        Metric(title, f"KL {kl_text(measured[name])} nats at {measured[name]['ratio']:.2f}×")
        for name, title in titles.items()
        if name in measured
    ]
    return found if curse is None else [*found, Metric("winner's curse", f"{curse:+.2g} nats")]


def bits_of(recipe: Recipe) -> float:
    """The bits of a recipe's codec; UsageError where it has no such parameter."""
    if "bits" not in {f.name for f in fields(recipe.codec)}:
        raise _usage(f"{recipe.codec.name} has no bits to allocate", "use hadamard, int or pca")
    if getattr(recipe.codec, "step", 0.0):
        raise _usage(
            f"{recipe.codec}: its step sets its bits, so there are none to allocate",
            "give bits in place of step and weights, or several steps to weigh against each other:"
            " `assay kv sweep`",
        )
    return float(recipe.codec.bits)  # type: ignore[attr-defined]


def with_bits(recipe: Recipe, bits: float) -> Recipe:
    """The same recipe with other bits; whole ones for codecs that take no fractions."""
    value: Any = bits if isinstance(recipe.codec.bits, float) else round(bits)  # type: ignore[attr-defined]
    return Recipe(recipe.around, with_parameters(recipe.codec, {"bits": value}))


def predicted_kl(measured: float, at: float, bits: float) -> float:
    """KL of one part alone at other bits, by the quartering of a quantiser's error; nothing where
    it is exact.
    """
    return 0.0 if bits >= EXACT_BITS else measured * 4.0 ** (at - bits)


def allocate(
    sensitivity: Mapping[Key, tuple[float, float]],
    mean_bits: float,
    step: float,
    least: float,
    most: float,
) -> dict[Key, float]:
    """Bits of every part with the mean `mean_bits`, given out in steps where the predicted KL falls
    most for a bit.

    From `most` the only step is to exact (16 bits). Greedy is optimal where each step gains less
    than the one before.
    """
    bits = dict.fromkeys(sensitivity, least)
    budget = mean_bits * len(bits) - least * len(bits)
    heap: list[tuple[float, Key, float]] = []

    def offer(key: Key) -> None:
        now = bits[key]
        if now >= EXACT_BITS:
            return
        after = min(now + step, most) if now < most else EXACT_BITS
        gain = predicted_kl(*sensitivity[key], now) - predicted_kl(*sensitivity[key], after)
        heapq.heappush(heap, (-gain / (after - now), key, after))

    for key in bits:
        offer(key)
    while heap:
        _, key, after = heapq.heappop(heap)
        cost = after - bits[key]
        if cost > budget + 1e-9:
            continue
        budget -= cost
        bits[key] = after
        offer(key)
    return bits


@dataclass(frozen=True)
class _Search:
    """Finds the mean bits with which the streams of one window have the ratio asked for."""

    plan: AllocationPlan
    spec: KvSpec
    probe: CodecEvaluator

    def aim(self, choose: Callable[[float], dict[Key, float]]) -> dict[Key, float]:
        """The choice that comes closest to the ratio from above, within 1 %; UsageError where none
        reaches it.
        """
        plan = self.plan
        lo, hi = plan.least, EXACT_BITS
        mean = min(max(EXACT_BITS / plan.target_ratio, lo), hi)
        best: dict[Key, float] | None = None
        for _ in range(SEARCHES):
            bits = choose(mean)
            found = self.probe.measure(
                plan.codec, label=f"{mean:.2f} bits", **placed(self.spec, bits)
            )
            ratio = found.bytes.ratio if found.bytes else 1.0
            if ratio >= plan.target_ratio * (1 - TOLERANCE):
                best = bits
                lo = mean
                if ratio <= plan.target_ratio * (1 + TOLERANCE):
                    break
            else:
                hi = mean
            mean = (lo + hi) / 2 if hi < EXACT_BITS else mean * ratio / plan.target_ratio
        if best is None:
            raise _usage(
                f"{plan.codec} does not reach {plan.target_ratio:g}× with {plan.least:g} bits or"
                " more a value",
                "allow fewer bits (--least), fewer exact tokens, or a smaller ratio",
            )
        return best


def placed(spec: KvSpec, bits: Mapping[Key, float]) -> dict[str, Any]:
    """The fields of a `HookPlan` that give every stream its bits; one of 16 bits or more stays
    exact.
    """
    codecs: dict[int, str] = {}
    for layer in {layer for layer, _ in bits}:
        recipes = {
            stream: with_bits(recipe, bits[layer, stream])
            for stream in "kv"
            if (recipe := spec.of(stream)) and bits.get((layer, stream), EXACT_BITS) < EXACT_BITS
        }
        if recipes:
            codecs[layer] = ";".join(f"{stream}:{recipe}" for stream, recipe in recipes.items())
    return {"layers": tuple(sorted(codecs)), "layer_codecs": codecs, "measure_windows": 1}


def _table(rows: list[dict[str, Any]]) -> Table:
    return Table(
        "Bits",
        ("layer", "stream", "bits"),
        [
            [str(r["layer"]), r["stream"], "exact" if r["bits"] >= EXACT_BITS else f"{r['bits']:g}"]
            for r in rows
        ],
        numeric=frozenset({0, 2}),
    )


def _chart(rows: list[dict[str, Any]]) -> Chart:
    series = [
        Series(s, [Point(r["layer"], r["bits"]) for r in rows if r["stream"] == s])
        for s in dict.fromkeys(r["stream"] for r in rows)
    ]
    return Chart("Bits of each layer", "line", series, x_label="layer", y_label="bits a value")


def _usage(message: str, remedy: str) -> UsageError:
    return UsageError(message, remedy=remedy, finding_id="kv.usage")


# `assay kv noise`: how much an error of known size in keys and values costs a model.


# How the KL of a model grows with the size σ of an error in its cache: slope, and the range where
# it is quadratic.
#
# A small error changes the logits in proportion, and their KL by its square: KL = c σ², slope 2 in
# a log-log plot. Above that range the model saturates; below it, errors drown in the rounding of
# the cache's own type.

QUADRATIC = 2.0
NOISE_TOLERANCE = 0.3
"""A slope between neighbours within this of 2 belongs to the quadratic range."""


@dataclass(frozen=True)
class NoiseGrowth:
    """`slope` of log KL over log σ; the quadratic range from `lo` to `hi` with c = KL / σ² in it,
    None without one.
    """

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
    """From the KL sums [sigmas][windows] and the tokens of each window; windows are resampled for
    intervals.

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
    run = longest_run(
        [abs(float(s) - QUADRATIC) <= NOISE_TOLERANCE for s in np.diff(y) / np.diff(x)]
    )
    if run is None:
        return NoiseGrowth(slope, None, None, None)
    first, last = run
    inside = slice(first, last + 2)
    level = (y - QUADRATIC * x)[inside].mean()
    drawn = np.exp((draws - QUADRATIC * x)[:, inside].mean(axis=1))
    return NoiseGrowth(
        slope, math.exp(x[first]), math.exp(x[last + 1]), between(math.exp(float(level)), drawn)
    )


def longest_run(good: Sequence[bool]) -> tuple[int, int] | None:
    """First and last index of the longest run of true values, the earliest of equals; None without
    any.
    """
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


def _logs(
    counts: NDArray[np.float64], sums: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Log of the mean KL of every size in each draw [draws, sigmas]."""
    found: NDArray[np.float64] = np.log(
        np.maximum(counts @ sums.T, 1e-300) / (counts @ weights)[:, None]
    )
    return found


def _slope(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least-squares slope of each row of y over x."""
    off = x - x.mean()
    found: NDArray[np.float64] = (y @ off) / (off @ off)
    return found


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
