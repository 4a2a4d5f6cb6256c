"""Phase 1 and the path: every configuration between reference and candidate, and the total measured on its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from assay.engines.scoring import ScoreJob
from assay.gap.bench import Bench, Measured
from assay.gap.configuration import Configuration
from assay.gap.path import Step, engine_name, engine_steps
from assay.gap.plan import GapPlan
from assay.gap.refusals import refuse_engine
from assay.kv.evaluate import require_no_calibration
from assay.kv.spec import parse_spec


@dataclass(frozen=True)
class Corners:
    """The configurations that a plan names. `reference` and `candidate` are without codec, in the base mode."""

    plan: GapPlan

    @property
    def reference(self) -> Configuration:
        """The one reference of the path."""
        return Configuration(self.plan.reference, self.plan.base_mode)

    @property
    def candidate(self) -> Configuration:
        """The candidate without codec."""
        return Configuration(self.plan.candidate, self.plan.base_mode)

    def with_codec(self, engine: str, mode: str | None = None, **changes: Any) -> Configuration:
        """An engine with the codec, in the base mode where none is given."""
        settings: dict[str, Any] = {"codec": self.plan.codec, "calibration": self.plan.calibration} | changes
        return Configuration(engine, mode or self.plan.base_mode, **settings)

    @property
    def asked(self) -> Configuration:
        """What the total is about: the candidate with codec in the asked mode."""
        return self.with_codec(self.plan.candidate, self.plan.mode, measured=self.plan.measured)

    def refuse(self) -> None:
        """AssayError before anything is scored, where an engine cannot be opened or take the codec in a mode that is needed."""
        for engine in (self.plan.reference, self.plan.candidate):
            refuse_engine(engine, self.plan.length, (self.plan.mode, self.plan.base_mode))
            for mode in (self.plan.mode, self.plan.base_mode):
                self.with_codec(engine, mode).hooked(ScoreJob(), self.plan.length, self.plan.seed)
        if not self.plan.calibration:
            require_no_calibration(parse_spec(self.plan.codec), "kv")

    @property
    def same_engine(self) -> bool:
        """Whether both sides are one engine with one set of options."""
        return str(engine_name(self.plan.reference)) == str(engine_name(self.plan.candidate))


def measure_reference(bench: Bench, corners: Corners) -> dict[str, Measured]:
    """What needs the reference's engine: the codec on it, and its floors."""
    plan, ref = bench.plan, corners.reference
    bench.anchor(ref)
    found = {
        "codec": bench.measure(corners.with_codec(plan.reference, measured=plan.measured), ref),
        "floor.reference": bench.measure(
            Configuration(plan.reference, plan.base_mode, other_batch=True), ref
        ),
    }
    if plan.mode != plan.base_mode:
        bench.anchor(Configuration(plan.reference, plan.mode))
    if bench.engine(plan.reference).ability.hooks:
        found["floor.rounding"] = bench.measure(
            Configuration(plan.reference, plan.base_mode, rounding=True), ref
        )
    return found


def measure_candidate(bench: Bench, corners: Corners) -> dict[str, Measured]:
    """What needs the candidate's engine: without codec, with it, in both modes, and its own floor."""
    plan, ref, cand = bench.plan, corners.reference, corners.candidate
    bench.anchor(cand)
    found = {
        "candidate": bench.between(ref, cand),
        "floor.candidate": bench.measure(
            Configuration(plan.candidate, plan.base_mode, other_batch=True), cand
        ),
        "both": bench.measure(corners.with_codec(plan.candidate), ref),
        "codec.candidate": bench.measure(corners.with_codec(plan.candidate, measured=plan.measured), cand),
    }
    if plan.mode != plan.base_mode:
        found["asked"] = bench.measure(corners.asked, Configuration(plan.reference, plan.mode))
    return found


def steps_of(bench: Bench, corners: Corners) -> list[Step]:
    """The steps of the bucket `engine`, by what both engines say of themselves."""
    if corners.same_engine:
        return [Step("engine.none", bench.plan.candidate)]
    dtypes = [bench.facts.get(s, {}).get("dtype") for s in (bench.plan.reference, bench.plan.candidate)]
    return engine_steps(bench.plan.reference, bench.plan.candidate, (dtypes[0], dtypes[1]))


def measure_steps(bench: Bench, corners: Corners, steps: list[Step]) -> dict[str, Measured]:
    """The engines between reference and candidate, by the name of the step that leads to them."""
    mode = bench.plan.base_mode
    return {
        step.name: bench.measure(Configuration(step.engine, mode), corners.reference) for step in steps[:-1]
    }


def measure_total(bench: Bench, corners: Corners) -> Measured:
    """Both ends once more, in a run of their own: engines opened anew, windows in reverse, another batch."""
    again: Mapping[str, Any] = {"again": True}
    reference = Configuration(bench.plan.reference, bench.plan.mode, **again)
    bench.anchor(reference)
    asked = corners.with_codec(bench.plan.candidate, bench.plan.mode, **again)
    return bench.measure(asked, reference)
