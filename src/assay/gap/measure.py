"""Everything that a decomposition scores, engine by engine: all that needs one is measured while it is open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from assay.fidelity.identity import label_of
from assay.gap.baseline import (
    Corners,
    measure_candidate,
    measure_reference,
    measure_steps,
    measure_total,
    steps_of,
)
from assay.gap.bench import Bench, Measured
from assay.gap.harness import measure_harness, measure_tables
from assay.gap.layers import measure_layers
from assay.gap.noise import measure_noise, sigmas_of
from assay.gap.path import Step
from assay.gap.recommend import Proposal, measure_proposals, proposals
from assay.gap.refusals import must_be_tried
from assay.gap.residual import relative_error
from assay.gap.switches import measure_switches, switches
from assay.kv.accounting import NOTE

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
