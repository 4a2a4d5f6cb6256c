"""K and V of a layer coded in one go inside vLLM: the same as apart, and only where that is allowed."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from assay.lab.kv.codec import (
    BlockCoder,
    Samples,
    Site,
)
from assay.lab.kv.codecs.hadamard import HadamardCoder
from assay.lab.kv.spec import parse_recipe
from assay.lab.kv.vllm_stream import (
    in_one,
    joint_of,
)
from kv.test_kv_vllm_hook import HEADS, LAYERS, WIDTH, Context, bound, step


class Calls:
    """`HadamardCoder.round_trip` as it is where a kernel is at hand, by torch, and what was asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shapes: list[tuple[int, ...]] = []
        monkeypatch.setattr(HadamardCoder, "round_trip", lambda coder, x, dtype: self.made(coder, x, dtype))

    def made(self, coder: HadamardCoder, x: Any, dtype: Any) -> Any:
        self.shapes.append(tuple(x.shape))
        blocks = x.transpose(1, 2)
        return coder.dequantise(coder.quantise(blocks)).transpose(1, 2).to(dtype)


STEPS = [
    [("a", 0, 12), ("b", 0, 7)],
    [("a", 12, 1), ("b", 7, 5)],
    [("a", 13, 1), ("b", 12, 1)],
    [("a", 14, 1), ("b", 13, 1)],
]


@pytest.mark.parametrize(
    ("codec", "mode", "together"),
    [
        ("hadamard(bits=4)", "inforward", 4),
        ("prerope+hadamard(bits=3)", "inforward", 4),
        ("sinks(n=4)+hadamard(bits=4)", "inforward", 3),  # not in the step that has the sinks
        ("hadamard(bits=4)", "decode", 1),  # when both are past their prefixes of 12 tokens
        ("recent(n=2)+hadamard(bits=4)", "inforward", 0),
        ("k:hadamard(bits=5);v:hadamard(bits=4)", "inforward", 0),
        ("k:hadamard(bits=4)", "inforward", 0),
        ("hadamard(bits=4, norm=error)", "inforward", 4),
    ],
)
def test_together_is_the_same_as_apart(
    monkeypatch: pytest.MonkeyPatch, codec: str, mode: str, together: int
) -> None:
    apart, joint = [], []
    for found in (apart, joint):
        if found is joint:
            calls = Calls(monkeypatch)
        context = Context()
        hook = bound(context, codec, mode, measure_windows=0)
        for parts in STEPS:
            found.append(step(hook, context, *parts))
        found.append((hook.engagement().per_layer, [lane.coded for lane in hook._lanes.values()]))
    assert apart[-1] == joint[-1]
    for one, other in zip(apart[:-1], joint[:-1], strict=True):
        for layer in one:
            assert all(torch.equal(a, b) for a, b in zip(one[layer], other[layer], strict=True))
    # One call a layer where both are coded together, [2, tokens, heads, d].
    assert [shape[0] for shape in calls.shapes].count(2) == together * LAYERS


def test_windows_that_are_measured_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    context = Context()
    hook = bound(context, measure_windows=1)
    step(hook, context, ("a", 0, 20))
    assert all(shape[0] == 1 for shape in calls.shapes)
    hook.commit()
    assert len(hook.facts[0, "k"]) == 1
    calls.shapes.clear()
    step(hook, context, ("b", 0, 20))
    assert calls.shapes == [(2, 20, HEADS, WIDTH)] * LAYERS


def test_without_a_kernel_each_stream_is_coded_alone() -> None:
    coder = parse_recipe("hadamard").fit(Samples(Site("k", 0, LAYERS, HEADS, WIDTH)))
    joint = joint_of(coder, coder)
    k, v = torch.randn(2, 5, HEADS, WIDTH)
    assert joint is not None
    assert joint(k, v) is None
    assert joint_of(coder, None) is None
    assert not coder.coder.alike(BlockCoder(coder.site))


def test_slices_of_a_fused_projection_are_one_view() -> None:
    fused = torch.arange(7 * 10 * 4.0).view(7, 40)
    k, v = fused[:, 16:28].view(7, 3, 4), fused[:, 28:40].view(7, 3, 4)
    both = in_one(k, v)
    assert both is not None
    assert torch.equal(both, torch.stack([k, v]))
    assert both.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
    for other in (v.contiguous(), v.clone(memory_format=torch.preserve_format), v[:, :2], v.half()):
        assert in_one(k, other) is None
    assert in_one(v, k) is None
