"""One way to run the model: an engine, and what is in its KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from assay.engines.scoring import HookSpec, ScoreJob
from assay.fidelity.names import label_of
from assay_lab.gap.engine_steps import engine_name
from assay_lab.gap.plan import GapPlan
from assay_lab.gap.preflight import preflight
from assay_lab.kv.eval import require_no_calibration
from assay_lab.kv.hook_plan import hook_spec, path_of
from assay_lab.kv.spec import parse_spec

ROUNDING = "assay.fidelity.breakdown.rounding:RoundingNoise"


@dataclass(frozen=True)
class Configuration:
    """An engine with a codec (`""`: none), by one mode. Only `layers` are coded (None: all).

    `layer_codecs` gives some layers another SPEC. `again` is an independent run: the engine opened
    anew, windows in reverse, another batch. `rounding` adds the noise of one bf16 rounding after
    every layer instead of a codec.
    """

    engine: str
    mode: str
    codec: str = ""
    streams: str = "kv"
    layers: tuple[int, ...] | None = None
    layer_codecs: tuple[tuple[int, str], ...] = ()
    skip_layers: tuple[int, ...] = ()
    calibration: str | None = None
    again: bool = False
    other_batch: bool = False
    rounding: bool = False
    measured: int = 1
    """Windows whose streams are encoded for real."""

    @property
    def plain(self) -> Configuration:
        """The same engine and path without a codec."""
        return Configuration(self.engine, self.mode, again=self.again)

    @property
    def lossless(self) -> bool:
        """Whether its codec cannot change anything (all of SPEC is identity)."""
        return not self.codec or parse_spec(self.codec).changes_nothing

    @property
    def label(self) -> str:
        """Engine, codec and what is special, without folders."""
        parts = [label_of(self.engine)]
        if self.codec:
            parts += [self.codec, self.mode]
        if self.streams != "kv":
            parts.append(f"{self.streams} only")
        if self.layers is not None:
            parts.append(f"layers {span(self.layers)}")
        if self.skip_layers:
            parts.append(f"layers {span(self.skip_layers)} exact")
        if self.rounding:
            parts.append("bf16 rounding noise")
        if self.again or self.other_batch:
            parts.append("again")
        return ", ".join(parts)

    def facts(self) -> dict[str, Any]:
        """What of it can change numbers. Without a codec all modes of prefill are one."""
        return asdict(self) | {"mode": self.mode if self.codec else path_of(self.mode).value}

    def hooked(self, job: ScoreJob, length: int, seed: int) -> ScoreJob:
        """The job with what goes into the cache. UsageError where the engine takes no codec."""
        if self.rounding:
            return replace(job, hook=HookSpec(ROUNDING, {"sigma": 2.0**-9, "seed": seed}))
        if not self.codec:
            return job
        hook = hook_spec(
            self.engine,
            codec=self.codec,
            mode=self.mode,
            length=length,
            calibration=self.calibration,
            streams=self.streams,
            skip_layers=self.skip_layers,
            layers=self.layers,
            layer_codecs=dict(self.layer_codecs),
            measure_windows=self.measured,
        )
        return replace(job, hook=hook)


@dataclass(frozen=True)
class Corners:
    """The configurations that a plan names. `reference` and `candidate` are without codec, in the
    base mode.
    """

    plan: GapPlan

    @property
    def reference(self) -> Configuration:
        """The one reference of the path."""
        return Configuration(self.plan.reference, self.plan.base)

    @property
    def candidate(self) -> Configuration:
        """The candidate without codec."""
        return Configuration(self.plan.candidate, self.plan.base)

    def with_codec(self, engine: str, mode: str | None = None, **changes: Any) -> Configuration:
        """An engine with the plan's codec, in the base mode where none is given."""
        settings: dict[str, Any] = {"codec": self.plan.codec}
        if self.plan.codec:
            settings["calibration"] = self.plan.calibration
        return Configuration(engine, mode or self.plan.base, **settings | changes)

    @property
    def same_engine(self) -> bool:
        """Whether both sides are one engine with one set of options."""
        names = [
            engine_name(s, codec=bool(self.plan.codec))
            for s in (self.plan.reference, self.plan.candidate)
        ]
        return str(names[0]) == str(names[1])

    @property
    def self_test(self) -> bool:
        """Whether nothing can differ: one engine, and no codec that changes anything."""
        return self.same_engine and self.with_codec(self.plan.candidate).lossless

    def preflight(self) -> None:
        """AssayError before anything is scored, where an engine cannot be opened, or cannot take
        the codec in a mode that is needed."""
        plan = self.plan
        modes = {plan.mode, plan.base}
        for engine in (plan.reference, plan.candidate):
            preflight(engine, plan.length, modes, codec=bool(plan.codec))
            for mode in modes:
                self.with_codec(engine, mode).hooked(ScoreJob(), plan.length, plan.seed)
        if plan.codec and not plan.calibration:
            require_no_calibration(parse_spec(plan.codec), "kv")


def with_placement(codec: str, placement: str) -> str:
    """A SPEC with a placement (`recent(n=8)`) around both streams."""
    spec = parse_spec(codec)
    return ";".join(
        f"{s}:{placement}+{r}" for s, r in zip("kv", (spec.k, spec.v), strict=True) if r is not None
    )


def span(layers: Sequence[int]) -> str:
    """`0-5`, `3`, `0,2,4`."""
    if len(layers) > 2 and list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]}-{layers[-1]}"
    return ",".join(map(str, layers))


def grouped(layers: int, groups: int) -> list[tuple[int, ...]]:
    """Layers in so many groups of neighbours, as equal as can be (0, or more than there are layers:
    each alone).
    """
    count = layers if groups == 0 else min(groups, layers)
    edges = [round(i * layers / count) for i in range(count + 1)]
    return [tuple(range(lo, hi)) for lo, hi in pairwise(edges)]
