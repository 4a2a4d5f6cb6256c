"""Codecs that predict, inside vLLM: for the same tensors its cache is bit for bit that of
transformers' hook.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from assay.engines.vllm.steps import Request
from assay_lab.kv.cache_bytes import stream_facts
from assay_lab.kv.cache_hook import CodecHook
from assay_lab.kv.hook_plan import HookPlan, Mode
from assay_lab.kv.layer_coders import CoderSet
from assay_lab.kv.vllm.hook import VllmCodecHook, streams_of
from kv.predicting import leaning
from kv.test_kv_hook import Rounding

LAYERS, HEADS, WIDTH, PREFIX = 3, 2, 4, 12
KEYS = [(layer, stream) for layer in range(LAYERS) for stream in "kv"]


class LlamaForCausalLM(torch.nn.Module):  # type: ignore[misc]
    """Has the configuration only."""

    device, dtype = torch.device("cpu"), torch.float32
    config = transformers.LlamaConfig(
        hidden_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        head_dim=WIDTH,
    )

    def get_decoder(self) -> Any:
        return SimpleNamespace(
            rotary_emb=transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(self.config)
        )


@dataclass(frozen=True)
class Fixed(HookPlan):
    """A plan whose coders are there already."""

    ready: Any = field(default_factory=dict)

    def coders(self, layer_coders: Any) -> CoderSet:
        return CoderSet(self.ready)


class Engine:
    """Packs requests into steps, calls the hook layer by layer, and keeps each one's cache [h,
    tokens, d].
    """

    def __init__(self, coders: Any, mode: Mode, prefix: int) -> None:
        self.steps = SimpleNamespace(requests=None, serving=False)
        module = SimpleNamespace(num_kv_heads=HEADS, attn=SimpleNamespace())
        self.share = (0, 1)
        self.attentions = dict.fromkeys(range(LAYERS), module)
        self.hook = VllmCodecHook(
            Fixed("identity", mode.value, 64, measure_windows=1, ready=coders)
        )
        self.hook.bind(LlamaForCausalLM(), self)  # type: ignore[arg-type]
        self.prefix = prefix
        self.begin()

    def begin(self, index: int = 0) -> None:
        self.hook.start_pass(index)
        self.cache: dict[Any, Any] = {}
        self.at: dict[str, int] = {}

    def rewrite(self, layer: int, changes: Any, *, rotate: bool) -> None:
        for change in changes:
            for stream, states in (("k", change.k), ("v", change.v)):
                held = self.cache[layer, stream, change.request.key]
                held[:, change.lo : change.lo + len(states)] = states.transpose(0, 1)

    def step(self, sequences: dict[str, Any], counts: dict[str, int]) -> None:
        requests, offset = [], 0
        for row, (name, count) in enumerate(counts.items()):
            start = self.at.get(name, 0)
            requests.append(Request(name, start, count, offset, self.prefix, row))
            self.at[name] = start + count
            offset += count
        self.steps.requests = tuple(requests)
        for layer in range(LAYERS):
            packed = [
                torch.cat(
                    [sequences[r.key][layer, stream][:, r.start : r.end] for r in requests], dim=1
                )
                for stream in "kv"
            ]
            out = self.hook.on_kv(layer, *(p.transpose(0, 1) for p in packed), None)  # type: ignore[arg-type]
            for stream, states in zip("kv", out, strict=True):
                for r in requests:
                    rows = states[r.offset : r.offset + r.count].transpose(0, 1)
                    before = (
                        self.cache.get((layer, stream, r.key), rows[:, :0])
                        if r.start
                        else rows[:, :0]
                    )
                    self.cache[layer, stream, r.key] = torch.cat([before, rows], dim=1)
            # No more is at hand than the next layer needs.
            made = {
                key
                for key, lane in self.hook._lanes.items()
                if lane._made or lane._step is not None
            }
            assert all(key[0] == layer for key in made)
        self.steps.requests = None


def in_transformers(
    coders: Any, mode: Mode, passes: list[Any], counts: list[list[int]], prefix: int
) -> tuple[Any, CodecHook]:
    """The cache that transformers' hook leaves of one request, by its passes over tensors, and the
    hook.
    """
    hook = CodecHook(coders, mode, 64, measure_windows=1)
    with hook.attach(LlamaForCausalLM()):
        hook._rotary = None  # the keys here are what they are before RoPE
        for index, (given, steps) in enumerate(zip(passes, counts, strict=True)):
            cache, at = hook.new_cache(1, index), 0
            for count in steps:
                for layer in range(LAYERS):
                    cache.update(*(given[layer, s][None, :, at : at + count] for s in "kv"), layer)
                at += count
                if at == prefix:
                    hook.after_prefix(cache)
    held = {}
    for layer in range(LAYERS):
        held[layer, "k"], held[layer, "v"] = (
            cache.layers[layer].keys[0],
            cache.layers[layer].values[0],
        )
    return held, hook


def tensors(seed: int, tokens: int) -> dict[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(HEADS, tokens, WIDTH, generator=generator) for key in KEYS}


def all_of(
    first: int = 0, last: int = 0, *, exact: tuple[Any, ...] = (), lossless: tuple[Any, ...] = ()
) -> Any:
    """Every stream coded, each predicted from the layer below and the keys of its own, some left
    exact.
    """
    coders: dict[Any, Any] = {}
    for layer, stream in KEYS:
        below = [(layer - 1, s) for s in "kv" if layer]
        predictor_keys = (*below, *([(layer, "k")] if stream == "v" else []))
        if (layer, stream) in lossless:
            coders[layer, stream] = Rounding(lossless=True, exact_last=2)
        elif (layer, stream) not in exact:
            coders[layer, stream] = leaning(
                (layer, stream), tuple(predictor_keys), first=first, last=last
            )
    return coders


CODERS = {
    "all": all_of(),
    "sinks": all_of(3),
    "more sinks than prefix": all_of(14),
    "recent": all_of(2, 5),
    "boundary": all_of(3, exact=((0, "k"), (0, "v"))),
    "boundary and recent": all_of(0, 4, exact=((0, "k"), (0, "v"))),
    "exact keys": all_of(2, exact=tuple((n, "k") for n in range(LAYERS))),
    "lossless": all_of(3, lossless=((0, "k"), (1, "v"))),
    # Values predict from values below; blocks of keys keep the first layer from settling.
    "blocks beside": {
        (0, "k"): Rounding(granularity=4),
        (0, "v"): leaning((0, "v")),
        (1, "v"): leaning((1, "v"), ((0, "v"),)),
        (2, "v"): leaning((2, "v"), ((1, "v"), (2, "k"))),
    },
}


@pytest.mark.parametrize("name", CODERS)
@pytest.mark.parametrize("mode", list(Mode))
def test_the_cache_is_that_of_transformers_bit_for_bit(mode: Mode, name: str) -> None:
    coders = CODERS[name]
    sequences = {n: tensors(seed, 22) for seed, n in enumerate("abc")}
    passes = [sequences]
    if mode is Mode.DECODE:
        steps = [{"a": 12}, {"a": 1, "b": 12}, {"c": 12, "a": 1}, *[{"b": 1, "a": 1, "c": 1}] * 8]
        steps = [*steps, {"b": 1, "c": 1}, {"c": 1, "b": 1}]
    else:
        steps = [{"a": 9, "b": 22}, {"c": 5, "a": 1}, {"a": 12, "c": 17}]
    plans = [steps]
    if mode is Mode.SNAPSHOT:
        # The second pass comes with other states, packed otherwise.
        passes.append({n: tensors(seed + 9, 22) for seed, n in enumerate("abc")})
        plans.append([{"b": 6, "a": 22}, {"b": 16, "c": 22}])
    prefix = PREFIX if mode is Mode.DECODE else 10**6
    engine = Engine(coders, mode, prefix)
    for index, (given, plan) in enumerate(zip(passes, plans, strict=True)):
        engine.begin(index)
        for step in plan:
            engine.step(given, step)
    engine.hook.commit()
    changed = False
    for request in sequences:
        counts = [[step[request] for step in plan if request in step] for plan in plans]
        held, hook = in_transformers(coders, mode, [p[request] for p in passes], counts, prefix)
        for key in KEYS:
            found = engine.cache[(*key, request)]
            assert torch.equal(found, held[key]), (key, request)
            changed |= not torch.equal(found, passes[-1][request][key][:, : found.shape[1]])
        if request == next(iter(plans[0][0])):
            assert stream_facts(engine.hook.engagement()) == stream_facts(hook.engagement())
    assert changed


def test_what_is_predicted_from_is_wanted_before_rope_and_kept_only_where_it_is_needed() -> None:
    coders = all_of(exact=((0, "k"), (0, "v"), (1, "k")))
    hook = Engine(coders, Mode.DECODE, PREFIX).hook
    assert [hook.placement_of(layer) for layer in range(LAYERS)] == ["pre_rope"] * 3
    del coders[2, "v"], coders[2, "k"]
    hook = Engine(coders, Mode.DECODE, PREFIX).hook
    assert [hook.placement_of(layer) for layer in range(LAYERS)] == [
        "pre_rope",
        "pre_rope",
        "post_rope",
    ]
    for mode, recorded in ((Mode.DECODE, True), (Mode.INFORWARD, False)):
        lanes = streams_of(all_of(exact=((0, "k"), (0, "v"))), LAYERS, mode)
        assert [lanes[0, s].recorded for s in "kv"] == [recorded] * 2
    lanes = streams_of(all_of(0, 4, exact=((0, "k"), (0, "v"))), LAYERS, Mode.DECODE)
    assert not lanes[0, "k"].settles


def test_tokens_that_were_not_coded_are_not_handed_over() -> None:
    engine = Engine(CODERS["all"], Mode.INFORWARD, 10**6)
    engine.step({"a": tensors(0, 9)}, {"a": 9})
    request = Request("a", 9, 1, 0, 10**6, 0)
    with pytest.raises(ValueError, match="not coded yet"):
        engine.hook._lanes[0, "k"].decoded([(request, 9, 10)])
