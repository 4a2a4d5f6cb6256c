"""One seam for every caller: a codec in the KV cache of an engine, written as plain settings.

`hook_spec` makes the `HookSpec` that `ScoreJob.hook` takes. The engine, in this process or in a worker with another
Python, calls the factory that it names, and that fits the coders to the model which it finds there. What the hook
measured comes back in `ScoringEngine.engagement()`: calls of coders by layer, and under `notes` the bytes, error and
SHA-256 of the measured windows' streams (`assay.lab.kv.accounting.stream_facts`, `measured_bytes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from assay.engines.scoring import HookSpec, ScoringPath
from assay.errors import UsageError
from assay.lab.kv.cache_hook import CodecHook, Mode
from assay.lab.kv.calibration import Calibration, read_calibration
from assay.lab.kv.codec import CacheShape, cache_shape
from assay.lab.kv.fit import Bench, CoderSet, kept_layers, require_layers
from assay.lab.kv.rope import Rotary
from assay.lab.kv.spec import Recipe, parse_spec

_FACTORIES = {"hf": "assay.lab.kv.hook_plan:for_transformers", "vllm": "assay.lab.kv.vllm:for_vllm"}


@dataclass(frozen=True)
class HookPlan:
    """Which coders go where. Layers are numbers; those of `layer_codecs` take another SPEC than the rest.

    Only `layers` are coded (None: all), and of those none of `skip_layers`. `length` is that of the windows in tokens,
    `windows` how many there will be: see `CodecHook`.
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

    def coders(self, bench: Bench) -> CoderSet:
        """The coders, fitted on the bench of a model."""
        everywhere = parse_spec(self.codec)
        special = {layer: parse_spec(spec) for layer, spec in self.layer_codecs.items()}

        def recipe(layer: int, stream: str) -> Recipe | None:
            return special.get(layer, everywhere).of(stream)

        return bench.fit_all(recipe, self.coded(bench.shape), self.streams)

    def coded(self, shape: CacheShape) -> list[int]:
        """The layers of a model that are coded; UsageError for one that it has not, and where none is left."""
        require_layers(shape, [*(self.layers or ()), *self.layer_codecs])
        layers = kept_layers(shape, self.skip_layers)
        return [layer for layer in layers if self.layers is None or layer in self.layers]


def hook_spec(engine: str, **settings: Any) -> HookSpec:
    """The hook that puts a codec into the KV cache of an engine; `settings` are fields of `HookPlan`.

    `engine` is an engine as written on the command line (`hf:MODEL`, `vllm:MODEL`), or its kind. Score *decode* by the
    decode path, *inforward* and *snapshot* by prefill: see `path_of`. UsageError for what cannot be read. Whether
    evaluation text was calibrated on is for the caller to check (`assay.lab.kv.calibration`).
    """
    kind = engine.partition(":")[0]
    if kind not in _FACTORIES:
        raise _usage(f"codecs do not go into the KV cache of {kind!r}", f"use {' or '.join(_FACTORIES)}")
    if settings.get("calibration"):  # a worker may have another working folder
        settings["calibration"] = str(Path(settings["calibration"]).resolve())
    return HookSpec(_FACTORIES[kind], HookPlan.from_config(settings).to_config())


def path_of(mode: str) -> ScoringPath:
    """The scoring path on which a mode means what its name says."""
    return ScoringPath.DECODE if mode == Mode.DECODE else ScoringPath.PREFILL


class PlannedHook(CodecHook):
    """A codec's hook of transformers that fits its coders to the model it is attached to."""

    def __init__(self, plan: HookPlan) -> None:
        super().__init__(
            {}, Mode(plan.mode), plan.length, measure_windows=plan.measure_windows, windows=plan.windows
        )
        self._plan = plan

    @contextmanager
    def attach(self, model: Any) -> Iterator[None]:
        """Fit, then as any hook."""
        bench = bench_of(cache_shape(model), self._plan, Rotary(model, self.length))
        self.coders = self._plan.coders(bench).by_stream
        with super().attach(model):
            yield


def for_transformers(**config: Any) -> PlannedHook:
    """Factory of `hook_spec` for `hf:`."""
    return PlannedHook(HookPlan.from_config(config))


def bench_of(shape: CacheShape, plan: HookPlan, rotary: Rotary | None) -> Bench:
    """The bench of a model and calibration; AssayError where the calibration is of another model.

    The last few are kept, so that coders which many plans share are fitted once.
    """
    key = (shape, str(rotary and rotary.device), plan.length, plan.calibration, _stamp(plan.calibration))
    if key not in _BENCHES:
        while len(_BENCHES) >= _KEPT:
            _BENCHES.pop(next(iter(_BENCHES)))
        calibration = read(plan.calibration, _stamp(plan.calibration)) if plan.calibration else None
        if calibration:
            calibration.check_model(shape)
        _BENCHES[key] = Bench(shape, rotary, calibration)
    return _BENCHES[key]


_KEPT = 4
_BENCHES: dict[Any, Bench] = {}


@lru_cache(maxsize=2)
def read(path: str, stamp: int) -> Calibration:
    """A calibration file, read once for each state that it is in."""
    return read_calibration(Path(path))


def _stamp(path: str | None) -> int:
    file = Path(path) if path else None
    return file.stat().st_mtime_ns if file and file.exists() else 0


def _usage(message: str, remedy: str) -> UsageError:
    return UsageError(message, remedy=remedy, finding_id="kv.usage")
