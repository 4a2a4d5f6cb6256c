"""`assay gap`: take the difference of two deployments apart, and say what would make it smaller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assay.engines.setup import setup_differences
from assay.environment import describe
from assay.fidelity.identity import label_of
from assay.gap.amounts import effect, ratio
from assay.gap.baseline import (
    Corners,
    measure_candidate,
    measure_reference,
    measure_steps,
    measure_total,
    steps_of,
)
from assay.gap.bench import Bench, Measured
from assay.gap.blocks import blocks, headline
from assay.gap.buckets import decompose
from assay.gap.closure import closed, closed_nll
from assay.gap.findings import findings_of, verdict_of
from assay.gap.harness import difference_json, effects_json, measure_harness, measure_tables
from assay.gap.layers import attribute, measure_layers
from assay.gap.noise import curve, kl_at, measure_noise, sigmas_of
from assay.gap.outcome import CodecGap, Floors, Outcome
from assay.gap.plan import GapPlan
from assay.gap.recommend import judged, measure_proposals, proposals
from assay.gap.residual import relative_error, residuals
from assay.gap.sums import aligned
from assay.kv.accounting import NOTE
from assay.progress import NO_PROGRESS, Progress
from assay.verdict import Finding, Report, Severity, Verdict

SIDES = ("reference", "candidate")


def run_gap(plan: GapPlan, progress: Progress = NO_PROGRESS, *, keep: bool = False) -> Report:
    """Decompose, attribute and recommend.

    Everything that is scored is kept until the run ends (with `keep` longer), so that the same command goes on where
    an interrupted one stopped.
    """
    subject = {"reference": plan.reference, "candidate": plan.candidate, "codec": plan.codec}
    Corners(plan).refuse()
    try:
        with Bench(plan, progress) as bench:
            outcome = _measure(bench)
            if not keep:
                bench.forget()
    except KeyboardInterrupt:
        finding = Finding(
            "gap.interrupted",
            Severity.INFO,
            "interrupted: what was scored is kept, the same command goes on from there",
        )
        return Report("gap", Verdict.INCONCLUSIVE, subject, [finding], interrupted=True)
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


def _measure(bench: Bench) -> Outcome:
    """Engine by engine: all that needs one is measured while it is open."""
    plan, corners = bench.plan, Corners(bench.plan)
    skipped: dict[str, str] = {}
    runs = measure_reference(bench, corners)
    layers = int(runs["codec"].engagement.notes[NOTE]["cache"]["layers"])
    sigmas = sigmas_of(relative_error(runs["codec"]), plan.sweep)
    phases: dict[str, dict[str, Any]] = {
        "reference": _phases(bench, corners, plan.reference, layers, sigmas, skipped)
    }
    runs |= measure_candidate(bench, corners)
    phases["candidate"] = _phases(bench, corners, plan.candidate, layers, sigmas, skipped)
    joint = {"reference": runs["codec"], "candidate": runs["codec.candidate"]}
    attributions = {
        side: attribute(layers, plan.groups, phases[side]["layers"], joint[side])
        for side in SIDES
        if plan.wants(4)
    }
    recommendations: list[dict[str, Any]] = []
    if len(bench.windows["fresh"]) >= 2:
        offered = proposals(corners, attributions.get("candidate"), layers)
        measured, refused = measure_proposals(bench, corners, offered)
        recommendations = judged(offered, measured)
        skipped |= {f"recommendation: {k}": v for k, v in refused.items()}
    else:
        skipped["recommendations"] = "the text has no windows left that took no part in the decomposition"
    steps = steps_of(bench, corners)
    runs |= measure_steps(bench, corners, steps)
    total = measure_total(bench, corners)

    parts = phases["reference"].get("layers", {})
    sums = aligned(
        {
            name: m.seen
            for name, m in {**runs, **parts, "total": total}.items()
            if not name.startswith("floor.")
        }
    )
    engine = [(s.name, sums[s.name]) for s in steps[:-1]] + [(steps[-1].name, sums["candidate"])]
    decomposition = decompose(
        engine,
        sums["codec"],
        sums["both"],
        sums["total"],
        sums.get("asked"),
        layers=[(name, sums[name]) for name in parts],
        notes=_notes(plan, corners),
    )
    floors = _floors(runs)
    gap = CodecGap(
        effect(sums["codec"]),
        effect(sums["codec.candidate"]),
        effect(sums["codec.candidate"] - sums["codec"]),
    )
    curves = {
        side: curve(phases[side]["noise"], floors.repeat_kl, plan.seed)
        for side in SIDES
        if phases[side].get("noise")
    }
    facts = {side: bench.facts.get(spec, {}) for side, spec in _specs(plan).items()}
    size = runs.get("asked", runs["codec.candidate"]).bytes
    return Outcome(
        plan=plan,
        decomposition=decomposition,
        floors=floors,
        codec_gap=gap,
        closed_kl=closed(decomposition.closure.kl, decomposition.total.kl, floors.repeat_kl),
        closed_nll=closed_nll(decomposition.closure.dnll, decomposition.total.dnll, floors.repeat_dnll),
        same=corners.same_engine and corners.asked.lossless,
        setup=setup_differences(*(facts[s].get("setup", {}) for s in SIDES)),
        text=bench.text,
        engines=facts,
        bytes=size.to_json() if size else None,
        residuals=residuals(runs["codec"], runs["codec.candidate"]) if plan.wants(2) else (),
        noise=curves,
        noise_ratio=_noise_ratio(curves),
        matched={
            side: {
                "sigma": relative_error(joint[side]),
                "codec_kl": effect(sums["codec" if side == "reference" else "codec.candidate"]).kl.value,
                "noise_kl": kl_at(found, relative_error(joint[side])),
            }
            for side, found in curves.items()
        },
        layers=attributions,
        harness={side: effects_json(found) for side in SIDES if (found := phases[side].get("harness"))},
        calibration={side: _tables(found) for side in SIDES if (found := phases[side].get("tables"))},
        recommendations=recommendations,
        skipped=skipped,
    )


def _specs(plan: GapPlan) -> dict[str, str]:
    return {"reference": plan.reference, "candidate": plan.candidate}


def _phases(
    bench: Bench,
    corners: Corners,
    engine: str,
    layers: int,
    sigmas: tuple[float, ...],
    skipped: dict[str, str],
) -> dict[str, Any]:
    """The phases of one engine that were asked for."""
    plan = bench.plan
    found: dict[str, Any] = {}
    if plan.wants(3):
        found["noise"] = measure_noise(bench, corners, engine, sigmas)
    if plan.wants(4):
        found["layers"] = measure_layers(bench, corners, engine, layers)
    if plan.wants(5):
        found["harness"], refused = measure_harness(bench, corners, engine)
        skipped |= {f"{label_of(engine)}: {name}": why for name, why in refused.items()}
    if plan.wants(6):
        if plan.calibration and plan.other_calibration:
            found["tables"] = measure_tables(bench, corners, engine)
        else:
            skipped["calibration"] = "give the tables of both engines: --calibration and --other-calibration"
    return found


def _floors(runs: Mapping[str, Measured]) -> Floors:
    alone = {
        name: effect(aligned({name: runs[name].seen})[name]) for name in runs if name.startswith("floor.")
    }
    return Floors(alone["floor.reference"], alone["floor.candidate"], alone.get("floor.rounding"))


def _notes(plan: GapPlan, corners: Corners) -> dict[str, str]:
    notes = {}
    if plan.mode == plan.base_mode:
        notes["harness"] = "zero by construction: one mode"
    if corners.same_engine:
        notes["engine"] = "zero by construction: one engine"
    return notes


def _noise_ratio(curves: Mapping[str, Any]) -> list[dict[str, Any]]:
    """KL of the candidate over that of the reference at every level, on the same windows."""
    if len(curves) < 2:
        return []
    rows = []
    for sigma in curves["reference"].sigmas:
        found = ratio(curves["candidate"].sums[sigma].kl, curves["reference"].sums[sigma].kl)
        if found is not None:
            rows.append({"sigma": sigma, "value": found.value, "lo": found.lo, "hi": found.hi})
    return rows


def _tables(measured: Mapping[str, Measured]) -> dict[str, Any]:
    return {
        **effects_json(measured),
        "candidate_minus_reference": difference_json(measured, "reference", "candidate"),
    }
