"""What a decomposition is: its configurations, the steps from one engine to the other, and its
preflight checks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from assay.engines import full_spec, with_options
from assay.engines.scoring import HookSpec, ScoreJob
from assay.engines.specs import check_spec
from assay.engines.vllm.spec import parse_vllm
from assay.errors import AssayError, UsageError
from assay.fidelity.names import label_of
from assay.fidelity.plan import Plan
from assay_lab.kv.eval import require_no_calibration
from assay_lab.kv.hook_plan import hook_spec, path_of
from assay_lab.kv.serve import check_full_attention, known_architecture
from assay_lab.kv.spec import parse_spec
from assay_lab.options import GapOptions

MEASURED = 32
"""Most windows whose streams are encoded for real: bytes of each are counted and hashed."""


@dataclass(frozen=True)
class GapPlan(GapOptions):
    """One decomposition; its engines are written in full (`full_spec`). Without a codec it tells
    two engines apart.
    """

    def __post_init__(self) -> None:
        for side in ("reference", "candidate"):
            spec = with_options(
                full_spec(getattr(self, side)), device="auto", threads=self.threads or "auto"
            )
            object.__setattr__(self, side, spec)
            engine_name(getattr(self, side), codec=bool(self.codec), reference=side == "reference")
        super().__post_init__()
        if self.codec:
            parse_spec(self.codec)

    @property
    def base(self) -> str:
        """The mode in which engine and codec are told apart: that of the total where there is no
        codec.
        """
        return self.base_mode if self.codec else self.mode

    def comparison(self, mode: str) -> Plan:
        """The windows and the scoring path of a mode. The second half of each window is scored,
        whatever the path.
        """
        return Plan(
            reference=self.reference,
            candidates=(self.candidate,),
            text=self.text,
            windows=self.windows + self.fresh,
            length=self.length,
            path=path_of(mode).value,
            scored="second-half",
            batch=self.batch,
            seed=self.seed,
        )

    @property
    def other_batch(self) -> int:
        """A batch of another size, for what is measured again: two rounds instead of one, whatever
        the size.

        Of fewer windows than a batch holds it is smaller than their number, or both would be the
        same batch.
        """
        together = min(self.batch, self.windows)
        return together * 5 // 8 or 2

    @property
    def measured(self) -> int:
        """Windows whose streams are encoded for real, for sizes and residuals; all are coded."""
        return min(self.windows, MEASURED)

    def wants(self, phase: int) -> bool:
        """Whether a phase is part of the run; the path itself always is."""
        return phase in self.phases


def planned_runs(plan: GapPlan) -> tuple[int, int]:
    """About how many configurations are measured: those of the path, its repetition and the floors,
    and those of all phases.
    """
    if not plan.codec:
        return 6, 4 if plan.wants(1) else 0
    path = 10 + 2 * (plan.mode != plan.base)
    own = {
        3: len(plan.sweep),
        4: plan.groups or _layers(plan.reference),
        5: 7,
        6: 2 * bool(plan.calibration and plan.other_calibration),
    }
    sides = 2 * sum(count for phase, count in own.items() if plan.wants(phase))
    return path, sides + 6 * bool(plan.fresh) + 5 * plan.wants(1)


def _layers(spec: str) -> int:
    """Layers of a model as its config.json has them; 24 where that says nothing."""
    try:
        config = json.loads(
            (Path(engine_name(spec, codec=False).model) / "config.json").read_text(encoding="utf-8")
        )
        return int(config.get("text_config", config)["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 24


# One way to run the model: an engine, and what is in its KV cache.

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


# From one engine to another by steps of one change each.

# Options that are switched alone, in this order, and the part of the bucket `engine` that each
# becomes.
_SWITCHES: Mapping[str, str] = {
    "dtype": "rounding",
    "attention": "attention",
    "attention_backend": "attention",
    "weights": "weights",
    "quantization": "weights",
    "kv_cache_dtype": "cache",
    "enforce_eager": "compilation",
    "device": "device",
}


@dataclass(frozen=True)
class EngineName:
    """An engine as it is written, taken apart: `kind:model?options`."""

    kind: str
    model: str
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        query = urlencode(self.options, safe='(),=:{}"[]/')
        return f"{self.kind}:{self.model}" + (f"?{query}" if query else "")

    def get(self, option: str) -> str | None:
        """The value of an option, None where it is not given."""
        return dict(self.options).get(option)

    def with_option(self, option: str, value: str | None) -> EngineName:
        """The same with one option changed, or left out."""
        kept = [(k, v) for k, v in self.options if k != option]
        return replace(self, options=tuple(kept if value is None else [*kept, (option, value)]))


def engine_name(spec: str, *, codec: bool = True, reference: bool = False) -> EngineName:
    """Take a spec apart; UsageError where it is no engine that a gap can have on this side."""
    kind, _, rest = full_spec(spec).partition(":")
    model, _, query = rest.partition("?")
    # llama.cpp gives logits and no states: others can be compared with a kept reference, it cannot
    # be one.
    known = ("hf", "vllm") if codec or reference else ("hf", "vllm", "gguf")
    if kind not in known:
        if codec:
            why, remedy = (
                "takes no codec in its KV cache",
                "write hf:MODEL or vllm:MODEL, or leave --codec out",
            )
        elif kind == "gguf":
            why, remedy = "gives no states that could be kept as a reference", "name it second"
        else:
            why, remedy = (
                "does not run in process",
                "write hf:MODEL, vllm:MODEL or gguf:FILE, or use assay compare",
            )
        raise UsageError(f"{spec!r} {why}", remedy=remedy, finding_id="gap.usage")
    if not model:
        raise UsageError(
            f"{spec!r} names no model", remedy=f"write {kind}:PATH", finding_id="gap.usage"
        )
    return EngineName(kind, model, tuple(parse_qsl(query, keep_blank_values=True)))


@dataclass(frozen=True)
class Step:
    """One change, and the engine it leads to. `name` is a part of the bucket `engine`."""

    name: str
    engine: str


def engine_steps(
    reference: str, candidate: str, dtypes: tuple[str | None, str | None] = (None, None)
) -> list[Step]:
    """Steps from the reference to the candidate; the last leads to the candidate as it was written.

    Within one kind of engine every option that differs is a step of its own. Between kinds the
    number format is changed first, in the reference's engine, where `dtypes` (those that both
    report) differ; then options that only the reference has are left out one by one; then the
    engine changes (`engine.kernels`); then, in the candidate's engine, the checkpoint where it is
    another, and the candidate's own options one by one.
    """
    here, there = (engine_name(spec, codec=False) for spec in (reference, candidate))
    found: list[Step] = []

    def go(option: str, value: str | None) -> None:
        nonlocal here
        if here.get(option) != value:
            here = here.with_option(option, value)
            taken = [step.name for step in found]
            name = f"engine.{_SWITCHES[option]}"
            found.append(Step(name if name not in taken else f"{name}.{here.kind}", str(here)))

    if here.kind == there.kind:
        for option in _SWITCHES:
            go(option, there.get(option))
        rest = replace(here, model=there.model)
        if rest != here:
            found.append(Step("engine.model", str(rest)))
        if sorted(rest.options) != sorted(there.options):
            found.append(Step("engine.settings", candidate))
        if not found:
            return [Step("engine.none", candidate)]
    else:
        if dtypes[1] and dtypes[0] != dtypes[1]:
            go("dtype", dtypes[1])
        own = ("attention", "attention_backend", "weights", "quantization", "kv_cache_dtype")
        for option in own:
            go(option, None)
        model = here.model if there.kind in ("hf", "vllm") else there.model
        options = tuple((k, v) for k, v in there.options if k not in own)
        here = EngineName(there.kind, model, options)
        found.append(Step("engine.kernels", str(here)))
        if model != there.model:
            here = replace(here, model=there.model)
            found.append(Step("engine.model", str(here)))
        for option in own:
            go(option, there.get(option))
    return [*found[:-1], replace(found[-1], engine=candidate)]


# Preflight checks: the candidate's turn comes late, after all that needs the reference.


def preflight(spec: str, length: int, modes: Iterable[str], *, codec: bool) -> None:
    """AssayError for an engine that could not be opened, or that takes no codec: a name, an option,
    a kind of model, too little room for windows of `length` tokens, an option of which one of the
    `modes` shows nothing.

    What only a loaded model shows is refused by its hook: see `must_be_tried`.
    """
    for mode in modes:
        check_spec(spec, path_of(mode))
    name = engine_name(spec, codec=codec)
    if name.kind != "vllm":
        return
    options = parse_vllm(spec)
    if options.max_model_len < length:
        raise UsageError(
            f"{spec}: windows of {length} tokens do not fit into"
            f" max_model_len={options.max_model_len}",
            remedy=f"write max_model_len={length}, or --length {options.max_model_len}",
            finding_id="gap.usage",
        )
    if not codec:
        return
    if options.batched_tokens < length - 1:  # the last token predicts nothing and is not fed
        raise UsageError(
            f"{spec}: a step of {options.batched_tokens} tokens would cut a window of {length}"
            " tokens, and a block of a codec",
            remedy=f"leave out max_num_batched_tokens, or write {length}",
            finding_id="gap.usage",
        )
    if not options.enforce_eager:
        raise AssayError(
            f"{spec}: compiled models and CUDA graphs run no codec",
            finding_id="kv.unsupported",
            remedy="leave out enforce_eager=false",
        )
    check_full_attention(name.model)


def must_be_tried(spec: str) -> bool:
    """Whether only a loaded model shows that its attention takes a codec."""
    name = engine_name(spec)
    return name.kind == "vllm" and not known_architecture(name.model)
