"""What a decomposition is: everything that can change its numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from urllib.parse import parse_qsl, urlencode

from assay.engines.base import full_spec
from assay.engines.scoring import HookSpec, ScoreJob
from assay.engines.specs import check_spec
from assay.errors import AssayError, UsageError
from assay.fidelity.plan import Plan, fingerprint, label_of
from assay.lab.kv.hook_plan import hook_spec, path_of
from assay.lab.kv.serve import check_full_attention, known_architecture
from assay.lab.kv.spec import parse_spec
from assay.lab.options import GapOptions

# -----------------------------------------------------------------------------
# One way to run the model: an engine, and what is in its KV cache.

ROUNDING = "assay.fidelity.floors:RoundingNoise"


@dataclass(frozen=True)
class Configuration:
    """An engine with a codec (`""`: none), by one mode. Only `layers` are coded (None: all).

    `layer_codecs` gives some layers another SPEC. `again` is an independent run: the engine opened anew, windows in
    reverse, another batch. `rounding` adds the noise of one bf16 rounding after every layer instead of a codec.
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
    def path(self) -> str:
        """The scoring path of its mode."""
        return path_of(self.mode).value

    @property
    def lossless(self) -> bool:
        """Whether its codec cannot change anything (all of SPEC is identity)."""
        return not self.codec or parse_spec(self.codec).changes_nothing

    @property
    def label(self) -> str:
        """Engine, codec and what is special, without folders."""
        parts = [label_of(self.engine)]
        if self.codec:
            parts.append(self.codec)
            parts.append(self.mode)
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

    def key(self, extra: str = "") -> str:
        """Content key: the settings, and the state of the files that they name."""
        body = json.dumps(asdict(self) | {"mode": self.mode if self.codec else self.path}, sort_keys=True)
        files = [fingerprint(p) for p in (self.engine, self.calibration) if p]
        return hashlib.sha256("\n".join([body, *files, extra]).encode()).hexdigest()[:32]

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
    """Layers in so many groups of neighbours, as equal as can be (0, or more than there are layers: each alone)."""
    count = layers if groups == 0 else min(groups, layers)
    edges = [round(i * layers / count) for i in range(count + 1)]
    return [tuple(range(lo, hi)) for lo, hi in pairwise(edges)]


# -----------------------------------------------------------------------------
# From one engine to another by steps of one change each.

KINDS = ("hf", "vllm")
"""Engines that take codecs."""

# Options that are switched alone, in this order, and the part of the bucket `engine` that each becomes.
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


def engine_name(spec: str) -> EngineName:
    """Take a spec apart; UsageError where it is no engine that takes codecs. A folder is one of transformers."""
    kind, colon, rest = spec.partition(":")
    if not colon or (kind not in (*KINDS, "gguf", "run", "http", "https") and "/" in kind):
        kind, rest = "hf", spec
    if kind not in KINDS:
        raise UsageError(
            f"{spec!r} takes no codec in its KV cache: a gap needs an engine that does, on both sides",
            remedy="write hf:MODEL or vllm:MODEL",
            finding_id="gap.usage",
        )
    model, _, query = rest.partition("?")
    if not model:
        raise UsageError(f"{spec!r} names no model", remedy=f"write {kind}:PATH", finding_id="gap.usage")
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

    Within one kind of engine every option that differs is a step of its own. Between kinds the number format is
    changed first, in the reference's engine, where `dtypes` (those that both report) differ; what is left is
    `engine.kernels`.
    """
    here, there = engine_name(reference), engine_name(candidate)
    steps: list[Step] = []
    if here.kind != there.kind:
        if dtypes[1] and dtypes[0] != dtypes[1]:
            steps.append(Step("engine.rounding", str(here.with_option("dtype", dtypes[1]))))
        return [*steps, Step("engine.kernels", candidate)]
    for option, part in _SWITCHES.items():
        if here.get(option) != there.get(option):
            here = here.with_option(option, there.get(option))
            steps.append(Step(f"engine.{part}", str(here)))
    rest = replace(here, model=there.model)
    if rest != here:
        steps.append(Step("engine.model", str(rest)))
    if sorted(rest.options) != sorted(there.options):
        steps.append(Step("engine.settings", candidate))
    if not steps:
        return [Step("engine.none", candidate)]
    return [*steps[:-1], replace(steps[-1], engine=candidate)]


# -----------------------------------------------------------------------------

MEASURED = 32
"""Most windows whose streams are encoded for real: bytes of each are counted and hashed."""


@dataclass(frozen=True)
class GapPlan(GapOptions):
    """One decomposition; its engines are written in full (`full_spec`)."""

    def __post_init__(self) -> None:
        for side in ("reference", "candidate"):
            object.__setattr__(self, side, full_spec(getattr(self, side)))
            engine_name(getattr(self, side))
        super().__post_init__()
        parse_spec(self.codec)

    def comparison(self, mode: str) -> Plan:
        """The windows and the scoring path of a mode. The second half of each window is scored, whatever the path."""
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
        """A batch of another size, for what is measured again: two rounds instead of one, whatever the size.

        Of fewer windows than a batch holds it is smaller than their number, or both would be the same batch.
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


def _usage(message: str, remedy: str) -> UsageError:
    return UsageError(message, remedy=remedy, finding_id="gap.usage")


# -----------------------------------------------------------------------------
# What an engine says of itself before it is opened: the candidate's turn comes late, after all that needs the reference.


def refuse_engine(spec: str, length: int, modes: Iterable[str] = ()) -> None:
    """AssayError for an engine that could not be opened, or that takes no codec: a name, an option, a kind of model,
    too little room for windows of `length` tokens, an option of which one of the `modes` shows nothing.

    What only a loaded model shows is refused by its hook: see `must_be_tried`.
    """
    check_spec(spec)
    for mode in modes:
        check_spec(spec, path_of(mode))
    name = engine_name(spec)
    if name.kind != "vllm":
        return
    from assay.engines.vllm.start import parse_spec

    options = parse_spec(spec)
    if options.max_model_len < length:
        raise UsageError(
            f"{spec}: windows of {length} tokens do not fit into max_model_len={options.max_model_len}",
            remedy=f"write max_model_len={length}, or --length {options.max_model_len}",
            finding_id="gap.usage",
        )
    if options.batched_tokens < length - 1:  # the last token predicts nothing and is not fed
        raise UsageError(
            f"{spec}: a step of {options.batched_tokens} tokens would cut a window of {length} tokens, and a block of a codec",
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
