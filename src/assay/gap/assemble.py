"""From what was scored to what was found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assay.engines.setup import setup_differences
from assay.gap.amounts import Effect, effect, ratio
from assay.gap.baseline import Corners
from assay.gap.bench import Bench, Measured
from assay.gap.buckets import Decomposition, decompose
from assay.gap.closure import closed, closed_nll
from assay.gap.harness import difference_json, effects_json
from assay.gap.layers import attribute
from assay.gap.measure import SIDES, Runs
from assay.gap.noise import NoiseCurve, curve, kl_at
from assay.gap.outcome import CodecGap, Floors, Outcome
from assay.gap.plan import GapPlan
from assay.gap.recommend import judged
from assay.gap.residual import relative_error, residuals
from assay.gap.sums import WindowSums, aligned


def outcome_of(bench: Bench, runs: Runs) -> Outcome:
    """Buckets, floors, phases and recommendations."""
    plan, corners = bench.plan, Corners(bench.plan)
    sums = _sums(runs)
    floors = _floors(runs.path)
    decomposition = _decomposition(plan, corners, runs, sums)
    own, other = sums["codec"], sums["codec.candidate"]
    curves = {
        side: curve(runs.sides[side].noise, floors.repeat_kl, plan.seed)
        for side in SIDES
        if runs.sides[side].noise
    }
    specs = {"reference": plan.reference, "candidate": plan.candidate}
    facts = {side: bench.facts.get(spec, {}) for side, spec in specs.items()}
    size = runs.path.get("asked", runs.path["codec.candidate"]).bytes
    return Outcome(
        plan=plan,
        decomposition=decomposition,
        floors=floors,
        codec_gap=CodecGap(effect(own), effect(other), effect(other - own)),
        closed_kl=closed(decomposition.closure.kl, decomposition.total.kl, floors.repeat_kl),
        closed_nll=closed_nll(decomposition.closure.dnll, decomposition.total.dnll, floors.repeat_dnll),
        same=corners.same_engine and corners.asked.lossless,
        setup=setup_differences(*(facts[s].get("setup", {}) for s in SIDES)),
        text=bench.text,
        engines=facts,
        bytes=size.to_json() if size else None,
        switches=[{**own_effect(m).to_json(), "name": name} for name, m in runs.switched.items()],
        residuals=residuals(runs.path["codec"], runs.path["codec.candidate"]) if plan.wants(2) else (),
        noise=curves,
        noise_ratio=_noise_ratio(curves),
        matched=_matched(runs, curves),
        layers={
            side: attribute(runs.layers, plan.groups, runs.sides[side].alone, runs.sides[side].joint)
            for side in SIDES
            if runs.sides[side].alone
        },
        harness={side: effects_json(found) for side in SIDES if (found := runs.sides[side].harness)},
        calibration={side: _tables(found) for side in SIDES if (found := runs.sides[side].tables)},
        recommendations=judged(runs.proposals, runs.proposed) if runs.proposed else (),
        skipped=dict(runs.skipped),
    )


def _sums(runs: Runs) -> dict[str, WindowSums]:
    """Everything that the buckets are made of, over the tokens that all of it scored."""
    seen = {name: m.seen for name, m in runs.path.items() if not name.startswith("floor.")}
    parts = {name: m.seen for name, m in runs.sides["reference"].alone.items()}
    return aligned({**seen, **parts, "total": runs.total.seen})


def _decomposition(
    plan: GapPlan, corners: Corners, runs: Runs, sums: Mapping[str, WindowSums]
) -> Decomposition:
    steps = [(step.name, sums[step.name]) for step in runs.steps[:-1]]
    notes = {}
    if plan.mode == plan.base_mode:
        notes["harness"] = "zero by construction: one mode"
    if corners.same_engine:
        notes["engine"] = "zero by construction: one engine"
    return decompose(
        [*steps, (runs.steps[-1].name, sums["candidate"])],
        sums["codec"],
        sums["both"],
        sums["total"],
        sums.get("asked"),
        layers=[(name, sums[name]) for name in runs.sides["reference"].alone],
        notes=notes,
    )


def own_effect(measured: Measured) -> Effect:
    """The effect of one run over its own tokens."""
    return effect(aligned({"run": measured.seen})["run"])


def _floors(path: Mapping[str, Measured]) -> Floors:
    rounding = path.get("floor.rounding")
    return Floors(
        own_effect(path["floor.reference"]),
        own_effect(path["floor.candidate"]),
        own_effect(rounding) if rounding else None,
    )


def _noise_ratio(curves: Mapping[str, NoiseCurve]) -> list[dict[str, Any]]:
    """KL of the candidate over that of the reference at every level, on the same windows."""
    if len(curves) < 2:
        return []
    rows = []
    for sigma in curves["reference"].sigmas:
        found = ratio(curves["candidate"].sums[sigma].kl, curves["reference"].sums[sigma].kl)
        if found is not None:
            rows.append({"sigma": sigma, "value": found.value, "lo": found.lo, "hi": found.hi})
    return rows


def _matched(runs: Runs, curves: Mapping[str, NoiseCurve]) -> dict[str, dict[str, Any]]:
    """The codec's KL on each engine, and that of noise of its size."""
    found = {}
    for side, noise in curves.items():
        joint = runs.sides[side].joint
        sigma = relative_error(joint)
        found[side] = {
            "sigma": sigma,
            "codec_kl": own_effect(joint).kl.value,
            "noise_kl": kl_at(noise, sigma),
        }
    return found


def _tables(measured: Mapping[str, Measured]) -> dict[str, Any]:
    return {
        **effects_json(measured),
        "candidate_minus_reference": difference_json(measured, "reference", "candidate"),
    }
