"""`assay kv attribute` and `assay kv allocate`: which layers and streams a codec hurts, and bits for each of them under a budget."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from assay.environment import describe
from assay.errors import UsageError
from assay.fidelity.cost import Budget
from assay.fidelity.plan import QUICK_MINUTES
from assay.lab.kv.codec import CacheShape
from assay.lab.kv.fit import kept_layers
from assay.lab.kv.lab import Lab, Measured, Unfinished, open_lab
from assay.lab.kv.spec import KvSpec, Recipe, parse_spec, with_parameters
from assay.lab.kv.stream_coder import Key
from assay.lab.options import EXACT_BITS, AllocationPlan, AttributionPlan
from assay.progress import NO_PROGRESS, Progress
from assay.stats.intervals import cluster_ratio, not_negative
from assay.verdict import Chart, Metric, Point, Report, Series, Table, Verdict

# -----------------------------------------------------------------------------
# Attribution: every layer and stream is coded alone while the others stay exact; then all together.
#
# The additivity ratio is the sum of the KLs of the single ones over that of all: near 1 where errors do not meet, below
# where they feed each other.


def run_attribute(plan: AttributionPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Measure all together, then each part alone. Interrupted, the report holds the parts that were measured."""
    spec, budget = parse_spec(plan.codec), Budget.of(plan.budget, plan.quick, QUICK_MINUTES)
    parts: list[dict[str, Any]] = []
    joint: dict[str, Any] | None = None
    with open_lab(
        plan.model,
        plan.text,
        windows=plan.windows,
        length=plan.length,
        mode=plan.mode,
        batch=plan.batch,
        calibration=plan.calibration,
        budget=budget,
        codecs=lambda shape: 1 + count_alone(shape, spec, plan.each, plan.skip_layers),
        least_codecs=2,
        progress=progress,
    ) as lab:
        plan = replace(plan, windows=len(lab.windows), length=lab.length)
        shape = lab.bench.shape
        count = count_alone(shape, spec, plan.each, plan.skip_layers)
        with Unfinished(lambda: joint) as cut:
            measured = lab.measure(plan.codec, skip_layers=plan.skip_layers, label="all together", measure_windows=1)
            joint = figures(measured)
            for part in alone(lab, spec, plan.each, plan.skip_layers):
                parts.append(part)
                if budget.left() <= 0 and (missing := count - len(parts)):
                    after = f"{part['layer']}.{part['stream']}"
                    budget.leave_out(f"{missing} of {count} parts, those behind {after}", "what these lose alone")
                    break
        text, notices = lab.text, lab.notices()
    total, whole = sum(p["kld"]["value"] for p in parts), len(parts) == count
    ratio = total / joint["kld"]["value"] if whole and joint and joint["kld"]["value"] else None
    headline = [Metric("sum of the single ones", f"{total:.3g} nats of {len(parts)} parts")] if parts else []
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
        summary=f"{len(parts)} parts measured on {plan.windows} windows of {plan.length} tokens, {plan.mode}",
    )


def count_alone(shape: CacheShape, spec: KvSpec, each: str, skip_layers: Sequence[int] = ()) -> int:
    """How many parts `alone` measures of a model with that cache."""
    streams = sum(spec.of(s) is not None for s in "kv") if each == "stream" else 1
    return streams * len(kept_layers(shape, skip_layers))


def alone(lab: Lab, spec: KvSpec, each: str, skip_layers: Sequence[int] = ()) -> Iterator[dict[str, Any]]:
    """Figures of every layer (or `each` stream of a layer) coded alone, in order."""
    for layer in kept_layers(lab.bench.shape, skip_layers):
        for streams in ("k", "v") if each == "stream" else ("kv",):
            if any(spec.of(s) for s in streams):
                measured = lab.measure(
                    str(spec), layers=(layer,), streams=streams, label=f"{layer}.{streams}", measure_windows=1
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
    rows = [[str(p["layer"]), p["stream"], kl_text(p), f"{100 * p['kld']['value'] / total:.1f}"] for p in ranked[:20]]
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
            s, [Point(p["layer"], p["kld"]["value"], p["kld"]["lo"], p["kld"]["hi"]) for p in parts if p["stream"] == s]
        )
        for s in streams
    ]
    return Chart("KL of each layer alone", "line", series, x_label="layer", y_label="KL (nats)")


# -----------------------------------------------------------------------------
# Allocation: bits for every layer and stream under a budget of stored bytes, from measured sensitivity.
#
# Each part is coded alone at the codec's own bits b₀; its KL falls by about 4 for every bit (the error of a quantiser is
# quartered), so KL(b) ≈ KL(b₀) · 4^(b₀ - b). Bits are given out in steps where they save most KL for their bytes, until
# the budget is spent; a part that would need more than the most bits the codec has stays exact, so boundary layers are
# found rather than guessed. The choice is then measured again on windows that took no part in it, beside the same
# codec with equal bits everywhere.


SEARCHES = 8
"""Rounds in which the budget of bits is corrected until the real streams have the ratio asked for."""
TOLERANCE = 0.01
AFTER = 5
"""What choosing bits and measuring them again takes, in measurements of one part."""


def run_allocate(plan: AllocationPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Measure, choose, and measure the choice on fresh windows. Interrupted, the report holds what was measured."""
    spec, budget = parse_spec(plan.codec), Budget.of(plan.budget, plan.quick, QUICK_MINUTES)
    start = {s: bits_of(r) for s in ("k", "v") if (r := spec.of(s))}
    parts: list[dict[str, Any]] = []
    bits: dict[Key, float] = {}
    measured: dict[str, dict[str, Any]] = {}
    predicted: float | None = None
    with open_lab(
        plan.model,
        plan.text,
        windows=plan.windows,
        fresh=plan.fresh,
        length=plan.length,
        mode=plan.mode,
        batch=plan.batch,
        calibration=plan.calibration,
        budget=budget,
        codecs=lambda shape: AFTER + count_alone(shape, spec, plan.each),
        progress=progress,
    ) as lab:
        plan = replace(plan, windows=len(lab.windows), length=lab.length)
        with Unfinished(lambda: parts) as cut:
            for part in alone(lab, spec, plan.each):
                if budget.left() <= 0:
                    budget.leave_out(f"{part['layer']}.{part['stream']} and what comes after it", "which bits to give")
                    break
                parts.append(part)
            if len(parts) == count_alone(lab.bench.shape, spec, plan.each):
                sensitivity = {(p["layer"], p["stream"]): (p["kld"]["value"], start[p["stream"]]) for p in parts}
                search = _Search(plan, spec, lab.on(lab.windows[:1], batch=1))
                bits = search.aim(lambda mean: allocate(sensitivity, mean, plan.step, plan.least, plan.most))
                predicted = sum(predicted_kl(*sensitivity[key], bits[key]) for key in bits)
                equal = search.aim(lambda mean: dict.fromkeys(sensitivity, mean))
                again = lab.on(lab.fresh)
                for name, where, given in (
                    ("same_windows", lab, bits),
                    ("fresh_windows", again, bits),
                    ("equal_bits", again, equal),
                ):
                    found = where.measure(plan.codec, label=name.replace("_", " "), **placed(spec, given))
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
            **{name: measured.get(name) for name in ("same_windows", "fresh_windows", "equal_bits")},
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
    titles = {"fresh_windows": "allocated bits, fresh windows", "equal_bits": "equal bits, fresh windows"}
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
            "give bits in place of step and weights, or several steps to weigh against each other: `assay kv sweep`",
        )
    return float(recipe.codec.bits)  # type: ignore[attr-defined]


def with_bits(recipe: Recipe, bits: float) -> Recipe:
    """The same recipe with other bits; whole ones for codecs that take no fractions."""
    value: Any = bits if isinstance(recipe.codec.bits, float) else round(bits)  # type: ignore[attr-defined]
    return Recipe(recipe.around, with_parameters(recipe.codec, {"bits": value}))


def predicted_kl(measured: float, at: float, bits: float) -> float:
    """KL of one part alone at other bits, by the quartering of a quantiser's error; nothing where it is exact."""
    return 0.0 if bits >= EXACT_BITS else measured * 4.0 ** (at - bits)


def allocate(
    sensitivity: Mapping[Key, tuple[float, float]], mean_bits: float, step: float, least: float, most: float
) -> dict[Key, float]:
    """Bits of every part with the mean `mean_bits`, given out in steps where the predicted KL falls most for a bit.

    From `most` the only step is to exact (16 bits). Greedy is optimal where each step gains less than the one before.
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
    probe: Lab

    def aim(self, choose: Callable[[float], dict[Key, float]]) -> dict[Key, float]:
        """The choice that comes closest to the ratio from above, within 1 %; UsageError where none reaches it."""
        plan = self.plan
        lo, hi = plan.least, EXACT_BITS
        mean = min(max(EXACT_BITS / plan.target_ratio, lo), hi)
        best: dict[Key, float] | None = None
        for _ in range(SEARCHES):
            bits = choose(mean)
            found = self.probe.measure(plan.codec, label=f"{mean:.2f} bits", **placed(self.spec, bits))
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
                f"{plan.codec} does not reach {plan.target_ratio:g}× with {plan.least:g} bits or more a value",
                "allow fewer bits (--least), fewer exact tokens, or a smaller ratio",
            )
        return best


def placed(spec: KvSpec, bits: Mapping[Key, float]) -> dict[str, Any]:
    """The fields of a `HookPlan` that give every stream its bits; one of 16 bits or more stays exact."""
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
        [[str(r["layer"]), r["stream"], "exact" if r["bits"] >= EXACT_BITS else f"{r['bits']:g}"] for r in rows],
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
