"""Options of `assay kv …` and `assay gap`: what each command is asked for. Imports no torch, so
that help answers at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from assay.engines import full_spec, with_options
from assay.fidelity.plan import MarginOptions, ThreadOptions, TimeOptions
from assay.options import Options, RayOptions, RunTime, option

MODES = ("decode", "inforward", "snapshot")
"""The names of `assay_lab.kv.hook_plan.Mode`."""
TABLE_TOKENS = 32_768
"""Most tokens of cache that share the tables by default."""
EXACT_BITS = 16.0


# Options that several commands have, with the default of each.


def _codec(more: str = "") -> Any:
    """The codec."""
    named = (
        "Codec and its wrappers, such as sinks(n=4)+hadamard(bits=4); `assay kv list` names"
        f" them.{more}"
    )
    return option(help=named, metavar="SPEC")


_PAGES = " With vLLM also pages, an experiment whose pages are smaller."


def _mode(
    default: str, help: str = "How the codec takes part; decode is what serving does."
) -> Any:
    """How the codec takes part."""
    return option(default, help, choices=MODES)


def _streams() -> Any:
    """Keys, values or both."""
    return option(
        "kv", "What is coded; the other stays exact.", flag="stream", choices=("kv", "k", "v")
    )


def _skip_layers() -> Any:
    """Layers that are not coded."""
    return option((), "Layers that stay exact: 0,1,28-29.", form="numbers", metavar="LAYERS")


def _text(left_out: str = "Left out: the English of Python's own documentation.") -> Any:
    """Sources of text."""
    return option(
        (),
        f"File, glob, FILE.jsonl or datasets:NAME; may be given again. {left_out}",
        metavar="SOURCE",
    )


def _windows(default: int, least: int = 1) -> Any:
    """How many passages."""
    return option(default, "Passages that are scored.", lo=least)


def _length(default: int, least: int = 8) -> Any:
    """How long they are."""
    return option(default, "Tokens of a passage.", lo=least)


def _batch(default: int) -> Any:
    """How many run together."""
    return option(default, "Windows that run together.", lo=1)


def _block() -> Any:
    """How many tokens decode together."""
    return option(
        1,
        "With --mode decode: tokens that are fed together; each still reads the cache as if it came"
        " alone.",
        lo=1,
    )


def _fresh(least: int) -> Any:
    """Windows on which a choice is measured again."""
    return option(16, "Further windows on which the choice is measured again.", lo=least)


def _calibration(help: str = "File of `assay kv calibrate`.") -> Any:
    """What was learned of the model."""
    return option(None, help, metavar="FILE")


def _table_tokens() -> Any:
    """What tables are shared by."""
    return option(
        0,
        "Tokens of cache that share the calibration tables; 0: the model's context, up to 32768.",
        lo=0,
    )


def _seed(help: str = "Seed of the bootstrap, and of noise.") -> Any:
    """The seed."""
    return option(0, help, lo=0, hi=2**63 - 1)


# The commands.


@dataclass(frozen=True)
class KvPlan(Options):
    """Options of a command of `assay kv`."""

    AREA = "kv"


@dataclass(frozen=True)
class ModelPlan(KvPlan, ThreadOptions):
    """Options of a command that runs a model: `threads` becomes a part of how the model is
    written.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads:
            model = with_options(full_spec(self.model), device="auto", threads=self.threads)  # type: ignore[attr-defined]
            object.__setattr__(self, "model", model)


@dataclass(frozen=True)
class EvalPlan(RayOptions, ModelPlan, TimeOptions, MarginOptions):
    """`assay kv eval`: `skip_layers` stay exact."""

    VERB = "kv eval"

    model: str
    codec: str = _codec(_PAGES)
    _: KW_ONLY
    mode: str = _mode("decode")
    streams: str = _streams()
    skip_layers: tuple[int, ...] = _skip_layers()
    text: tuple[str, ...] = _text()
    windows: int = _windows(32)
    length: int = _length(1024)
    batch: int = _batch(8)
    block: int = _block()
    calibration: str | None = _calibration()
    table_tokens: int = _table_tokens()
    seed: int = _seed()
    control: str = option(
        "", "Codec that this one may not be worse than, such as fp8.", metavar="SPEC"
    )
    control_margin: float = option(
        0.10, "Share of the control's difference that the codec may add.", form="fraction", lo=0
    )


@dataclass(frozen=True)
class SweepPlan(RayOptions, ModelPlan, TimeOptions):
    """`assay kv sweep`: `fresh` further windows are for the codec that is chosen; `jobs` processes
    fit the codecs.
    """

    VERB = "kv sweep"

    model: str
    _: KW_ONLY
    codecs: tuple[str, ...] = option(
        (), "Codec and its wrappers; may be given again.", flag="codec", metavar="SPEC"
    )
    specs: Path | None = option(None, "File with one SPEC per line.", apart=True)
    mode: str = _mode("decode")
    streams: str = _streams()
    skip_layers: tuple[int, ...] = _skip_layers()
    text: tuple[str, ...] = _text()
    windows: int = _windows(16)
    fresh: int = _fresh(0)
    length: int = _length(1024)
    batch: int = _batch(8)
    block: int = _block()
    calibration: str | None = _calibration()
    table_tokens: int = _table_tokens()
    seed: int = _seed()
    jobs: int = option(1, "Processes that fit the codecs.", lo=1, apart=True)
    out: Path | None = option(None, "JSON file that keeps every row as it is measured.", apart=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.codecs and self.specs is None:
            raise self.usage(
                "nothing to sweep", "name codecs with --codec, or a file of them with --specs"
            )


@dataclass(frozen=True)
class NoisePlan(ModelPlan):
    """`assay kv noise`: noise of every size in `sigmas` in all of the cache, in each stream alone,
    or in each layer alone.
    """

    VERB = "kv noise"

    model: str
    _: KW_ONLY
    sigmas: tuple[float, ...] = option(
        (0.003, 0.01, 0.03, 0.1),
        "Sizes of the noise, relative to the rms of a token.",
        flag="sigma",
        form="sizes",
    )
    each: str = option(
        "all",
        "Put noise into the whole cache, into each stream alone, or into each layer alone.",
        choices=("all", "stream", "layer"),
    )
    streams: str = _streams()
    mode: str = _mode("inforward")
    skip_layers: tuple[int, ...] = _skip_layers()
    text: tuple[str, ...] = _text()
    windows: int = _windows(8)
    length: int = _length(512)
    batch: int = _batch(8)
    seed: int = _seed()

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.sigmas)) < 2 or not all(0 < s < math.inf for s in self.sigmas):
            raise self.usage(
                "a curve needs two sizes of noise or more, each above 0",
                "write --sigma 0.003,0.01,0.03,0.1",
            )


@dataclass(frozen=True)
class DiagnosisPlan(ModelPlan):
    """`assay kv diagnose`, on `queries` queries of every window."""

    VERB = "kv diagnose"

    model: str
    codec: str = _codec()
    _: KW_ONLY
    streams: str = _streams()
    skip_layers: tuple[int, ...] = _skip_layers()
    text: tuple[str, ...] = _text()
    windows: int = _windows(8)
    length: int = _length(512)
    batch: int = _batch(4)
    queries: int = option(64, "Queries of each window that read the cache.", lo=1)
    calibration: str | None = _calibration()


@dataclass(frozen=True)
class AttributionPlan(ModelPlan, RunTime):
    """`assay kv attribute`: `each` is `layer` (K and V of a layer together) or `stream` (each
    apart).
    """

    VERB = "kv attribute"

    model: str
    codec: str = _codec()
    _: KW_ONLY
    each: str = option(
        "stream",
        "Code K and V of a layer apart (stream), or together (layer).",
        choices=("stream", "layer"),
    )
    mode: str = _mode("inforward")
    skip_layers: tuple[int, ...] = _skip_layers()
    text: tuple[str, ...] = _text()
    windows: int = _windows(8)
    length: int = _length(512)
    batch: int = _batch(8)
    calibration: str | None = _calibration()


@dataclass(frozen=True)
class AllocationPlan(ModelPlan, RunTime):
    """`assay kv allocate`: `target_ratio` of stored bytes, in steps of `step` bits between `least`
    and `most`.
    """

    VERB = "kv allocate"

    model: str
    codec: str = _codec()
    target_ratio: float = option(
        help="How many times smaller than bf16 the stored bytes should be; between 1 and 16."
    )
    _: KW_ONLY
    mode: str = _mode("inforward")
    text: tuple[str, ...] = _text()
    windows: int = _windows(8)
    fresh: int = _fresh(8)
    length: int = _length(512)
    batch: int = _batch(8)
    calibration: str | None = _calibration()
    step: float = option(0.25, "Bits are assigned in steps of this size.")
    least: float = option(1.0, "Fewest bits per value.")
    most: float = option(8.0, "Most bits per value before a stream stays exact.")
    each: str = option("stream", listed=False)
    skip_layers: tuple[int, ...] = option((), listed=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 < self.target_ratio < 16:
            raise self.usage(f"target-ratio must lie between 1 and 16, got {self.target_ratio:g}")
        if not 0 < self.step <= 4 or not 0 < self.least < self.most <= EXACT_BITS:
            raise self.usage(
                "bits must satisfy 0 < least < most ≤ 16 and 0 < step ≤ 4, got "
                f"least {self.least:g}, most {self.most:g}, step {self.step:g}"
            )


@dataclass(frozen=True)
class CalibrationPlan(ModelPlan):
    """`assay kv calibrate`: what is learned from, and how many sampled tokens the file holds."""

    VERB = "kv calibrate"

    model: str
    out: Path = option(help="File that is written.", apart=True)
    _: KW_ONLY
    text: tuple[str, ...] = _text("Required; text that is never evaluated on.")
    windows: int = option(32, "Passages that are read.", lo=1)
    length: int = _length(1024)
    batch: int = _batch(4)
    tokens: int = option(4096, "Sampled tokens that the file holds.", lo=256)
    sensitivity: int = option(
        0, "Windows on which each layer and stream is coded alone, for weights=measured.", lo=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.text:
            raise self.usage(
                "calibration needs text that is never evaluated", "name it with --text"
            )
        if self.sensitivity > self.windows:
            raise self.usage(
                f"sensitivity must be at most the {self.windows} windows, got {self.sensitivity}"
            )


@dataclass(frozen=True)
class ServePlan(KvPlan):
    """`assay kv serve`: `options` are those of vLLM's own server."""

    VERB = "kv serve"

    model: str
    codec: str = _codec(_PAGES)
    _: KW_ONLY
    mode: str = _mode(
        "inforward", "inforward codes all tokens, decode prefills the prompt exactly."
    )
    calibration: str | None = _calibration()
    streams: str = _streams()
    skip_layers: tuple[int, ...] = _skip_layers()
    tier: str = option(
        "none",
        "stream: also keep full blocks, entropy-coded, for later requests with the same prefix.",
        choices=("none", "stream"),
    )
    tier_size: float = option(
        4.0,
        "Size of the tier; when it is full, the least recently used blocks go first.",
        lo=0,
        metavar="GB",
    )
    tier_dir: Path | None = option(
        None,
        "Folder that keeps the blocks of the tier; without it they are in memory.",
        metavar="DIR",
    )
    python: str = option("", "Python executable with vLLM installed.", metavar="FILE")
    dry_run: bool = option(False, "Print the command and stop.", apart=True)
    options: tuple[str, ...] = option((), listed=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tier == "none" and self.tier_dir is not None:
            raise self.usage(
                "--tier-dir keeps a tier, and none was asked for", "write --tier stream beside it"
            )
        if self.tier == "none" and self.tier_size != 4.0:
            raise self.usage(
                "--tier-size is that of a tier, and none was asked for",
                "write --tier stream beside it",
            )
        if not math.isfinite(self.tier_size * 1e9):
            raise self.usage(
                f"tier-size must be finite, got {self.tier_size:g}", "give it in GB, such as 20"
            )
        if self.tier != "none" and self.codec == "pages":
            raise self.usage(
                "a tier stores entropy-coded blocks, and packed pages hold other codes",
                "leave out --tier, or give the codec of blocks, such as"
                " prerope+sinks(n=4)+pca(step=0.005)",
            )
        if self.tier != "none" and self.mode != "inforward":
            raise self.usage(
                "--mode says how a codec works in the cache; with --tier the cache is exact",
                "leave --mode out",
            )


@dataclass(frozen=True)
class Place(KvPlan):
    """Where in a model the tensor of a file belongs: it matters to codecs that need a
    calibration.
    """

    _: KW_ONLY
    stream: str = option("k", "Keys or values.", choices=("k", "v"))
    layer: int = option(0, "Layer, for codecs that need a calibration.", lo=0)
    calibration: str | None = _calibration()


@dataclass(frozen=True)
class EncodePlan(Place):
    """`assay kv encode`."""

    VERB = "kv encode"

    source: Path
    codec: str = _codec()
    out: Path = option(help="Stream that is written.")
    _: KW_ONLY
    heads: int = option(1, "KV heads of a KKTV file, whose rows go token by token.", lo=1)
    tensor: str | None = option(
        None, "Tensor of a safetensors file that holds several.", metavar="NAME"
    )


@dataclass(frozen=True)
class DecodePlan(Place):
    """`assay kv decode`."""

    VERB = "kv decode"

    source: Path
    out: Path = option(help="Tensor that is written: .safetensors, else KKTV.")


PHASES = {
    1: "engine baseline",
    2: "codec input and residual",
    3: "noise sensitivity",
    4: "layers",
    5: "harness",
    6: "calibration",
}
SWEEP = (0.125, 0.25, 0.5, 1.0, 2.0)
"""Noise levels, as multiples of the codec's own relative error."""
GAP_MINUTES = 10.0
"""What `assay gap --quick` may take."""
QUICK: dict[str, Any] = {
    "windows": 8,
    "length": 256,
    "fresh": 8,
    "groups": 5,
    "sweep": (0.25, 0.5, 1.0),
}


@dataclass(frozen=True)
class GapOptions(RayOptions, RunTime, ThreadOptions):
    """`assay gap`. `mode` is what the total is measured in, `base_mode` what engine and codec are
    told apart in.

    Layers are attributed in `groups` of neighbours (0: each alone). `fresh` windows take no part in
    the decomposition; recommendations are measured on them. `margin` is a fraction of perplexity.
    """

    VERB, AREA = "gap", "gap"

    reference: str
    candidate: str
    _: KW_ONLY
    codec: str = option(
        "",
        "Codec of `assay kv`, such as hadamard(bits=4); without it only the engines are compared.",
        metavar="SPEC",
    )
    quick: bool = option(
        False,
        "8 windows of 256 tokens, layers in 5 groups, fewer noise levels, in 10 minutes (or"
        " --budget).",
        apart=True,
    )
    mode: str = _mode("decode", "Mode in which the total is measured.")
    base_mode: str = _mode(
        "inforward", "Mode in which the effects of engine and codec are measured."
    )
    phases: tuple[int, ...] = option(
        tuple(PHASES),
        "What to measure, such as 1,4: 1 baseline, 2 residual, 3 noise, 4 layers, 5 harness, 6"
        " calibration.",
        form="numbers",
        metavar="PHASES",
    )
    text: tuple[str, ...] = _text()
    windows: int = option(32, "Passages of the decomposition.", lo=2)
    length: int = _length(1024, 16)
    fresh: int = option(16, "Further passages, for recommendations.", lo=0)
    batch: int = _batch(8)
    groups: int = option(0, "Number of groups of layers; 0: each layer alone.", lo=0)
    sweep: tuple[float, ...] = option(SWEEP, listed=False)
    calibration: str | None = _calibration()
    other_calibration: str | None = _calibration(
        "The same from the candidate's engine, for phase 6."
    )
    margin: float = option(
        0.03, "The total must lie within ± this.", flag="margin-ppl", form="fraction"
    )
    seed: int = _seed("Seed of the noise.")
    keep: bool = option(False, "Changes nothing: what was scored is always kept.", apart=True)

    @classmethod
    def read(cls, given: Mapping[str, Any], where: str = "") -> dict[str, Any]:
        """The values that were given; or those of `quick`."""
        values = super().read(given, where)
        return (QUICK if values.get("quick") else {}) | values

    def __post_init__(self) -> None:
        super().__post_init__()
        if wrong := sorted(set(self.phases) - set(PHASES)):
            raise self.usage(f"there is no phase {wrong[0]}", f"phases are 1 to {len(PHASES)}")
        if not 0 < self.margin < 1:
            raise self.usage(f"a margin of {self.margin} cannot be judged", "write --margin-ppl 3%")
        if not self.sweep or any(not s > 0 for s in self.sweep):
            raise self.usage(
                "noise levels must be positive", "give multiples of the codec's own error"
            )


@dataclass(frozen=True)
class HeadTrainPlan(RayOptions):
    """`assay heads train`. What is `apart` changes how a run goes; all else names it, and a
    checkpoint is of one plan.
    """

    VERB, AREA = "heads train", "speculation"

    model: str
    _: KW_ONLY
    out: Path | None = option(
        None,
        "Folder of the head, with its checkpoint until it is done (default: heads/MODEL in the"
        " cache).",
        apart=True,
    )
    kind: str = option(
        "eagle3", "Layout of the head; mtp is MiMo's layer, for Qwen2.", choices=("eagle3", "mtp")
    )
    text: tuple[str, ...] = _text("Prompts are made from it too.")
    prompts: int = option(6000, "Prompts that the target answers.", lo=32)
    tokens: int = option(256, "Largest number of tokens in an answer.", lo=16)
    draft_vocab: int = option(8192, "Tokens that an EAGLE-3 head can guess; 0: all.", lo=0)
    intermediate: int = option(0, "Width of the head's MLP; 0: as the target's.", lo=0)
    depth: int = option(4, "Steps that training unrolls.", lo=1, hi=8)
    steps: int = option(4000, "Steps of training.", lo=1)
    batch_tokens: int = option(8192, "Tokens of a batch, with padding.", lo=64)
    lr: float = option(1e-3, "Highest learning rate.", lo=0)
    seed: int = _seed("Seed of prompts, weights and order.")
    minutes: float | None = option(
        None,
        "Time of training; the schedule of the learning rate is fitted to it.",
        lo=0.01,
        metavar="MINUTES",
        apart=True,
    )
    text_minutes: float | None = option(
        None, "Time of writing text.", lo=0.01, metavar="MINUTES", apart=True
    )
    python: str = option(
        "",
        "Python executable with vLLM, which then writes the text; without it transformers does.",
        metavar="FILE",
        apart=True,
    )


@dataclass(frozen=True)
class HeadTryPlan(Options):
    """`assay heads try`: `targets` and `heads` are names of `assay_lab.heads.experiment`."""

    VERB, AREA = "heads try", "speculation"

    model: str
    head: Path = option(help="Folder of the head.", apart=True)
    out: Path = option(help="JSON file that keeps every row as it is measured.", apart=True)
    _: KW_ONLY
    targets: tuple[str, ...] = option(
        (),
        "Changed target, such as int4-g128+kv-fp8; may be given again (default: all).",
        flag="target",
    )
    heads: tuple[str, ...] = option(
        (), "State of the head; may be given again (default: all).", flag="head-state"
    )
    dead_beside: tuple[str, ...] = option(("bf16", "int4-g128"), listed=False)
    temperatures: tuple[float, ...] = option(
        (0.0, 0.7), "Temperatures of the target.", form="sizes"
    )
    text: tuple[str, ...] = _text("Prompts are made from it too.")
    prompts: int = option(
        6000,
        "Prompts that the training had, as its --prompts; only those held out are asked.",
        lo=32,
    )
    texts: int = option(240, "Held-out prompts that are asked at most.", lo=4)
    tokens: int = option(192, "Largest number of tokens in an answer.", lo=16)
    depth: int = option(4, "Drafts per step.", lo=1, hi=8)
    batch_tokens: int = option(16384, "Tokens of a batch, with padding.", lo=64)
    seed: int = _seed("Seed of the prompts.")


@dataclass(frozen=True)
class HeadPackPlan(Options):
    """`assay heads pack`."""

    VERB, AREA = "heads pack", "speculation"

    model: str
    _: KW_ONLY
    head: Path | None = option(
        None, "Folder of the head (default: heads/MODEL in the cache, trained if it is not there)."
    )
    out: Path | None = option(None, "The pack (default: heads/MODEL.tar.xz in the cache).")
