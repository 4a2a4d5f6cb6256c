"""Codecs in the forward pass of a model of transformers: the three modes of `assay kv eval`.

decode
    The prefix is prefilled exactly; then its cache is replaced by what the codec makes of it. Every
    later token is coded as serving would code it: when a block of the codec is full, and never
    while it is one of the recent tokens that the codec keeps exact. Several tokens may be fed
    together where each sees then what it would see alone.
inforward
    Every token, prefill included, attends to reconstructed keys and values.
snapshot
    A clean pass captures keys and values; in a second one every token attends to their
    reconstructions. Optimistic: errors do not build up from layer to layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from assay.engines.hf.cache import cache_dtype, cast
from assay.engines.scoring import Engagement
from assay_lab.kv.cache_bytes import NOTE, streams_note
from assay_lab.kv.cache_shape import CacheShape, cache_shape
from assay_lab.kv.hook_plan import HookPlan, Mode, layer_coders_of
from assay_lab.kv.live_stream import LiveStream, facts_of_window
from assay_lab.kv.observed_cache import kept_from, observed_cache
from assay_lab.kv.rotary import Rotary
from assay_lab.kv.stream_coder import Coders, Key
from assay_lab.kv.stream_facts import StreamFacts

if TYPE_CHECKING:
    import torch


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
        self._tracks: dict[Key, LiveStream] = {}
        self._armed = False
        self._cache: Any = None

    @contextmanager
    def attach(self, model: Any) -> Iterator[None]:
        """Remember the model while the hook is in place; the cache of each batch carries the
        rest.
        """
        self._model, self._shape = model, cache_shape(model)
        if any(coder.before_rope or coder.predictor_keys for coder in self.coders.values()):
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
        """*decode*: replace what the prefix left in the cache; from here on new tokens are
        coded.
        """
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

    def _replaced(self, track: LiveStream, new: torch.Tensor, position: int) -> torch.Tensor:
        """New tokens as the cache takes them: coded at once where the mode or the coder allows
        it.
        """
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

    def _coded(self, track: LiveStream, lo: int, hi: int) -> torch.Tensor:
        """Positions lo … hi − 1 of a stream, predicted from what was coded of its sides."""
        import torch

        if not track.predictor_keys:
            return track.code(lo, hi)
        parts = [self._track(*key).decoded(lo, hi) for key in track.predictor_keys]
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

    def _track(self, layer: int, stream: str) -> LiveStream:
        key = (layer, stream)
        if key not in self._tracks:
            self._tracks[key] = LiveStream(key, self.coders.get(key), self._rotary)
        return self._tracks[key]

    def _fire(self, track: LiveStream) -> None:
        layer = track.key[0]
        self._fires[layer] = self._fires.get(layer, 0) + 1

    def _measure(self) -> None:
        """Encode windows of the batch that is done, whole, as the cache holds them at its
        end.
        """
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
        layer_coders = layer_coders_of(cache_shape(model), self._plan, Rotary(model, self.length))
        self.coders = self._plan.coders(layer_coders).by_stream
        with super().attach(model):
            yield


def for_transformers(**config: Any) -> PlannedHook:
    """Factory of `hook_spec` for `hf:`."""
    return PlannedHook(HookPlan.from_config(config))
