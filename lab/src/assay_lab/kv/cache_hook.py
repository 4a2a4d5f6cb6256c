"""Codecs in the forward pass of a model of transformers: the three modes of `assay kv eval`.

decode      The prefix is prefilled exactly; then its cache is replaced by what the codec makes of
it, and every token
            that is fed later is coded as serving would code it: when a block of the codec is full,
            and never while it
            is one of the recent tokens that the codec keeps exact. Several tokens may be fed
            together where each sees
            then what it would see alone: codes that do not change while later tokens come.
inforward   Every token, prefill included, attends to reconstructed keys and values.
snapshot    A clean pass captures keys and values; in a second one every token attends to their
reconstructions.
            Optimistic: errors do not build up from layer to layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cache, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.engines.hf.cache import cache_dtype, cast, new_cache
from assay.engines.scoring import Engagement, HookSpec, ScoringPath
from assay.engines.vllm.start import parse_spec as parse_vllm
from assay.errors import AssayError, UsageError
from assay_lab.kv.cache_shape import CacheShape, cache_shape
from assay_lab.kv.calibration import Calibration, read_calibration
from assay_lab.kv.fit import Bench, CoderSet, kept_layers, require_layers
from assay_lab.kv.spec import Recipe, parse_spec
from assay_lab.kv.stream_coder import Coders, Key, StreamFacts, Track, facts_of_window
from assay_lab.kv.transforms import Rotary
from assay_lab.options import TABLE_TOKENS

if TYPE_CHECKING:
    import torch


# Bytes of a compressed cache, and the ratio they give; how a hook hands over what it measured.
#
# Stored bytes are those of the real streams at the end of a window, over all layers: exact tokens,
# headers and uncompressed layers included. Calibration tables are there once, however many
# sequences use them: `ratio` adds the share of them that falls to a window where `table_tokens`
# tokens share the tables, `ratio_at` counts them whole against one sequence of so many tokens.


LENGTHS = (1024, 8192, 32_768)
NOTE = "kv"
"""Key of `Engagement.notes` under which a codec's hook leaves what it measured."""
_MOST_TOKENS = 1 << 30
APART = 0.05
"""Share of a codec's squared error by which its streams may differ from what attention read, of a
codec that predicts by which the sizes of both errors may: prediction carries on where a sum on a
GPU falls on the other side of a tie (`Track._apart`)."""
ROUNDING = 2.0**-16
"""The same of the power: one rounding to bf16."""


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer's streams, the same in bf16, both summed over the measured windows; its
    sliding window.
    """

    stored: int
    bf16: int
    window: int | None = None

    def grown(self, tokens: int, length: int) -> float:
        """How many times as many tokens the layer holds after `length` tokens as it did after
        `tokens`.
        """
        most = _MOST_TOKENS if self.window is None else self.window - 1
        return min(length, most) / min(tokens, most)


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of a cache, measured on `windows` windows of `tokens` cached tokens.

    `tables` are those that a decoder needs, `encoder_tables` what an encoder needs beyond them.
    """

    layers: Mapping[int, LayerBytes]
    tables: int
    encoder_tables: int
    tokens: int
    windows: int
    table_tokens: int

    @property
    def stored(self) -> float:
        """Bytes of one window's streams with its share of the tables."""
        share = self.tables * self.tokens / self.table_tokens
        return sum(layer.stored for layer in self.layers.values()) / self.windows + share

    @property
    def bf16(self) -> float:
        """Bytes of the same tokens in bf16."""
        return sum(layer.bf16 for layer in self.layers.values()) / self.windows

    @property
    def ratio(self) -> float:
        """bf16 bytes over stored bytes."""
        return self.bf16 / self.stored if self.stored else float("inf")

    @property
    def sharing(self) -> float:
        """How many sequences of this length share the tables in `ratio`."""
        return self.table_tokens / self.tokens

    def saved(self, length: int) -> float:
        """Bytes that the streams of one sequence of `length` tokens save against bf16, tables
        aside.
        """
        saved = (b.grown(self.tokens, length) * (b.bf16 - b.stored) for b in self.layers.values())
        return sum(saved) / self.windows

    def ratio_at(self, length: int) -> float:
        """The ratio of one sequence of `length` tokens that carries the decoder's tables alone."""
        exact = (
            sum(b.grown(self.tokens, length) * b.bf16 for b in self.layers.values()) / self.windows
        )
        return exact / (exact - self.saved(length) + self.tables)

    @property
    def break_even_tokens(self) -> int | None:
        """Tokens from which one sequence is smaller than in bf16, decoder's tables included; None:
        never.
        """
        lo, hi = 0, 1
        while self.saved(hi) <= self.tables:
            lo, hi = hi, 2 * hi
            if hi > _MOST_TOKENS:
                return None
        while hi - lo > 1:
            middle = (lo + hi) // 2
            lo, hi = (middle, hi) if self.saved(middle) <= self.tables else (lo, middle)
        return hi

    def to_json(self) -> dict[str, Any]:
        """As `results.bytes`."""
        return {
            "stored": self.stored,
            "bf16": self.bf16,
            "ratio": self.ratio,
            "bits_per_value": 16 / self.ratio,
            "tables": self.tables,
            "tables_decoder": self.tables,
            "tables_encoder": self.encoder_tables,
            "table_tokens": self.table_tokens,
            "ratio_at": {str(length): self.ratio_at(length) for length in LENGTHS},
            "break_even_tokens": self.break_even_tokens,
            "tokens": self.tokens,
            "windows": self.windows,
            "ratio_by_layer": {str(k): b.bf16 / b.stored for k, b in self.layers.items()},
        }


def streams_note(
    facts: Mapping[Key, Sequence[StreamFacts]], coders: Coders, shape: CacheShape
) -> dict[str, Any]:
    """What a hook measured, as plain JSON: facts of the measured windows' streams by
    `layer.stream`.
    """
    whole = sum(int(t.nbytes) for c in coders.values() for t in getattr(c, "tables", {}).values())
    tables = sum(coder.table_bytes for coder in coders.values())
    return {
        "streams": {
            f"{layer}.{stream}": [asdict(f) for f in found]
            for (layer, stream), found in facts.items()
        },
        "tables": tables,
        "encoder_tables": whole - tables,
        "lossless": all(coder.lossless for coder in coders.values()),
        "coded": sorted(f"{layer}.{stream}" for layer, stream in coders),
        "cache": shape.to_json(),
    }


def merged_notes(notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The notes of ranks that share the heads or the layers of a cache: bytes and errors of a
    window's stream are added.
    """
    streams: dict[str, list[dict[str, Any]]] = {}
    for note in notes:
        for name, found in note["streams"].items():
            known = streams.get(name)
            both = zip(known, found, strict=True) if known else ((None, one) for one in found)
            streams[name] = [dict(new) if old is None else _added(old, new) for old, new in both]
    return {
        **notes[0],
        "streams": streams,
        "tables": sum(note["tables"] for note in notes),
        "encoder_tables": sum(note["encoder_tables"] for note in notes),
        "lossless": all(note["lossless"] for note in notes),
        "coded": sorted({name for note in notes for name in note["coded"]}),
    }


def _added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of a stream whose heads lie in two ranks; its hash is that of both hashes."""
    found = {name: value + other[name] for name, value in one.items() if name != "sha256"}
    both = one["sha256"] + other["sha256"]
    return {**found, "sha256": sha256(both.encode()).hexdigest() if both else ""}


def stream_facts(engagement: Engagement) -> dict[Key, list[StreamFacts]]:
    """The facts of the measured windows' streams, read back; AssayError where no codec's hook was
    in place.
    """
    try:
        note = engagement.notes[NOTE]["streams"]
    except KeyError as error:
        raise AssayError(
            "no codec was in the KV cache, so that there are no streams to count",
            finding_id="fidelity.not_engaged",
        ) from error
    keys = {name: name.partition(".") for name in note}
    return {
        (int(layer), stream): [StreamFacts(**f) for f in note[name]]
        for name, (layer, _, stream) in keys.items()
    }


def measured_bytes(
    engagement: Engagement, tokens: int, table_tokens: int = TABLE_TOKENS
) -> CacheBytes:
    """Bytes of the cache that a codec's hook measured, at the end of windows of `tokens` cached
    tokens.

    ValueError where it measured no window, or not every stream of one; AssayError where a stream
    does not give back what attention read.
    """
    facts = stream_facts(engagement)
    for key, found in facts.items():
        check_read(key, found)
    counts = {len(found) for found in facts.values()}
    if len(counts) != 1 or 0 in counts:
        raise ValueError("every stream must have been measured on the same windows")
    windows, note = counts.pop(), engagement.notes[NOTE]
    layers = {
        layer: LayerBytes(
            sum(f.stored for (i, _), found in facts.items() if i == layer for f in found),
            sum(f.exact for (i, _), found in facts.items() if i == layer for f in found),
            note["cache"]["windows"][layer],
        )
        for layer in sorted({layer for layer, _ in facts})
    }
    return CacheBytes(
        layers, note["tables"], note.get("encoder_tables", 0), tokens, windows, table_tokens
    )


def check_read(key: Key, facts: Sequence[StreamFacts]) -> None:
    """AssayError where streams of one layer do not give back what attention read: their bytes say
    nothing of its quality.

    Exact tokens may be rounded to bf16, and single values that lie between two levels may fall to
    either side.
    """
    apart, error, power = (
        sum(getattr(f, name) for f in facts) for name in ("apart", "error", "power")
    )
    if apart <= APART * error + ROUNDING * power:
        return
    raise AssayError(
        f"stream {key[1]} of layer {key[0]} does not give back what attention read: they differ by"
        f" {apart / power:.2g} of the power, where the codec's own error is {error / power:.2g}",
        finding_id="kv.stream_mismatch",
        remedy=(
            "mend the codec: reconstruct must be what decode makes of encode's stream, or bytes and"
            " quality are of different things"
        ),
        evidence={
            "layer": key[0],
            "stream": key[1],
            "apart": apart,
            "error": error,
            "power": power,
        },
    )


# The hooks.


# Cache layers of transformers that hand every new key and value to a function before they keep it.
#
# One file for what differs between releases of transformers: the signature of `update` and the
# names of layers.

OnUpdate = Callable[
    [int, int, "torch.Tensor", "torch.Tensor"], tuple["torch.Tensor", "torch.Tensor"]
]
"""`on_update(layer, position, keys, values)` → what the layer keeps; tensors are [batch, KV heads,
tokens, head_dim], `position` is that of the first of the tokens."""


def observed_cache(model: Any, on_update: OnUpdate) -> Any:
    """The cache of `model` with layers that pass through `on_update`.

    Each layer stays what the model wants (full or sliding) and holds the type that its engine was
    asked for; only its `update` is preceded by the call.
    """
    held = new_cache(model)
    for index, layer in enumerate(held.layers):
        layer.__class__ = _observed(type(layer))  # type: ignore[arg-type, unused-ignore]
        layer.assay_index = index
        layer.assay_position = 0
        layer.assay_on_update = on_update
    return held


@cache
def _observed(base: type) -> type:
    """A subclass of a cache layer that passes new states through `assay_on_update`."""

    class Observed(base):  # type: ignore[misc]
        assay_position: int

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            kept = self.assay_on_update(
                self.assay_index, self.assay_position, key_states, value_states
            )
            result = super().update(*kept, *args, **kwargs)
            self.assay_position += key_states.shape[-2]
            return result

    Observed.__name__ = f"Observed{base.__name__}"
    return Observed


def kept_from(layer: Any) -> int:
    """Position of the first token that a layer still holds: a sliding layer lets go of old ones."""
    return int(layer.assay_position) - (int(layer.keys.shape[-2]) if layer.is_initialized else 0)


class Mode(StrEnum):
    """How codec and forward pass meet."""

    DECODE = "decode"
    INFORWARD = "inforward"
    SNAPSHOT = "snapshot"


def spread(count: int, windows: int) -> frozenset[int]:
    """`count` of so many windows, in the middle of as many equal parts; all where there are not
    more.
    """
    count = min(count, windows)
    return frozenset((2 * i + 1) * windows // (2 * count) for i in range(count))


class CodecHook:
    """Puts coders into the KV cache of one run, and counts what they did.

    `measure_windows` windows are also encoded for real, whole, when their batch is done: `facts`
    holds what their streams came to by (layer, stream), and `engagement().notes` the same as JSON.
    They are spread over the `windows` of the run, as a text does not begin as it goes on; where
    their number is not known they are the first. `first` is the number of the first window that
    this hook sees of the run.
    """

    def __init__(
        self,
        coders: Coders,
        mode: Mode,
        length: int,
        *,
        measure_windows: int = 8,
        windows: int | None = None,
        first: int = 0,
    ) -> None:
        self.coders = coders
        self.mode = Mode(mode)
        self.length = length
        self.passes = 2 if self.mode is Mode.SNAPSHOT else 1
        self.facts: dict[Key, list[StreamFacts]] = {}
        self._to_measure = spread(measure_windows, windows or measure_windows)
        self._measured_to = first
        self._fires: dict[int, int] = {}
        self._bytes_read = 0
        self._before: tuple[dict[int, int], int] = ({}, 0)
        self._model: Any = None
        self._shape: CacheShape | None = None
        self._rotary: Rotary | None = None
        self._tracks: dict[Key, Track] = {}
        self._armed = False
        self._cache: Any = None

    @contextmanager
    def attach(self, model: Any) -> Iterator[None]:
        """Remember the model while the hook is in place; the cache of each batch carries the rest."""
        self._model, self._shape = model, cache_shape(model)
        if any(coder.before_rope or coder.sides for coder in self.coders.values()):
            self._rotary = Rotary(model, self.length)
        try:
            yield
            self._measure()
        finally:
            self._model = self._rotary = self._cache = None
            self._tracks.clear()

    def new_cache(self, batch: int, index: int) -> Any:
        """The cache of the next batch on pass `index`."""
        if index == 0:
            self._measure()
            self._tracks.clear()
            self._before = dict(self._fires), self._bytes_read
        self._armed = self.mode is Mode.INFORWARD or (self.mode is Mode.SNAPSHOT and index == 1)
        self._cache = observed_cache(self._model, self._on_update)
        return self._cache

    def after_prefix(self, cache: Any) -> None:
        """*decode*: replace what the prefix left in the cache; from here on new tokens are coded."""
        if self.mode is not Mode.DECODE:
            return
        self._armed = True
        for index, layer in enumerate(cache.layers):
            if layer.is_initialized:
                self._code_ready(index, layer, layer.assay_position)
            self._forget(index - 1)

    def discard(self) -> None:
        """Forget the batch that runs: it did not fit into memory, and comes again by halves."""
        self._tracks.clear()
        self._cache = None
        self._fires, self._bytes_read = self._before

    def engagement(self) -> Engagement:
        """Calls of coders by layer, and bytes of replaced cache that later tokens read."""
        notes = {NOTE: streams_note(self.facts, self.coders, self._shape)} if self._shape else {}
        return Engagement(sum(self._fires.values()), self._bytes_read, dict(self._fires), notes)

    def _on_update(
        self, layer: int, position: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layer keeps of new tokens [B, h, n, d] that begin at `position`."""
        new = {"k": keys, "v": values}
        second_pass = self.mode is Mode.SNAPSHOT and self._armed
        for stream in new:
            track = self._track(layer, stream)
            if not second_pass:
                track.append(new[stream])
            if self._armed and track.coder:
                new[stream] = self._replaced(track, new[stream], position)
        if self._armed and self.mode is Mode.DECODE:
            self._code_ready(layer, self._cache.layers[layer], position)
        self._forget(layer - 1)
        if self._armed:
            self._bytes_read += (
                position * 2 * keys[..., :1, :].numel() * cache_dtype(self._model).itemsize
            )
        return new["k"], new["v"]

    def _replaced(self, track: Track, new: torch.Tensor, position: int) -> torch.Tensor:
        """New tokens as the cache takes them: coded at once where the mode or the coder allows it."""
        if self.mode is Mode.DECODE:
            track.check_together(position, new.shape[-2])
            if not track.codes_at_once(position):
                return new
            self._fire(track)
            return self._coded(track, position, position + new.shape[-2])
        end, snapshot = position + new.shape[-2], self.mode is Mode.SNAPSHOT
        # What snapshot puts in place of a token depends on all tokens of its window.
        lo, hi = track.whole_blocks(track.length) if snapshot else track.next_blocks(end)
        changed = track.exact[..., position:end, :].clone()
        if lo < hi:
            self._fire(track)
            result = self._coded(track, lo, hi)
            first, last = max(lo, position), min(hi, end)
            if first < last:
                changed[..., first - position : last - position, :] = result[
                    ..., first - lo : last - lo, :
                ]
            if not snapshot and lo < position:
                self._hold(
                    self._cache.layers[track.key[0]], track.key[1], lo, min(hi, position), result
                )
        return changed

    def _code_ready(self, index: int, layer: Any, end: int) -> None:
        """Code, in place, the blocks before position `end` that are full and no longer recent."""
        for stream in ("k", "v"):
            track = self._track(index, stream)
            if not track.coder or not layer.is_initialized:
                continue
            lo, hi = track.next_blocks(end)
            if hi <= lo:
                continue
            self._fire(track)
            self._hold(layer, stream, lo, hi, self._coded(track, lo, hi))

    def _coded(self, track: Track, lo: int, hi: int) -> torch.Tensor:
        """Positions lo … hi − 1 of a stream, predicted from what was coded of its sides."""
        import torch

        if not track.sides:
            return track.code(lo, hi)
        parts = [self._track(*key).decoded(lo, hi) for key in track.sides]
        return track.code(lo, hi, torch.cat(parts, dim=1))

    def _forget(self, layer: int) -> None:
        for stream in ("k", "v"):
            if (layer, stream) in self._tracks:
                self._tracks[layer, stream].forget()

    @staticmethod
    def _hold(layer: Any, stream: str, lo: int, hi: int, result: torch.Tensor) -> None:
        """Put positions lo … hi − 1 of `result`, which begins at `lo`, in place of what a layer
        holds of them.
        """
        held, start = (layer.keys if stream == "k" else layer.values), kept_from(layer)
        # A sliding layer may have let go of the start of a block.
        visible = max(lo, start)
        if visible < hi:
            held[..., visible - start : hi - start, :] = cast(
                result[..., visible - lo : hi - lo, :], held.dtype
            )

    def _track(self, layer: int, stream: str) -> Track:
        key = (layer, stream)
        if key not in self._tracks:
            self._tracks[key] = Track(key, self.coders.get(key), self._rotary)
        return self._tracks[key]

    def _fire(self, track: Track) -> None:
        layer = track.key[0]
        self._fires[layer] = self._fires.get(layer, 0) + 1

    def _measure(self) -> None:
        """Encode windows of the batch that is done, whole, as they stand in the cache at its end."""
        if not self._tracks or self._cache is None:
            return
        first = self._measured_to
        self._measured_to += next(iter(self._tracks.values())).exact.shape[0]
        starts = {key: kept_from(self._cache.layers[key[0]]) for key in self._tracks}
        for window in range(first, self._measured_to):
            if window not in self._to_measure:
                continue
            read = {
                (index, stream): states[window - first]
                for index, layer in enumerate(self._cache.layers)
                if layer.is_initialized
                for stream, states in (("k", layer.keys), ("v", layer.values))
            }
            for key, found in facts_of_window(self._tracks, window - first, starts, read):
                self.facts.setdefault(key, []).append(found)


# Where the hook goes, written as plain settings that an engine in another process can read.


_FACTORIES = {
    "hf": "assay_lab.kv.cache_hook:for_transformers",
    "vllm": "assay_lab.kv.vllm:for_vllm",
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

    def coders(self, bench: Bench) -> CoderSet:
        """The coders, fitted on the bench of a model."""
        everywhere = parse_spec(self.codec)
        special = {layer: parse_spec(spec) for layer, spec in self.layer_codecs.items()}

        def recipe(layer: int, stream: str) -> Recipe | None:
            return special.get(layer, everywhere).of(stream)

        return bench.fit_all(recipe, self.coded(bench.shape), self.streams)

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


class PlannedHook(CodecHook):
    """A codec's hook of transformers that fits its coders to the model it is attached to."""

    def __init__(self, plan: HookPlan) -> None:
        super().__init__(
            {},
            Mode(plan.mode),
            plan.length,
            measure_windows=plan.measure_windows,
            windows=plan.windows,
            first=plan.first,
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


def bench_of(
    shape: CacheShape, plan: HookPlan, rotary: Rotary | None, share: tuple[int, int] = (0, 1)
) -> Bench:
    """The bench of a model and calibration; AssayError where the calibration is of another model.

    `share` is the number of a rank and how many there are: its bench has its heads alone. The last
    few are kept, so that coders which many plans share are fitted once.
    """
    device = str(rotary and rotary.device)
    key = (shape, share, device, plan.length, plan.calibration, _stamp(plan.calibration))
    if key not in _BENCHES:
        while len(_BENCHES) >= _KEPT:
            _BENCHES.pop(next(iter(_BENCHES)))
        calibration = read(plan.calibration, _stamp(plan.calibration)) if plan.calibration else None
        if calibration:
            calibration.check_model(shape)
            calibration = calibration.of_rank(*share)
        _BENCHES[key] = Bench(shape.of_rank(share[1]), rotary, calibration)
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
