"""`assay gap`: take the difference of two deployments apart, and say what would make it smaller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.engines.base import setup_differences
from assay.environment import describe
from assay.fidelity.plan import label_of
from assay.lab.gap.bench import Bench
from assay.lab.gap.buckets import Decomposition, Effect, WindowSums, aligned, decompose, effect, ratio
from assay.lab.gap.outcome import CodecGap, Floors, Outcome, closed, closed_nll
from assay.lab.gap.phases import (
    Corners,
    NoiseCurve,
    attribute,
    curve,
    difference_json,
    effects_json,
    kl_at,
    measure_candidate,
    measure_harness,
    measure_layers,
    measure_noise,
    measure_reference,
    measure_steps,
    measure_switches,
    measure_tables,
    measure_total,
    relative_error,
    residuals,
    sigmas_of,
    steps_of,
    switches,
)
from assay.lab.gap.plan import GapPlan, Step, must_be_tried
from assay.lab.gap.recommend import Proposal, judged, measure_proposals, proposals
from assay.lab.gap.report import blocks, findings_of, headline, verdict_of
from assay.lab.kv.accounting import NOTE
from assay.lab.kv.lab import Measured
from assay.progress import NO_PROGRESS, Progress
from assay.verdict import Finding, Report, Severity, Verdict

# -----------------------------------------------------------------------------
# Everything that a decomposition scores, engine by engine: all that needs one is measured while it is open.

SIDES = ("reference", "candidate")


@dataclass
class Side:
    """The phases of one engine, each against that engine without codec. Those that were not asked for are empty."""

    joint: Measured
    noise: Mapping[float, Measured] = field(default_factory=dict)
    alone: Mapping[str, Measured] = field(default_factory=dict)
    harness: Mapping[str, Measured] = field(default_factory=dict)
    tables: Mapping[str, Measured] = field(default_factory=dict)


@dataclass
class Runs:
    """All runs. `path` are those that the buckets are made of, by name, and the floors."""

    layers: int
    path: dict[str, Measured]
    sides: dict[str, Side]
    steps: Sequence[Step]
    total: Measured
    switched: Mapping[str, Measured] = field(default_factory=dict)
    proposals: Sequence[Proposal] = ()
    proposed: Mapping[str, Measured] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)


def measure_all(bench: Bench) -> Runs:
    """The reference, the candidate, what lies between them, and both ends once more."""
    plan, corners = bench.plan, Corners(bench.plan)
    skipped: dict[str, str] = {}
    if must_be_tried(plan.candidate):  # now, not when all that needs the reference has been scored
        bench.try_out(corners.with_codec(plan.candidate))
    path = measure_reference(bench, corners)
    layers = int(path["codec"].engagement.notes[NOTE]["cache"]["layers"])
    # Both engines get the same noise: that of the codec's error on the reference.
    sigmas = sigmas_of(relative_error(path["codec"]), plan.sweep)
    sides = {"reference": _side(bench, corners, plan.reference, path["codec"], layers, sigmas, skipped)}
    path |= measure_candidate(bench, corners)
    joint = path["codec.candidate"]
    sides["candidate"] = _side(bench, corners, plan.candidate, joint, layers, sigmas, skipped)
    offered: list[Proposal] = []
    proposed: dict[str, Measured] = {}
    if len(bench.windows["fresh"]) >= 2:
        offered = proposals(corners, sides["candidate"].alone, joint, layers)
        proposed, refused = measure_proposals(bench, corners, offered)
        skipped |= {f"recommendation: {k}": v for k, v in refused.items()}
    else:
        skipped["recommendations"] = "no windows are left that took no part in the decomposition"
    steps = steps_of(bench, corners)
    path |= measure_steps(bench, corners, steps)
    switched: dict[str, Measured] = {}
    if plan.wants(1):
        possible = switches(plan.reference, plan.candidate, steps, bench.facts)
        switched, refused = measure_switches(bench, plan.base_mode, possible)
        skipped |= {f"switch: {k}": v for k, v in refused.items()}
    total = measure_total(bench, corners)
    return Runs(layers, path, sides, steps, total, switched, offered, proposed, skipped)


def _side(
    bench: Bench,
    corners: Corners,
    engine: str,
    joint: Measured,
    layers: int,
    sigmas: tuple[float, ...],
    skipped: dict[str, str],
) -> Side:
    """The phases of one engine that were asked for."""
    plan, found = bench.plan, Side(joint)
    if plan.wants(3):
        found.noise = measure_noise(bench, corners, engine, sigmas)
    if plan.wants(4):
        found.alone = measure_layers(bench, corners, engine, layers)
    if plan.wants(5):
        found.harness, refused = measure_harness(bench, corners, engine)
        skipped |= {f"{label_of(engine)}: {name}": why for name, why in refused.items()}
    if plan.wants(6):
        if plan.calibration and plan.other_calibration:
            found.tables = measure_tables(bench, corners, engine)
        else:
            skipped["calibration"] = "give the tables of both engines: --calibration and --other-calibration"
    return found


# -----------------------------------------------------------------------------
# From what was scored to what was found.


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


# -----------------------------------------------------------------------------


def run_gap(plan: GapPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Decompose, attribute and recommend.

    Everything that is scored is kept, so that the same command goes on where an interrupted one stopped.
    """
    subject = {"reference": plan.reference, "candidate": plan.candidate, "codec": plan.codec}
    Corners(plan).refuse()
    bench = Bench(plan, progress)
    try:
        with bench:
            outcome = outcome_of(bench, measure_all(bench))
    except KeyboardInterrupt:
        finding = Finding(
            "gap.interrupted",
            Severity.INFO,
            "interrupted: what was scored is kept, the same command goes on from there",
        )
        measured = {name: own_effect(m).to_json() for name, m in bench.measured.items()}
        return Report(
            "gap", Verdict.INCONCLUSIVE, subject, [finding], {"measured": measured}, interrupted=True
        )
    return Report(
        command="gap",
        verdict=verdict_of(outcome),
        subject=subject,
        findings=findings_of(outcome),
        results=outcome.to_json(),
        environment=describe(),
        headline=headline(outcome),
        blocks=blocks(outcome),
        summary=f"{label_of(plan.candidate)} with {plan.codec} against {label_of(plan.reference)}, {plan.mode}",
    )
