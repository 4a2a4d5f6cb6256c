"""`assay kv allocate`: bits for every layer and stream under a budget of stored bytes, from measured sensitivity.

Each part is coded alone at the codec's own bits b₀; its KL falls by about 4 for every bit (the error of a quantiser is
quartered), so KL(b) ≈ KL(b₀) · 4^(b₀ − b). Bits are given out in steps where they save most KL for their bytes, until
the budget is spent; a part that would need more than the most bits the codec has stays exact, so boundary layers are
found rather than guessed. The choice is then measured again on windows that took no part in it, beside the same
codec with equal bits everywhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from assay.environment import describe
from assay.errors import UsageError
from assay.lab.kv.attribute import alone, figures, measure
from assay.lab.kv.cache_hook import Mode
from assay.lab.kv.fit import CoderSet, kept_layers
from assay.lab.kv.lab import Lab, Ledger, Session, session
from assay.lab.kv.live_stream import Key
from assay.lab.kv.spec import KvSpec, Recipe, parse_spec, with_parameters
from assay.lab.options import EXACT_BITS, AllocationPlan
from assay.progress import NO_PROGRESS, Progress
from assay.verdict import Chart, Metric, Point, Report, Series, Table, Verdict

SEARCHES = 8
"""Rounds in which the budget of bits is corrected until the real streams have the ratio asked for."""
TOLERANCE = 0.01


def run_allocate(plan: AllocationPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Measure, choose, and measure the choice on fresh windows."""
    spec = parse_spec(plan.codec)
    start = {s: bits_of(r) for s in ("k", "v") if (r := spec.of(s))}
    ledger = Ledger({"allocate": plan.facts()})
    with session(
        plan.model,
        plan.text,
        windows=plan.windows,
        fresh=plan.fresh,
        length=plan.length,
        calibration=plan.calibration,
    ) as opened:
        opened.require_fresh(plan.windows, plan.fresh)
        mode = Mode(plan.mode)
        lab = opened.lab(opened.windows, mode, plan.batch)
        parts = alone(opened, lab, spec, plan, ledger, progress)
        sensitivity = {(p["layer"], p["stream"]): (p["kld"]["value"], start[p["stream"]]) for p in parts}
        probe = opened.lab(opened.windows[:1], mode, 1)
        bits, coders = _search(plan, spec, opened, probe, sensitivity, progress)
        uniform_bits, uniform = _search_uniform(plan, spec, opened, probe, sensitivity, progress)
        predicted = sum(predicted_kl(*sensitivity[key], bits[key]) for key in bits)
        again = opened.lab(opened.fresh, mode, plan.batch)
        chosen_in = figures(measure(lab, coders.by_stream, progress, "the choice, same windows"))
        chosen = figures(measure(again, coders.by_stream, progress, "the choice, fresh windows"))
        equal = figures(measure(again, uniform.by_stream, progress, "equal bits, fresh windows"))
        text = opened.text
    ledger.forget()
    rows = [{"layer": key[0], "stream": key[1], "bits": b} for key, b in sorted(bits.items())]
    exact = sorted({layer for (layer, _), b in bits.items() if b >= EXACT_BITS})
    return Report(
        command="kv allocate",
        verdict=Verdict.PASS,
        subject={"model": plan.model, "plan": plan.facts()},
        results={
            "codec": str(spec),
            "bits": rows,
            "exact_layers": exact,
            "predicted_kld": predicted,
            "same_windows": chosen_in,
            "fresh_windows": chosen,
            "winners_curse": chosen["kld"]["value"] - chosen_in["kld"]["value"],
            "equal_bits": {"bits": uniform_bits, **equal},
            "text": text,
        },
        environment=describe(),
        headline=[
            Metric("chosen, fresh windows", f"KL {_text(chosen)} nats at {chosen['ratio']:.2f}×"),
            Metric("equal bits, fresh windows", f"KL {_text(equal)} nats at {equal['ratio']:.2f}×"),
            Metric("winner's curse", f"{chosen['kld']['value'] - chosen_in['kld']['value']:+.2g} nats"),
        ],
        blocks=[_table(rows), _chart(rows)],
        summary=f"bits for {len(bits)} streams at {plan.target_ratio:g}×",
    )


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


def _search(
    plan: AllocationPlan,
    spec: KvSpec,
    opened: Session,
    probe: Lab,
    sensitivity: Mapping[Key, tuple[float, float]],
    progress: Progress,
) -> tuple[dict[Key, float], CoderSet]:
    """The allocation whose real streams come closest to the ratio from above."""
    return _aim(
        plan,
        opened,
        probe,
        progress,
        lambda mean: allocate(sensitivity, mean, plan.step, plan.least, plan.most),
        spec,
    )


def _search_uniform(
    plan: AllocationPlan,
    spec: KvSpec,
    opened: Session,
    probe: Lab,
    sensitivity: Mapping[Key, tuple[float, float]],
    progress: Progress,
) -> tuple[float, CoderSet]:
    bits, coders = _aim(plan, opened, probe, progress, lambda mean: dict.fromkeys(sensitivity, mean), spec)
    return next(iter(bits.values())), coders


def _aim(
    plan: AllocationPlan, opened: Session, probe: Lab, progress: Progress, choose: Any, spec: KvSpec
) -> tuple[dict[Key, float], CoderSet]:
    """Correct the mean bits until the streams of one window have the ratio asked for, within 1 %."""
    lo, hi = plan.least, EXACT_BITS
    mean = min(max(EXACT_BITS / plan.target_ratio, lo), hi)
    best: tuple[dict[Key, float], CoderSet] | None = None
    for _ in range(SEARCHES):
        bits = choose(mean)
        coders = _coders(opened, spec, bits)
        ratio = measure(probe, coders.by_stream, progress, f"{mean:.2f} bits").bytes.ratio
        if ratio >= plan.target_ratio * (1 - TOLERANCE):
            best = bits, coders
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


def _coders(opened: Session, spec: KvSpec, bits: Mapping[Key, float]) -> CoderSet:
    def recipe(layer: int, stream: str) -> Recipe | None:
        found, given = spec.of(stream), bits.get((layer, stream), EXACT_BITS)
        return None if found is None or given >= EXACT_BITS else with_bits(found, given)

    return opened.bench.fit_all(recipe, kept_layers(opened.bench.shape, ()))


def _text(figure: Mapping[str, Any]) -> str:
    kld = figure["kld"]
    return f"{kld['value']:.3g} [{kld['lo']:.3g}, {kld['hi']:.3g}]"


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
