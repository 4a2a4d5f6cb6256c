"""Codecs in the KV cache of a running vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from assay.engines.scoring import Engagement
from assay.engines.vllm.kv_hooks import HookContext
from assay.engines.vllm.steps import Request, Rewrite
from assay.engines.vllm.worker import merged
from assay.errors import AssayError
from assay_lab.kv.cache_bytes import NOTE, merged_notes, streams_note
from assay_lab.kv.cache_hook import spread
from assay_lab.kv.cache_shape import CacheShape, cache_shape
from assay_lab.kv.coder_protocol import StreamCoder
from assay_lab.kv.hook_plan import HookPlan, Mode, layer_coders_of
from assay_lab.kv.live_stream import facts_of_window
from assay_lab.kv.predictors import last_readers
from assay_lab.kv.rotary import Rotary
from assay_lab.kv.spec import parse_spec
from assay_lab.kv.stream_coder import Coders, Key
from assay_lab.kv.stream_facts import StreamFacts
from assay_lab.kv.vllm.stream import Spans, VllmStream

if TYPE_CHECKING:
    import torch


class VllmCodecHook:
    """A codec in the KV cache of vLLM: see `assay.engines.vllm.kv_hooks.KvHook`.

    Keys are coded before RoPE in the layers whose recipe says so, where vLLM has them in the
    model's type.
    """

    placement: Literal["pre_rope", "post_rope"] = "post_rope"

    def __init__(self, plan: HookPlan) -> None:
        self.plan = plan
        self.mode = Mode(plan.mode)
        self.passes = 2 if self.mode is Mode.SNAPSHOT else 1
        self.facts: dict[Key, list[StreamFacts]] = {}
        self._lanes: dict[Key, VllmStream] = {}
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
        fitted = self.plan.coders(
            layer_coders_of(whole, self.plan, rotary, context.share)
        ).by_stream
        # A pipeline stage has some of the layers.
        self._coders: Coders = {
            key: coder for key, coder in fitted.items() if key[0] in context.attentions
        }
        self._last_readers = last_readers(self._coders)
        self._to_measure = frozenset() if serving else self._to_measure
        lanes = streams_of(self._coders, shape.layers, self.mode)
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
    """Factory of `assay_lab.kv.hook_plan.hook_spec` for `vllm:`."""
    return VllmCodecHook(HookPlan.from_config(config))


def streams_of(coders: Coders, layers: int, mode: Mode) -> dict[Key, VllmStream]:
    """The lanes of all layers, each with those that it predicts from."""
    keys = [(layer, stream) for layer in range(layers) for stream in ("k", "v")]
    readers: dict[Key, set[int]] = {}
    for (layer, _), reading in coders.items():
        for source in reading.predictor_keys:
            readers.setdefault(source, set()).add(layer)

    def of(layer: int) -> list[StreamCoder]:
        return [coders[layer, stream] for stream in ("k", "v") if (layer, stream) in coders]

    single = {n: all(c.granularity == 1 and not c.exact_last for c in of(n)) for n in range(layers)}
    stateful = {
        n: bool(of(n)) and (mode is not Mode.INFORWARD or not single[n]) for n in range(layers)
    }
    lanes: dict[Key, VllmStream] = {}
    for key in keys:
        layer, coder = key[0], coders.get(key)
        mine = readers.get(key, set())
        exact = coder is None or coder.lossless
        lanes[key] = VllmStream(
            key,
            coder,
            mode,
            stateful=stateful[layer],
            settles=single[layer] and (not exact or all(single[reader] for reader in mine)),
            predictors=[lanes[source] for source in (coder.predictor_keys if coder else ())],
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
