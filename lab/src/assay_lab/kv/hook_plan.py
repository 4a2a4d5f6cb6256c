"""Where a codec's hook goes, as plain settings that an engine in another process can read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

from assay.engines.scoring import HookSpec, ScoringPath
from assay.engines.vllm.spec import parse_vllm as parse_vllm
from assay.errors import UsageError
from assay_lab.kv.cache_shape import CacheShape
from assay_lab.kv.calibration import Calibration, read_calibration
from assay_lab.kv.layer_coders import CoderSet, LayerCoders, kept_layers, require_layers
from assay_lab.kv.rotary import Rotary
from assay_lab.kv.spec import Recipe, parse_spec


class Mode(StrEnum):
    """How codec and forward pass meet."""

    DECODE = "decode"
    INFORWARD = "inforward"
    SNAPSHOT = "snapshot"


_FACTORIES = {
    "hf": "assay_lab.kv.cache_hook:for_transformers",
    "vllm": "assay_lab.kv.vllm.hook:for_vllm",
}


@dataclass(frozen=True)
class HookPlan:
    """Which coders go where. Layers are numbers; those of `layer_codecs` take another SPEC than the
    rest.

    Only `layers` are coded (None: all), and of those none of `skip_layers`. `length` is that of the
    windows in tokens, `windows` how many there will be, `first` the first that the hook sees: see
    `CodecHook`.
    """

    codec: str
    mode: str
    length: int
    calibration: str | None = None
    streams: str = "kv"
    skip_layers: tuple[int, ...] = ()
    layers: tuple[int, ...] | None = None
    layer_codecs: Mapping[int, str] = field(default_factory=dict)
    measure_windows: int = 8
    windows: int | None = None
    first: int = 0

    def __post_init__(self) -> None:
        if self.mode not in list(Mode):
            raise _usage(f"unknown mode {self.mode!r}", f"one of {', '.join(Mode)}")
        if self.streams not in ("kv", "k", "v"):
            raise _usage(f"unknown stream {self.streams!r}", "one of kv, k, v")
        for spec in (self.codec, *self.layer_codecs.values()):
            parse_spec(spec)

    def to_config(self) -> dict[str, Any]:
        """Plain JSON, read back by `from_config`."""
        found = asdict(self)
        found["layer_codecs"] = {str(layer): spec for layer, spec in self.layer_codecs.items()}
        return found

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> HookPlan:
        """Read what `to_config` wrote, after JSON too."""
        given = dict(config)
        for name in ("skip_layers", "layers"):
            if given.get(name) is not None:
                given[name] = tuple(given[name])
        given["layer_codecs"] = {int(k): v for k, v in (given.get("layer_codecs") or {}).items()}
        return cls(**given)

    def coders(self, layer_coders: LayerCoders) -> CoderSet:
        """The coders, fitted on the layer_coders of a model."""
        everywhere = parse_spec(self.codec)
        special = {layer: parse_spec(spec) for layer, spec in self.layer_codecs.items()}

        def recipe(layer: int, stream: str) -> Recipe | None:
            return special.get(layer, everywhere).of(stream)

        return layer_coders.fit_all(recipe, self.coded(layer_coders.shape), self.streams)

    def coded(self, shape: CacheShape) -> list[int]:
        """The layers of a model that are coded; UsageError for one that it has not, and where none
        is left.
        """
        require_layers(shape, [*(self.layers or ()), *self.layer_codecs])
        layers = kept_layers(shape, self.skip_layers)
        return [layer for layer in layers if self.layers is None or layer in self.layers]


def hook_spec(engine: str, **settings: Any) -> HookSpec:
    """The hook that puts a codec into the KV cache of an engine; `settings` are fields of
    `HookPlan`.

    `engine` is an engine as written on the command line (`hf:MODEL`, `vllm:MODEL`), or its kind.
    Score *decode* by the decode path, *inforward* and *snapshot* by prefill: see `path_of`.
    UsageError for what cannot be read. Whether evaluation text was calibrated on is for the caller
    to check (`assay_lab.kv.calibration`).
    """
    kind = engine.partition(":")[0]
    if kind not in _FACTORIES:
        raise _usage(
            f"codecs do not go into the KV cache of {kind!r}", f"use {' or '.join(_FACTORIES)}"
        )
    for codec in (settings["codec"], *(settings.get("layer_codecs") or {}).values()):
        check_ranks(engine, codec)
    if settings.get("calibration"):  # a worker may have another working folder
        settings["calibration"] = str(Path(settings["calibration"]).resolve())
    return HookSpec(_FACTORIES[kind], HookPlan.from_config(settings).to_config())


def check_ranks(engine: str, codec: str) -> None:
    """UsageError where an engine, as written on the command line, splits among its ranks what a
    codec codes together.
    """
    if engine.startswith("vllm:"):
        options = parse_vllm(engine)
        parse_spec(codec).check_ranks(options.tensor_parallel, options.pipeline_parallel)


def path_of(mode: str) -> ScoringPath:
    """The scoring path on which a mode means what its name says."""
    return ScoringPath.DECODE if mode == Mode.DECODE else ScoringPath.PREFILL


def layer_coders_of(
    shape: CacheShape, plan: HookPlan, rotary: Rotary | None, share: tuple[int, int] = (0, 1)
) -> LayerCoders:
    """The layer coders of a model and calibration; AssayError where the calibration is of another
    model.

    `share` is the number of a rank and how many there are: they have its heads alone.
    The last few are kept, so that coders which many plans share are fitted once.
    """
    device = str(rotary and rotary.device)
    key = (shape, share, device, plan.length, plan.calibration, _stamp(plan.calibration))
    if key not in _KEPT_CODERS:
        while len(_KEPT_CODERS) >= _MOST_KEPT:
            _KEPT_CODERS.pop(next(iter(_KEPT_CODERS)))
        calibration = read(plan.calibration, _stamp(plan.calibration)) if plan.calibration else None
        if calibration:
            calibration.check_model(shape)
            calibration = calibration.of_rank(*share)
        _KEPT_CODERS[key] = LayerCoders(shape.of_rank(share[1]), rotary, calibration)
    return _KEPT_CODERS[key]


_MOST_KEPT = 4
_KEPT_CODERS: dict[Any, LayerCoders] = {}


@lru_cache(maxsize=2)
def read(path: str, stamp: int) -> Calibration:
    """A calibration file, read once for each state that it is in."""
    return read_calibration(Path(path))


def _stamp(path: str | None) -> int:
    file = Path(path) if path else None
    return file.stat().st_mtime_ns if file and file.exists() else 0


def _usage(message: str, remedy: str) -> UsageError:
    return UsageError(message, remedy=remedy, finding_id="kv.usage")
