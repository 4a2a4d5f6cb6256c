"""`assay kv allocate`: bits for each layer and stream, for the least predicted KL.

Each part is coded alone at the codec's own bits b₀; its KL falls by about 4 for every bit (the
error of a quantiser is quartered), so KL(b) ≈ KL(b₀) · 4^(b₀ - b). Bits are given out in steps
where they save most KL for their bytes, until the budget is spent; a part that would need more
than the most bits the codec has stays exact, so boundary layers are found rather than guessed.
The choice is then measured again on windows that took no part in it, beside the same codec with
equal bits everywhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from assay.environment import describe
from assay.errors import UsageError
from assay.fidelity.budget import Budget
from assay.fidelity.plan import QUICK_MINUTES
from assay.progress import NO_PROGRESS, Progress
from assay.verdict import Chart, Metric, Point, Report, Series, Table, Verdict
from assay_lab.kv.attribute import alone, count_alone, figures, kl_text, parts_table
from assay_lab.kv.evaluator import CodecEvaluator
from assay_lab.kv.interruption import Unfinished
from assay_lab.kv.opening import ModelOnText, Work, open_evaluator
from assay_lab.kv.spec import KvSpec, Recipe, parse_spec, with_parameters
from assay_lab.kv.stream_coder import Key
from assay_lab.options import EXACT_BITS, AllocationPlan

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
