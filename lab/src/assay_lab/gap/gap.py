"""`assay gap`: take the difference of two deployments apart, and say what would make it smaller."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from assay.engines import setup_differences
from assay.engines.ray_scorer import on_ray
from assay.engines.threads import begin_run
from assay.environment import describe
from assay.errors import AssayError
from assay.fidelity.names import label_of
from assay.fidelity.observation import pooled
from assay.progress import NO_PROGRESS, Progress
from assay.verdict import Report, Verdict
from assay_lab.gap.buckets import (
    Decomposition,
    WindowSums,
    aligned,
    decompose,
    effect,
    own_effect,
    ratio,
)
from assay_lab.gap.checks import Check, check_step, check_sum
from assay_lab.gap.configuration import Configuration, Corners
from assay_lab.gap.engine_steps import Step
from assay_lab.gap.floors import Floors, repeated, repeated_nll
from assay_lab.gap.phases.harness import effects_json, measure_harness, measure_tables, tables_json
from assay_lab.gap.phases.layers import attribute, measure_layers
from assay_lab.gap.phases.noise import NoiseCurve, curve, kl_at, measure_noise, sigmas_of
from assay_lab.gap.phases.path import measure_direct, steps_of
from assay_lab.gap.phases.residuals import relative_error, residuals
from assay_lab.gap.phases.switches import measure_switches, switches
from assay_lab.gap.plan import GapPlan
from assay_lab.gap.preflight import must_be_tried
from assay_lab.gap.proposals import Proposal, measure_proposals, proposals
from assay_lab.gap.report import blocks, headline, measured_table
from assay_lab.gap.result import CodecGap, GapResult, judged
from assay_lab.gap.run_cache import RunCache
from assay_lab.gap.verdict import findings_of, verdict_of
from assay_lab.kv.cache_bytes import NOTE
from assay_lab.kv.interruption import Unfinished
from assay_lab.kv.measured import Measured
from assay_lab.options import PHASES

SIDES = ("reference", "candidate")
CLOSING = (3, 2)
"""Runs that a budget keeps time for, in the base mode and in that of the total: both ends once more
and the floors, without which there is no repeatability."""
LAST = (0, 1)
"""What is left of them behind the floors."""


# What a decomposition scores. What the buckets are made of comes first, floors and phases after it.


@dataclass
class Side:
    """The phases of one engine, each against that engine without codec. Those that were not
    measured are empty.
    """

    noise: dict[float, Measured] = field(default_factory=dict)
    alone: dict[str, Measured] = field(default_factory=dict)
    harness: dict[str, Measured] = field(default_factory=dict)
    tables: dict[str, Measured] = field(default_factory=dict)


@dataclass
class Runs:
    """All runs, filled as they come. `path` are those that the buckets are made of, by name, and
    the floors.
    """

    path: dict[str, Measured] = field(default_factory=dict)
    sides: dict[str, Side] = field(default_factory=lambda: {side: Side() for side in SIDES})
    steps: list[Step] = field(default_factory=list)
    between: dict[str, Measured] = field(default_factory=dict)
    """The engines between reference and candidate, by the step that leads to them."""
    direct: dict[str, Measured] = field(default_factory=dict)
    """Steps against the engine before them."""
    total: Measured | None = None
    fresh: Measured | None = None
    """The candidate with codec against the reference without, on fresh windows."""
    switched: dict[str, Measured] = field(default_factory=dict)
    proposals: list[Proposal] = field(default_factory=list)
    proposed: dict[str, Measured] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def joint(self, side: str) -> Measured:
        """All of the codec on one engine, against that engine without it."""
        return self.path["codec" if side == "reference" else "codec.candidate"]

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return int(self.path["codec"].engagement.notes[NOTE]["cache"]["layers"])


def measure_all(run_cache: RunCache, runs: Runs) -> None:
    """The reference, the candidate, the steps between them, and both ends once more; each engine's
    phases with it.
    """
    plan, corners = run_cache.plan, Corners(run_cache.plan)
    if plan.codec and must_be_tried(
        plan.candidate
    ):  # now, not when all that needs the reference has been scored
        run_cache.try_out(corners.with_codec(plan.candidate))
    _measure_path(run_cache, corners, runs)
    other = Configuration(plan.candidate, plan.base, other_batch=True)
    if run_cache.states(plan.candidate):
        runs.path["floor.candidate"] = run_cache.measure(other, corners.candidate)
    _phases(run_cache, corners, "candidate", runs)
    if plan.codec and run_cache.affords(
        "recommendations", "what would make it smaller", 6, CLOSING
    ):
        _proposals(run_cache, corners, runs)
    runs.steps = steps_of(run_cache, corners)
    for step in runs.steps[:-1]:
        runs.between[step.name] = run_cache.measure(
            Configuration(step.engine, plan.base), corners.reference
        )
    single = "single switches", "what one option of an engine does alone"
    if plan.wants(1) and run_cache.affords(*single, 3, CLOSING):
        measure_direct(run_cache, runs.steps[:-1], runs.direct)
        possible = switches(plan.reference, plan.candidate, runs.steps, run_cache.facts)
        measure_switches(run_cache, possible, runs.switched, runs.skipped)
    # Both ends once more, in a run of their own: engines opened anew, windows in reverse, another
    # batch.
    again = Configuration(plan.reference, plan.mode, again=True)
    run_cache.anchor(again)
    other = Configuration(plan.reference, plan.base, other_batch=True)
    runs.path["floor.reference"] = run_cache.measure(other, corners.reference)
    if run_cache.engine(plan.reference).ability.hooks:
        noise = Configuration(plan.reference, plan.base, rounding=True)
        runs.path["floor.rounding"] = run_cache.measure(noise, corners.reference)
    _phases(run_cache, corners, "reference", runs)
    fresh = plan.wants(1) and len(run_cache.windows["fresh"]) >= 2
    fresh = fresh and run_cache.affords(
        "fresh windows", "whether the sum holds on other text", 2, LAST
    )
    if fresh:
        run_cache.anchor(corners.reference, "fresh")
    runs.total = run_cache.measure(corners.with_codec(plan.candidate, plan.mode, again=True), again)
    repeat = "checks by a direct run", "whether steps measured directly agree with the sum"
    if plan.wants(1) and run_cache.affords(*repeat, len(runs.steps)):
        measure_direct(run_cache, runs.steps, runs.direct)
    if fresh and run_cache.affords("fresh windows", "whether the sum holds on other text", 2):
        runs.fresh = run_cache.measure(
            corners.with_codec(plan.candidate), corners.reference, "fresh"
        )


def _measure_path(run_cache: RunCache, corners: Corners, runs: Runs) -> None:
    """What the buckets are made of: the codec on the reference, then the candidate without it and
    with it.
    """
    plan, ref, cand, path = run_cache.plan, corners.reference, corners.candidate, runs.path
    run_cache.anchor(ref)
    if plan.codec:
        path["codec"] = run_cache.measure(
            corners.with_codec(plan.reference, measured=plan.measured), ref
        )
        if plan.mode != plan.base:
            run_cache.anchor(Configuration(plan.reference, plan.mode))
    if run_cache.states(plan.candidate):
        run_cache.anchor(cand)
        path["candidate"] = run_cache.between(ref, cand)
    else:
        path["candidate"] = run_cache.measure(cand, ref)
    if plan.codec:
        path["both"] = run_cache.measure(corners.with_codec(plan.candidate), ref)
        with_codec = corners.with_codec(plan.candidate, measured=plan.measured)
        path["codec.candidate"] = run_cache.measure(with_codec, cand)
        if plan.mode != plan.base:
            asked = corners.with_codec(plan.candidate, plan.mode, measured=plan.measured)
            path["asked"] = run_cache.measure(asked, Configuration(plan.reference, plan.mode))


def _phases(run_cache: RunCache, corners: Corners, side: str, runs: Runs) -> None:
    """The phases of one engine that were asked for."""
    plan, found = run_cache.plan, runs.sides[side]
    if not plan.codec:
        return
    engine = getattr(plan, side)
    reserve = CLOSING if side == "candidate" else LAST

    def wants(phase: int, count: int) -> bool:
        name = f"{PHASES[phase]} of the {side}"
        return plan.wants(phase) and run_cache.affords(name, name, count, reserve)

    if wants(4, plan.groups or runs.layers):
        measure_layers(run_cache, corners, engine, runs.layers, found.alone)
    if wants(3, len(plan.sweep)):
        # Both engines get the same noise: that of the codec's error on the reference.
        sigmas = sigmas_of(relative_error(runs.path["codec"]), plan.sweep)
        measure_noise(run_cache, corners, engine, sigmas, found.noise)
    if wants(5, 7):
        refused = measure_harness(run_cache, corners, engine, found.harness)
        runs.skipped |= {f"{label_of(engine)}: {name}": why for name, why in refused.items()}
    if plan.wants(6):
        if plan.calibration and plan.other_calibration:
            if wants(6, 2):
                measure_tables(run_cache, corners, engine, found.tables)
        else:
            runs.skipped["calibration"] = (
                "give the tables of both engines: --calibration and --other-calibration"
            )


def _proposals(run_cache: RunCache, corners: Corners, runs: Runs) -> None:
    if len(run_cache.windows["fresh"]) < 2:
        runs.skipped["recommendations"] = (
            "no windows are left that took no part in the decomposition"
        )
        return
    alone, joint = runs.sides["candidate"].alone, runs.path["codec.candidate"]
    runs.proposals = proposals(corners, alone, joint, runs.layers)
    refused = measure_proposals(run_cache, corners, runs.proposals, runs.proposed)
    runs.skipped |= {f"recommendation: {name}": why for name, why in refused.items()}


# From what was scored to what was found.


def outcome_of(run_cache: RunCache, runs: Runs) -> GapResult:
    """Buckets, floors, phases and recommendations. What was not measured is left out; the path must
    have been.
    """
    plan, corners, path = run_cache.plan, Corners(run_cache.plan), runs.path
    sums = _sums(runs)
    floors = Floors(*(own_effect(path[n].seen) if n in path else None for n in _FLOORS))
    d = _decomposition(plan, corners, runs, sums)
    left = d.repeatability
    curves = {
        side: curve(found.noise, floors.repeat_kl, plan.seed)
        for side, found in runs.sides.items()
        if found.noise
    }
    specs = {"reference": plan.reference, "candidate": plan.candidate}
    facts = {side: run_cache.facts.get(spec, {}) for side, spec in specs.items()}
    size = path.get("asked", path.get("codec.candidate"))
    anchored = next(measured.seen for name, measured in path.items() if name not in _FLOORS)
    gap = None
    if plan.codec:
        own, other = sums["codec"], sums["codec.candidate"]
        gap = CodecGap(effect(own), effect(other), effect(other - own))
    return GapResult(
        plan=plan,
        decomposition=d,
        floors=floors,
        codec_gap=gap,
        repeats_kl=repeated(left.kl, d.total.kl, floors.repeat_kl) if left else None,
        repeats_nll=repeated_nll(left.dnll, d.total.dnll, floors.repeat_dnll) if left else None,
        checks=_checks(runs, d, floors),
        same=corners.self_test,
        setup=setup_differences(*(facts[s].get("setup", {}) for s in SIDES)),
        text={
            **run_cache.text,
            "ppl_reference": math.exp(float(pooled(anchored, "nll_ref").mean())),
        },
        engines=facts,
        bytes=size.bytes.to_json() if size and size.bytes else None,
        switches=[
            {**own_effect(m.seen).to_json(), "name": name} for name, m in runs.switched.items()
        ],
        residuals=residuals(path["codec"], path["codec.candidate"])
        if plan.codec and plan.wants(2)
        else (),
        noise=curves,
        noise_ratio=_noise_ratio(curves),
        matched={side: _matched(runs.joint(side), found) for side, found in curves.items()},
        layers={
            side: attribute(runs.layers, plan.groups, found.alone, runs.joint(side))
            for side, found in runs.sides.items()
            if found.alone
        },
        harness={
            side: effects_json(found.harness) for side, found in runs.sides.items() if found.harness
        },
        calibration={
            side: tables_json(found.tables) for side, found in runs.sides.items() if found.tables
        },
        recommendations=judged(runs.proposals, runs.proposed)
        if "as it is" in runs.proposed
        else (),
        skipped=dict(runs.skipped),
    )


_FLOORS = ("floor.reference", "floor.candidate", "floor.rounding")


def _sums(runs: Runs) -> dict[str, WindowSums]:
    """Everything that the buckets are made of, over the tokens that all of it scored."""
    seen = {name: m.seen for name, m in runs.path.items() if name not in _FLOORS}
    seen |= {name: m.seen for name, m in (runs.between | runs.sides["reference"].alone).items()}
    return aligned(seen | ({"total": runs.total.seen} if runs.total else {}))


def _decomposition(
    plan: GapPlan, corners: Corners, runs: Runs, sums: Mapping[str, WindowSums]
) -> Decomposition:
    notes = {}
    if plan.codec and plan.mode == plan.base:
        notes["harness"] = "zero by construction: one mode"
    if corners.same_engine:
        notes["engine"] = "zero by construction: one engine"
    last = runs.steps[-1].name if runs.steps else "engine.all"
    steps = [(step.name, sums[step.name]) for step in runs.steps[:-1] if step.name in sums]
    return decompose(
        [*steps, (last, sums["candidate"])],
        sums.get("codec"),
        sums.get("both"),
        sums.get("total"),
        sums.get("asked"),
        layers=[(name, sums[name]) for name in runs.sides["reference"].alone],
        notes=notes,
    )


def _checks(runs: Runs, d: Decomposition, floors: Floors) -> list[Check]:
    """Steps that were measured directly, and the sum of engine and codec on fresh windows."""
    path = runs.path
    against = {name: m.seen for name, m in runs.between.items()}
    if runs.steps:
        against[runs.steps[-1].name] = path["candidate"].seen
    found = [
        check_step(
            after.name,
            runs.direct[after.name].seen,
            against[before.name],
            against[after.name],
            d,
            floors,
        )
        for before, after in pairwise(runs.steps)
        if after.name in runs.direct
    ]
    if "codec.candidate" in path:
        sides = path["codec.candidate"].seen, path["candidate"].seen, path["both"].seen
        found.append(check_step("codec on the candidate", *sides, d, floors))
    return [*found, check_sum(d, runs.fresh.seen, floors)] if runs.fresh else found


def _noise_ratio(curves: Mapping[str, NoiseCurve]) -> list[dict[str, Any]]:
    """KL of the candidate over that of the reference at every level that both have, on the same
    windows.
    """
    rows = []
    for sigma in curves["reference"].sigmas if len(curves) == len(SIDES) else ():
        if sigma in curves["candidate"].sums:
            found = ratio(curves["candidate"].sums[sigma].kl, curves["reference"].sums[sigma].kl)
            if found is not None:
                rows.append({"sigma": sigma, "value": found.value, "lo": found.lo, "hi": found.hi})
    return rows


def _matched(joint: Measured, found: NoiseCurve) -> dict[str, Any]:
    """The codec's KL on an engine, and that of noise of its size."""
    sigma = relative_error(joint)
    return {
        "sigma": sigma,
        "codec_kl": own_effect(joint.seen).kl.value,
        "noise_kl": kl_at(found, sigma),
    }


@on_ray
def run_gap(plan: GapPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Decompose, attribute and recommend.

    Everything that is scored is kept, so that the same command goes on where an interrupted one
    stopped; the report of an interrupted one holds what was measured, the buckets as soon as all
    they are made of is there.
    """
    subject = {"reference": plan.reference, "candidate": plan.candidate}
    if plan.codec:
        subject["codec"] = plan.codec
    Corners(plan).preflight()
    begin_run(["gap", plan.facts()])
    run_cache, runs = RunCache(plan, progress), Runs()
    with Unfinished(lambda: run_cache.measured, run_cache.budget) as cut, run_cache:
        measure_all(run_cache, runs)
    notices = [*cut.findings("gap"), *run_cache.budget.findings(), *run_cache.notices()]
    try:
        outcome = outcome_of(run_cache, runs)
    except (KeyError, AssayError):
        if not cut:
            raise
        measured = {name: own_effect(m.seen) for name, m in run_cache.measured.items()}
        return Report(
            "gap",
            cut.verdict(Verdict.INCONCLUSIVE),
            subject,
            notices,
            {"measured": measured} | run_cache.budget.results(),
            environment=describe(),
            blocks=[measured_table(measured)] if measured else [],
            interrupted=cut.interrupted,
            summary="the buckets are not known yet",
        )
    return Report(
        command="gap",
        verdict=cut.verdict(verdict_of(outcome)),
        subject=subject,
        findings=[*notices, *findings_of(outcome)],
        results=outcome.to_json() | run_cache.budget.results(),
        environment=describe(),
        headline=headline(outcome),
        blocks=blocks(outcome),
        interrupted=cut.interrupted,
        summary=f"{label_of(plan.candidate)}{f' with {plan.codec}' if plan.codec else ''} against "
        f"{label_of(plan.reference)}, {run_cache.plan.mode}",
    )
