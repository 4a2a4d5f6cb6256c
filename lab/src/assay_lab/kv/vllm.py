"""The hook of vLLM that puts fitted coders into its forward: the modes of
`assay_lab.kv.cache_hook`, in a paged cache.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safetensors.torch import load, save_file

from assay.engines.scoring import Engagement, HookSpec, ScoreJob, ScoringEngine, Window
from assay.engines.vllm.hooks import HookContext, Request, Rewrite
from assay.engines.vllm.ranks import merged
from assay.errors import AssayError
from assay.progress import NO_PROGRESS, Progress
from assay_lab.kv.cache_hook import (
    NOTE,
    HookPlan,
    Mode,
    bench_of,
    merged_notes,
    spread,
    streams_note,
)
from assay_lab.kv.cache_shape import CacheShape, cache_shape
from assay_lab.kv.calibration import Sampler, kept_per_window
from assay_lab.kv.coder_protocol import StreamCoder
from assay_lab.kv.fit import last_readers
from assay_lab.kv.spec import parse_spec
from assay_lab.kv.stream_coder import Coders, Growing, Key, StreamFacts, Track, facts_of_window
from assay_lab.kv.transforms import Rotary

if TYPE_CHECKING:
    import torch


# One stream (K or V) of one layer inside vLLM, for all requests whose tokens are packed into a
# step.
#
# Tokens of a request are coded in blocks of its own; the coder sees the due blocks of all requests
# in one call. What a coder gives back for tokens of the running step goes to attention, which also
# writes it into the cache; what it gives back for earlier tokens (a block that became full, a token
# that is recent no longer, the prefix that *decode* left exact) must be written into the cache by
# the caller.
#
# A coder that predicts gets, for the tokens that it codes, what the lanes of its sides made of the
# same ones; those lanes are fed before it in every step.


Spans = Mapping[str, tuple[int, int]]
"""First and past the last position, by the key of a request."""
Due = tuple[Request, int, int]
"""Positions from … to, past the last, of a request in the running step."""


@dataclass
class History:
    """Tokens of one request: as they came, and as they lie in the cache. Tensors are [1, h, tokens,
    d] and [h, tokens, d].
    """

    track: Track
    held: Growing = field(default_factory=Growing)
    replaced: torch.Tensor | None = None
    """What *snapshot* puts in place of all of them."""


class Lane:
    """One stream of one layer. `stateful`: earlier tokens may change, so that all are kept.

    `settles`: in *decode* none changes any more once the prefix has been coded, in this stream and
    in the other, which shares its slots, nor in those that predict from this one; then nothing more
    is kept. `sides` are the lanes that the coder predicts from. `handed`: others predict from this
    one; `recorded`: from earlier tokens of it too.
    """

    def __init__(
        self,
        key: Key,
        coder: StreamCoder | None,
        mode: Mode,
        *,
        stateful: bool,
        settles: bool = False,
        sides: Sequence[Lane] = (),
        handed: bool = False,
        recorded: bool = False,
    ) -> None:
        self.key = key
        self.coder = coder
        self.mode = mode
        self.stateful = stateful
        self.settles = settles and mode is Mode.DECODE
        self.sides = tuple(sides)
        self.handed = handed
        self.recorded = recorded
        self._exact = coder is None or coder.lossless
        self._step: torch.Tensor | None = None
        self._second = False
        self._made: list[tuple[tuple[Due, ...], torch.Tensor]] = []
        self.histories: dict[str, History] = {}
        self.fires = 0
        self.coded = 0
        """Tokens that were coded since `forget`."""

    def feed(
        self,
        requests: Sequence[Request],
        x: torch.Tensor,
        kept: Callable[[Request], bool],
        *,
        second: bool,
    ) -> tuple[torch.Tensor, Spans]:
        """What attention gets instead of `x` [tokens, h, d], and which earlier tokens of whom are
        now others.

        `kept` says of whom the tokens are kept although nothing needs them; `second` is the second
        pass of *snapshot*.
        """
        self.release()
        if self.handed:
            self._step, self._second = x, second
        if second:
            return (self._replaced(requests, x), {}) if self.coder else (x, {})
        settled = (
            [r for r in requests if self._is_settled(r) and not kept(r)] if self.settles else []
        )
        if settled:
            x = self._settled(settled, x, everyone=len(settled) == len(requests))
            if len(settled) == len(requests):
                return x, {}
            alone = {r.key for r in settled}
            return self._feed([r for r in requests if r.key not in alone], x, kept)
        return self._feed(requests, x, kept)

    def _feed(
        self, requests: Sequence[Request], x: torch.Tensor, kept: Callable[[Request], bool]
    ) -> tuple[torch.Tensor, Spans]:
        for request in requests:
            if self.stateful or self.recorded or kept(request):
                rows = x[request.offset : request.offset + request.count].transpose(0, 1)
                self._history(request).track.append(rows.unsqueeze(0))
        changed: Spans = {}
        if self.coder is None or self.mode is Mode.SNAPSHOT:
            out = x
        elif self.stateful:
            out, changed = self._due(requests, x)
        else:
            out = self._at_once(requests, x)
        if self.stateful and self.mode is not Mode.SNAPSHOT:
            for request in requests:
                rows = out[request.offset : request.offset + request.count].transpose(0, 1)
                self.histories[request.key].held.append(rows)
        return out, changed

    def decoded(self, due: Sequence[Due]) -> torch.Tensor:
        """What a decoder has of these tokens, [h, all of them, d], float32: exact ones, or what was
        coded in this step.

        ValueError where they have not been coded in it.
        """
        import torch

        if self._exact:
            return torch.cat([self._exactly(*d) for d in due], dim=1).float()
        for ranges, result in self._made:
            if ranges == tuple(due):
                return result
        return torch.cat([self._made_of(*d) for d in due], dim=1)

    def release(self) -> None:
        """Nothing predicts from the running step any more."""
        self._step = None
        self._made.clear()

    def _exactly(self, request: Request, lo: int, hi: int) -> torch.Tensor:
        """Tokens as they came, in the first pass of *snapshot*."""
        if self._second or lo < request.start or self._step is None:
            return self.histories[request.key].track.exact[0, :, lo:hi]
        first = request.offset - request.start
        return self._step[first + lo : first + hi].transpose(0, 1)

    def _made_of(self, request: Request, lo: int, hi: int) -> torch.Tensor:
        for ranges, result in self._made:
            at = 0
            for other, first, last in ranges:
                if other.key == request.key and first <= lo and hi <= last:
                    return result[:, at + lo - first : at + hi - first]
                at += last - first
        raise ValueError(
            f"tokens {lo} to {hi} of request {request.key} are not coded yet in {self.key}"
        )

    def _is_settled(self, request: Request) -> bool:
        """Whether all earlier tokens of a request are what they stay, and its new ones are coded as
        they come.
        """
        if request.start <= request.prefix:
            return False
        if self.coder is None:
            return True
        found = self.histories.get(request.key)
        return (
            found is not None
            and found.track.done == request.start
            and request.start >= self.coder.exact_first
        )

    def _settled(
        self, requests: Sequence[Request], x: torch.Tensor, *, everyone: bool
    ) -> torch.Tensor:
        """Code the new tokens of settled requests, `everyone` where the step has no others."""
        if self.coder is None:
            return x
        for request in requests:
            self.histories[request.key].track.mark(request.end)
        total = requests[-1].offset + requests[-1].count
        rows = slice(0, total) if everyone else _rows_from(tuple(requests), 0, x.device)
        return self._coded_rows(x, rows, requests, 0)

    def forget(self, keys: Sequence[str] | None = None) -> None:
        """Drop what is kept of these requests, by default of all."""
        if keys is None:
            self.release()
            self.histories.clear()
            self.coded = 0
        for key in keys or ():
            self.histories.pop(key, None)

    def _history(self, request: Request) -> History:
        """The history of a request, whose next token is the first of the step. A request that
        begins again is new.
        """
        found = self.histories.get(request.key)
        if found is None or request.start == 0:
            found = History(Track(self.key, self.coder, None))
        if found.track.length != request.start:
            raise AssayError(
                f"{found.track.length} tokens of request {request.key} have passed layer"
                f" {self.key[0]}, but it goes on at token {request.start}: some came from another"
                " request's cache",
                finding_id="kv.unsupported",
                remedy="switch prefix caching off",
            )
        self.histories[request.key] = found
        return found

    def _at_once(self, requests: Sequence[Request], x: torch.Tensor) -> torch.Tensor:
        """All tokens but sinks, each coded as it comes."""
        if self.coder is None:
            return x
        first = self.coder.exact_first
        total = requests[-1].offset + requests[-1].count
        if all(request.start >= first for request in requests):
            rows: torch.Tensor | slice = slice(0, total)
        else:
            rows = _rows_from(tuple(requests), first, x.device)
            if not rows.numel():
                return x
        return self._coded_rows(x, rows, requests, first)

    def _coded_rows(
        self, x: torch.Tensor, rows: torch.Tensor | slice, requests: Sequence[Request], first: int
    ) -> torch.Tensor:
        """`x` with these rows coded, each token alone: those of the requests that are not among
        their first ones.
        """
        due: list[Due] = []
        if self.sides or self.handed:
            due = [(r, max(r.start, first), r.end) for r in requests if r.end > first]
        result = self._code(x[rows].transpose(0, 1), due).transpose(0, 1)
        if result.shape[0] == x.shape[0]:
            return result
        out = x.clone()
        out[rows] = result
        return out

    def _due(self, requests: Sequence[Request], x: torch.Tensor) -> tuple[torch.Tensor, Spans]:
        """Code what has become due of each request, in the cache and in the step."""
        import torch

        due = [
            (r, lo, hi)
            for r in requests
            for lo, hi in self._ranges(r, self.histories[r.key].track)
            if lo < hi
        ]
        if not due:
            return x, {}
        results = self._code(
            torch.cat([self.histories[r.key].track.exact[0, :, lo:hi] for r, lo, hi in due], 1), due
        )
        out, changed, done = x.clone(), dict[str, tuple[int, int]](), 0
        for request, lo, hi in due:
            result = results[:, done : done + hi - lo]
            done += hi - lo
            middle = min(hi, max(lo, request.start))
            if lo < middle:
                self.histories[request.key].held.states[:, lo:middle] = result[:, : middle - lo]
                before = changed.get(request.key, (lo, middle))
                changed[request.key] = min(lo, before[0]), max(middle, before[1])
            if middle < hi:
                row = request.offset + middle - request.start
                out[row : row + hi - middle] = result[:, middle - lo :].transpose(0, 1)
        return out, changed

    def _ranges(self, request: Request, track: Track) -> list[tuple[int, int]]:
        """Positions of a request that are due: as the hook of transformers decides it."""
        if self.mode is Mode.INFORWARD:
            return [track.next_blocks(request.end)]
        if request.start < request.prefix or self.coder is None:
            return []
        ranges = [track.next_blocks(request.start)]
        if track.codes_at_once(max(request.start, self.coder.exact_first)):
            ranges.append((max(request.start, self.coder.exact_first), request.end))
            track.mark(request.end)
        return ranges

    def _replaced(self, requests: Sequence[Request], x: torch.Tensor) -> torch.Tensor:
        """The second pass of *snapshot*: what the first one captured, reconstructed once per
        request.
        """
        import torch

        histories = [self.histories[r.key] for r in requests]
        fresh = [h for h in histories if h.replaced is None]
        spans = [h.track.whole_blocks(h.track.length) for h in fresh]
        new = [r for r in requests if self.histories[r.key].replaced is None]
        due = [(r, lo, hi) for r, (lo, hi) in zip(new, spans, strict=True) if lo < hi]
        parts = [self.histories[r.key].track.exact[0, :, lo:hi] for r, lo, hi in due]
        results = self._code(torch.cat(parts, dim=1), due) if parts else None
        done = 0
        for history, (lo, hi) in zip(fresh, spans, strict=True):
            history.replaced = history.track.exact[0].clone()
            if results is not None and lo < hi:
                history.replaced[:, lo:hi] = results[:, done : done + hi - lo]
                done += hi - lo
        out = x.clone()
        for request, history in zip(requests, histories, strict=True):
            if history.replaced is not None:
                rows = history.replaced[:, request.start : request.end].transpose(0, 1)
                out[request.offset : request.offset + request.count] = rows
        return out

    def _code(self, x: torch.Tensor, due: Sequence[Due]) -> torch.Tensor:
        """Whole blocks [h, tokens, d] as the codec gives them back, in the same type; `due` says
        which tokens they are.
        """
        import torch

        self.fires += 1
        self.coded += x.shape[1]
        if self.coder is None or self.coder.lossless:
            return x
        near = torch.cat([side.decoded(due) for side in self.sides]) if self.sides else None
        result = self.coder.reconstruct(x, near)
        if self.handed:
            self._made.append((tuple(due), result))
        return result.to(x.dtype)


@lru_cache(maxsize=8)
def _rows_from(requests: tuple[Request, ...], first: int, device: torch.device) -> torch.Tensor:
    """Rows of a step whose tokens are not among the first of their request; all layers ask for the
    same ones.
    """
    import numpy as np
    import torch

    spans = [
        np.arange(r.offset + min(r.count, max(0, first - r.start)), r.offset + r.count)
        for r in requests
    ]
    return torch.from_numpy(np.concatenate(spans)).to(device)


# The hook.


class VllmCodecHook:
    """A codec in the KV cache of vLLM: see `assay.engines.vllm.hooks.KvHook`.

    Keys are coded before RoPE in the layers whose recipe says so, where vLLM has them in the
    model's type.
    """

    placement: Literal["pre_rope", "post_rope"] = "post_rope"

    def __init__(self, plan: HookPlan) -> None:
        self.plan = plan
        self.mode = Mode(plan.mode)
        self.passes = 2 if self.mode is Mode.SNAPSHOT else 1
        self.facts: dict[Key, list[StreamFacts]] = {}
        self._lanes: dict[Key, Lane] = {}
        self._measured: list[str] = []
        self._to_measure = spread(plan.measure_windows, plan.windows or plan.measure_windows)
        self._started = 0
        self._second = False
        self._running: tuple[Request, ...] | None = None

    def bind(self, model: Any, context: HookContext) -> None:
        """Fit the coders to the model; AssayError for a model whose cache they do not fit."""
        self._context = context
        self._whole = whole = cache_shape(model)
        self._shape = shape = whole.of_rank(context.share[1])
        check_cache(shape, context)
        serving = context.steps.serving
        if serving and self.mode is Mode.SNAPSHOT:
            raise AssayError(
                "snapshot needs every request twice, which no server has",
                finding_id="kv.unsupported",
                remedy="serve with --mode inforward or decode",
            )
        # The model's rotation is needed only to put the calibration's keys where the codec is.
        rotary = Rotary.of_config(model.config, self.plan.length) if self.plan.calibration else None
        fitted = self.plan.coders(bench_of(whole, self.plan, rotary, context.share)).by_stream
        # A pipeline stage has some of the layers.
        self._coders: Coders = {
            key: coder for key, coder in fitted.items() if key[0] in context.attentions
        }
        self._last_readers = last_readers(self._coders)
        self._to_measure = frozenset() if serving else self._to_measure
        lanes = lanes_of(self._coders, shape.layers, self.mode)
        self._lanes = {key: lane for key, lane in lanes.items() if key[0] in context.attentions}

    def check_ranks(self, tensor: int, stages: int) -> None:
        """UsageError where so many ranks and pipeline stages would split what is coded together."""
        for spec in (self.plan.codec, *self.plan.layer_codecs.values()):
            parse_spec(spec).check_ranks(tensor, stages)

    def placement_of(self, layer: int) -> Literal["pre_rope", "post_rope"]:
        """Where a layer's keys are coded; those that others predict from are wanted before RoPE,
        exact ones too.
        """
        coder = self._coders.get((layer, "k"))
        before = (coder is not None and coder.before_rope) or (layer, "k") in self._last_readers
        return "pre_rope" if before else "post_rope"

    def start_pass(self, index: int) -> None:
        """Told by the engine before each pass over a batch."""
        self._second = index == 1

    def on_kv(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [tokens, h, d] of a step as they go to attention; earlier tokens are changed in
        the cache.
        """
        requests = self._context.steps.requests
        if requests is None:
            return k, v
        if requests is not self._running:
            self._begin(requests)
        self._check_shapes(layer, k, v)
        new: dict[str, torch.Tensor] = {}
        changed: dict[str, Spans] = {}
        for stream, x in (("k", k), ("v", v)):
            lane = self._lanes[layer, stream]
            new[stream], changed[stream] = lane.feed(
                requests, x, self._is_measured, second=self._second
            )
        if any(changed.values()):
            self._rewrite(layer, requests, changed)
        for key, reader in self._last_readers.items():
            if reader == layer:
                self._lanes[key].release()
        return new["k"], new["v"]

    def _check_shapes(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        wanted = (self._shape.kv_heads, self._shape.head_dim)
        for stream, x in (("k", k), ("v", v)):
            if x.shape[1:] != wanted:
                raise AssayError(
                    f"layer {layer} has {stream.upper()} of shape {tuple(x.shape)}, "
                    f"not [tokens, {self._shape.kv_heads}, {self._shape.head_dim}]",
                    finding_id="kv.unsupported",
                    remedy="use a model whose layers have one shape of cache, on one GPU",
                )

    def commit(self) -> None:
        """A batch went through: all its layers must have coded as much; measured windows are
        encoded for real.
        """
        groups: dict[tuple[Any, ...], dict[int, int]] = {}
        for (layer, stream), lane in self._lanes.items():
            if (coder := lane.coder) is not None:
                alike = (stream, coder.granularity, coder.exact_first, coder.exact_last)
                groups.setdefault(alike, {})[layer] = lane.coded
        for (stream, *_), coded in groups.items():
            if len(set(coded.values())) > 1:
                raise AssayError(
                    f"not all layers coded as many tokens of {stream.upper()}",
                    finding_id="fidelity.not_engaged",
                    remedy="run with enforce_eager in one engine process",
                    evidence={"coded": {str(layer): tokens for layer, tokens in coded.items()}},
                )
        for window in self._measured:
            tracks = {key: lane.histories[window].track for key, lane in self._lanes.items()}
            held = {key: lane.histories[window].held for key, lane in self._lanes.items()}
            read = {k: h.states for k, h in held.items() if 0 < h.length == tracks[k].length}
            for key, found in facts_of_window(tracks, 0, dict.fromkeys(tracks, 0), read):
                self.facts.setdefault(key, []).append(found)
        self.discard()

    def discard(self) -> None:
        """Forget the batch."""
        self._measured.clear()
        for lane in self._lanes.values():
            lane.forget()

    def engagement(self) -> Engagement:
        """Calls of coders by layer, and what streams came to."""
        fires: dict[int, int] = {}
        for layer, stream in self._coders:
            fires[layer] = fires.get(layer, 0) + self._lanes[layer, stream].fires
        return Engagement(
            sum(fires.values()),
            None,
            fires,
            {NOTE: streams_note(self.facts, self._coders, self._whole)},
        )

    @staticmethod
    def merged(parts: Sequence[Engagement]) -> Engagement:
        """The engagement of ranks that share the heads or the layers: streams and tables are added
        up.
        """
        found = merged(parts)
        return replace(
            found, notes={**found.notes, NOTE: merged_notes([p.notes[NOTE] for p in parts])}
        )

    def _begin(self, requests: tuple[Request, ...]) -> None:
        """The first layer of a step: note which windows are measured; a server's requests that are
        gone are dropped.
        """
        self._running = requests
        steps = self._context.steps
        if steps.serving:
            alive = steps.alive()
            for lane in self._lanes.values():
                lane.forget([key for key in lane.histories if key not in alive])
        for request in requests:
            if request.start == 0 and not self._second:
                if self._started in self._to_measure:
                    self._measured.append(request.key)
                self._started += 1

    def _is_measured(self, request: Request) -> bool:
        return request.key in self._measured

    def _rewrite(
        self, layer: int, requests: tuple[Request, ...], changed: Mapping[str, Spans]
    ) -> None:
        """Write what changed of earlier tokens into the cache; a slot takes K and V together."""
        changes = []
        for request in requests:
            spans = [c[request.key] for c in changed.values() if request.key in c]
            if spans:
                lo, hi = min(s[0] for s in spans), max(s[1] for s in spans)
                k, v = (
                    self._lanes[layer, stream]
                    .histories[request.key]
                    .held.states[:, lo:hi]
                    .transpose(0, 1)
                    for stream in ("k", "v")
                )
                changes.append(Rewrite(request, lo, k, v))
        self._context.rewrite(layer, changes, rotate=self.placement_of(layer) == "pre_rope")


def for_vllm(**config: Any) -> VllmCodecHook:
    """Factory of `assay_lab.kv.cache_hook.hook_spec` for `vllm:`."""
    return VllmCodecHook(HookPlan.from_config(config))


def lanes_of(coders: Coders, layers: int, mode: Mode) -> dict[Key, Lane]:
    """The lanes of all layers, each with those that it predicts from."""
    keys = [(layer, stream) for layer in range(layers) for stream in ("k", "v")]
    readers: dict[Key, set[int]] = {}
    for (layer, _), reading in coders.items():
        for side in reading.sides:
            readers.setdefault(side, set()).add(layer)

    def of(layer: int) -> list[StreamCoder]:
        return [coders[layer, stream] for stream in ("k", "v") if (layer, stream) in coders]

    single = {n: all(c.granularity == 1 and not c.exact_last for c in of(n)) for n in range(layers)}
    stateful = {
        n: bool(of(n)) and (mode is not Mode.INFORWARD or not single[n]) for n in range(layers)
    }
    lanes: dict[Key, Lane] = {}
    for key in keys:
        layer, coder = key[0], coders.get(key)
        mine = readers.get(key, set())
        exact = coder is None or coder.lossless
        lanes[key] = Lane(
            key,
            coder,
            mode,
            stateful=stateful[layer],
            settles=single[layer] and (not exact or all(single[reader] for reader in mine)),
            sides=[lanes[side] for side in (coder.sides if coder else ())],
            handed=bool(mine),
            recorded=exact and any(stateful[reader] for reader in mine),
        )
    return lanes


def check_cache(shape: CacheShape, context: HookContext) -> None:
    """AssayError for caches that coders of whole tokens do not fit."""
    for layer, module in context.attentions.items():
        attention = module.attn
        if getattr(attention, "sliding_window", None) is not None:
            raise AssayError(
                f"layer {layer} is sliding-window attention, whose cache lets go of tokens that a"
                " codec still has to change",
                finding_id="kv.unsupported",
                remedy="measure the codec on such a model with hf:",
            )
        if getattr(attention, "kv_sharing_target_layer_name", None) is not None:
            raise AssayError(
                f"layer {layer} reads another layer's cache",
                finding_id="kv.unsupported",
                remedy="use a model whose layers each have their own cache",
            )
        if module.num_kv_heads != shape.kv_heads:
            raise AssayError(
                f"layer {layer} has {module.num_kv_heads} of {shape.kv_heads} KV heads here, a"
                " codec must see all together",
                finding_id="kv.unsupported",
                remedy="run on one GPU, without tensor parallelism",
            )


# Keys, values and queries of real text, captured inside vLLM: what a calibration file holds.
#
# The engine may run in a worker, so the hook writes the tensors into a file when it has seen all
# windows.


class VllmCapture:
    """A hook that changes nothing and keeps what `Sampler` wants of `windows` windows of `length`
    tokens.
    """

    placement: Literal["pre_rope"] = "pre_rope"

    def __init__(self, length: int, keep: int, windows: int, out: str) -> None:
        self._length, self._keep, self._windows, self._out = length, keep, windows, Path(out)
        self._running: tuple[Request, ...] | None = None
        self._fires: dict[int, int] = {}
        self._seen = 0

    def bind(self, model: Any, context: HookContext) -> None:
        """Remember the model's cache, rotation and output projections."""
        self._context = context
        shape = cache_shape(model)
        check_cache(shape, context)
        self._sampler = Sampler(shape, self._length, self._keep)
        self._rotary = Rotary.of_config(model.config, self._length)
        self._output = {
            layer: _weight(module, shape.query_heads * shape.head_dim)
            for layer, module in context.attentions.items()
        }

    def on_query(self, layer: int, q: torch.Tensor, positions: torch.Tensor) -> None:
        """Queries [tokens, heads, head_dim] before RoPE."""
        if requests := self._requests():
            for request in requests:
                self._sampler.on_queries(layer, _rows(q, request))

    def on_kv(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [tokens, kv_heads, head_dim], as they are."""
        if requests := self._requests():
            for request in requests:
                self._sampler.on_states(layer, "k", _rows(k, request))
                self._sampler.on_states(layer, "v", _rows(v, request))
            self._fires[layer] = self._fires.get(layer, 0) + 1
        return k, v

    def commit(self) -> None:
        """A batch went through; with the last one the file is written."""
        self._seen = len(self._sampler.positions)
        if self._seen == self._windows:
            tensors = self._sampler.tensors(self._rotary, self._output)
            save_file(
                {name: t.detach().cpu().contiguous() for name, t in tensors.items()}, self._out
            )

    def discard(self) -> None:
        """A batch failed half-way: what it left cannot be told from the rest."""
        if len(self._sampler.positions) != self._seen:
            raise AssayError(
                "a batch of calibration text did not fit into memory",
                finding_id="fidelity.engine_failed",
                remedy="use a smaller --batch or shorter windows",
            )

    def engagement(self) -> Engagement:
        """Calls by layer, and the shape of the cache."""
        notes = {NOTE: {"cache": self._sampler.shape.to_json()}}
        return Engagement(sum(self._fires.values()), None, dict(self._fires), notes)

    def _requests(self) -> tuple[Request, ...] | None:
        """The requests of the step; AssayError unless each is a whole window."""
        requests = self._context.steps.requests
        if requests is not None and requests is not self._running:
            if any(r.start or r.end != self._length - 1 for r in requests):
                raise AssayError(
                    "calibration text goes through in one pass, but vLLM cut it",
                    finding_id="fidelity.engine_failed",
                    remedy="raise max_num_batched_tokens, or use shorter windows",
                )
            self._running = requests
            self._sampler.begin(len(requests))
        return requests


def capture_in_vllm(
    engine: ScoringEngine,
    windows: Sequence[Window],
    *,
    tokens: int,
    batch: int,
    progress: Progress = NO_PROGRESS,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors of a calibration of about `tokens` samples, and the shape of the cache as JSON."""
    length = len(windows[0].tokens)
    with tempfile.TemporaryDirectory(prefix="assay-capture-") as folder:
        out = Path(folder) / "samples.safetensors"
        config = {
            "length": length,
            "keep": kept_per_window(tokens, len(windows), length),
            "windows": len(windows),
            "out": str(out),
        }
        job = ScoreJob(batch=batch, hook=HookSpec("assay_lab.kv.vllm:VllmCapture", config))
        with progress("capturing keys, values and queries", len(windows)) as advance:
            for _ in engine.score_windows(windows, job):
                advance()
        return load(out.read_bytes()), dict(engine.engagement().notes[NOTE]["cache"])


def _rows(x: torch.Tensor, request: Request) -> torch.Tensor:
    """A request's rows of [tokens, heads, d] as [1, heads, its tokens, d]."""
    return x[request.offset : request.offset + request.count].transpose(0, 1).unsqueeze(0)


def _weight(attention: Any, width: int) -> torch.Tensor:
    """The output projection [hidden, H·d] of an attention, whatever form its kernel keeps it in:
    its image of unit vectors.
    """
    import torch

    parameter = next(attention.parameters())
    with torch.inference_mode():
        unit = torch.eye(width, dtype=_floating(parameter), device=parameter.device)
        image = attention.o_proj(unit)[0] - attention.o_proj(torch.zeros_like(unit[:1]))[0]
    return image.mT.float().cpu()


def _floating(parameter: torch.Tensor) -> torch.dtype:
    import torch

    return (
        parameter.dtype
        if parameter.dtype in (torch.bfloat16, torch.float16)
        else torch.get_default_dtype()
    )
