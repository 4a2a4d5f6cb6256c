"""The codec's hook of vLLM on a stand-in: what it refuses, what it counts, what it measures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from assay.engines.scoring import load_hook
from assay.engines.vllm.steps import Request
from assay.errors import AssayError
from assay_lab.kv.cache_bytes import measured_bytes, stream_facts
from assay_lab.kv.hook_plan import hook_spec

LAYERS, HEADS, WIDTH, LENGTH = 3, 2, 16, 21


class LlamaForCausalLM:
    """Has the configuration only."""

    config = transformers.LlamaConfig(
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        head_dim=WIDTH,
    )


class Context:
    """The engine's side: the requests of a step as they are set, and a note of what is
    rewritten.
    """

    def __init__(self, serving: bool = False, **attention: Any) -> None:
        self.steps = SimpleNamespace(
            requests=None, serving=serving, alive=lambda: frozenset(self.living)
        )
        self.living: set[str] = set()
        module = SimpleNamespace(num_kv_heads=HEADS, attn=SimpleNamespace(**attention))
        self.attentions = dict.fromkeys(range(LAYERS), module)
        self.share = (0, 1)
        self.rewritten: list[tuple[int, list[Any], bool]] = []

    def rewrite(self, layer: int, changes: list[Any], *, rotate: bool) -> None:
        if changes:
            self.rewritten.append((layer, changes, rotate))


def bound(
    context: Context, codec: str = "hadamard(bits=4)", mode: str = "inforward", **more: Any
) -> Any:
    hook = load_hook(hook_spec("vllm:m", codec=codec, mode=mode, length=LENGTH, **more))
    hook.bind(LlamaForCausalLM(), context)
    return hook


def step(
    hook: Any, context: Context, *parts: tuple[str, int, int], skip: int | None = None
) -> dict[int, Any]:
    """One step of requests (key, start, count) through all layers but one."""
    requests, offset = [], 0
    for row, (key, start, count) in enumerate(parts):
        requests.append(Request(key, start, count, offset, 12, row))
        offset += count
    context.steps.requests = tuple(requests)
    generator = torch.Generator().manual_seed(offset)
    found = {}
    for layer in range(LAYERS):
        if layer != skip:
            k, v = torch.randn(2, offset, HEADS, WIDTH, generator=generator).bfloat16()
            found[layer] = (k, v, *hook.on_kv(layer, k, v, None))
    context.steps.requests = None
    return found


def test_it_codes_in_the_models_type_and_counts_by_layer() -> None:
    context = Context()
    hook = bound(context, skip_layers=[1], measure_windows=1)
    found = step(hook, context, ("a", 0, 20), ("b", 0, 20))
    for layer, (k, v, new_k, new_v) in found.items():
        for old, new in ((k, new_k), (v, new_v)):
            assert new.dtype == torch.bfloat16
            assert torch.equal(old, new) is (layer == 1)
            assert float((old - new).norm() / old.norm()) < 0.15
    hook.commit()
    engagement = hook.engagement()
    assert engagement.per_layer == {0: 2, 2: 2}
    facts = stream_facts(engagement)
    assert {len(f) for f in facts.values()} == {1}
    assert facts[1, "k"][0].error == 0
    # What was measured is the error of what attention got, of the first window.
    k, _, new_k, _ = found[0]
    assert facts[0, "k"][0].error == pytest.approx(
        float((k - new_k)[:20].float().square().sum()), rel=0.05
    )
    assert measured_bytes(engagement, 20).windows == 1
    step(hook, context, ("c", 0, 20))
    hook.commit()
    assert len(stream_facts(hook.engagement())[0, "k"]) == 1


def test_outside_a_step_nothing_is_coded() -> None:
    context = Context()
    hook = bound(context)
    k = torch.randn(5, HEADS, WIDTH)
    assert hook.on_kv(0, k, k, None)[0] is k
    assert hook.engagement().fires == 0


def test_a_layer_that_did_not_code_is_an_error() -> None:
    context = Context()
    hook = bound(context)
    step(hook, context, ("a", 0, 20), skip=2)
    with pytest.raises(AssayError, match="not all layers coded"):
        hook.commit()
    # Another number of sinks is no other layer.
    hook = bound(context, layer_codecs={0: "sinks(n=4)+hadamard"})
    step(hook, context, ("a", 0, 20))
    hook.commit()


def test_keys_are_placed_by_layer() -> None:
    hook = bound(Context(), "prerope+hadamard", layer_codecs={1: "fp8"}, skip_layers=[2])
    assert [hook.placement_of(layer) for layer in range(LAYERS)] == [
        "pre_rope",
        "post_rope",
        "post_rope",
    ]


def test_decode_rewrites_the_prefix_before_the_next_token() -> None:
    context = Context()
    hook = bound(context, "k:prerope+sinks(n=2)+hadamard;v:recent(n=3)+hadamard", "decode")
    clean = step(hook, context, ("a", 0, 12), ("b", 0, 12))
    assert all(
        torch.equal(k, new_k) and torch.equal(v, new_v) for k, v, new_k, new_v in clean.values()
    )
    assert not context.rewritten
    step(hook, context, ("a", 12, 1), ("b", 12, 1))
    assert [layer for layer, *_ in context.rewritten] == [0, 1, 2]
    layer, changes, rotate = context.rewritten[1]
    assert rotate
    k, v, *_ = clean[layer]
    for number, change in enumerate(changes):
        # K from the sinks on, V from the start; a slot takes both, so sinks and recent tokens go
        # back as they were.
        assert (change.request.key, change.lo, len(change.k), len(change.v)) == (
            "ab"[number],
            0,
            12,
            12,
        )
        rows = slice(12 * number, 12 * number + 12)
        exact_k, exact_v = (
            (change.k == k[rows]).all(-1).all(-1),
            (change.v == v[rows]).all(-1).all(-1),
        )
        assert exact_k.tolist() == [True] * 2 + [False] * 10
        assert exact_v.tolist() == [False] * 9 + [True] * 3


def test_a_server_forgets_requests_that_are_gone() -> None:
    context = Context(serving=True)
    hook = bound(context, "int(bits=4, axis=channel, group=8)", streams="k")
    context.living = {"a", "b"}
    step(hook, context, ("a", 0, 5), ("b", 0, 5))
    context.living = {"b"}
    step(hook, context, ("b", 5, 1))
    assert list(hook._lanes[0, "k"].histories) == ["b"]
    assert hook.facts == {}


@pytest.mark.parametrize(
    ("context", "mode", "said"),
    [
        (Context(serving=True), "snapshot", "every request twice"),
        (Context(sliding_window=128), "inforward", "sliding-window"),
        (Context(kv_sharing_target_layer_name="x"), "inforward", "another layer's cache"),
    ],
)
def test_what_cannot_work_is_refused(context: Context, mode: str, said: str) -> None:
    with pytest.raises(AssayError, match=said):
        bound(context, mode=mode)


def test_a_part_of_the_heads_and_another_shape_are_refused() -> None:
    context = Context()
    context.attentions[1].num_kv_heads = 1
    with pytest.raises(AssayError, match="1 of 2 KV heads"):
        bound(context)
    context = Context()
    hook = bound(context)
    context.steps.requests = (Request("a", 0, 3, 0, 12, 0),)
    wide = torch.zeros(3, HEADS, 2 * WIDTH)
    with pytest.raises(AssayError, match="K of shape"):
        hook.on_kv(0, wide, wide, None)
