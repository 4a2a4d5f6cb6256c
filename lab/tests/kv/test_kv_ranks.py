"""Codecs where ranks share the KV heads: each rank's heads become what they become together, or the
codec is refused.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from test_kv_vllm_hook import HEADS, LAYERS, LENGTH, WIDTH, Context, LlamaForCausalLM

from assay.engines.scoring import load_hook
from assay.engines.vllm.steps import Request
from assay.errors import UsageError
from assay_lab.kv.cache_bytes import stream_facts
from assay_lab.kv.cache_shape import CacheShape
from assay_lab.kv.calibration import Calibration
from assay_lab.kv.hook_plan import check_ranks, hook_spec
from assay_lab.kv.layer_coders import LayerCoders
from assay_lab.kv.spec import CODECS, WRAPPERS, codec_type, parse_spec, wrapper_type

SHAPE = CacheShape(2, 4, 8, 32, (None, None), "LlamaForCausalLM")
SINGLE = [
    "identity",
    "bf16",
    "fp8",
    "fp8(scale=head)",
    "int(bits=4)",
    "hadamard(bits=4)",
    "lattice",
    "kakeya(bits=3, block=64)",
    "sinks(n=4)+recent(n=8)+mean+hadamard(bits=5)",
    "qprecond+int(bits=4)",
    "outliers(n=2)+int(bits=4)",
    "mean(of=block)+int(bits=4)",
]
JOINT = ["pca", "noise", "fp8(scale=tensor)", "kakeya(basis=shared)", "kakeya(levels=calibrated)"]


def calibration() -> Calibration:
    rng = torch.Generator().manual_seed(1)
    tensors = {"positions": torch.arange(400, dtype=torch.int32)}
    for layer in range(2):
        for stream in "kv":
            scale = torch.tensor([1.0, 3.0, 0.2, 8.0])[:, None, None]
            tensors[f"layer_{layer}_{stream}"] = torch.randn(4, 400, 32, generator=rng) * scale
        root = torch.randn(4, 32, 32, generator=rng)
        tensors[f"layer_{layer}_sigma_rope"] = root @ root.mT + torch.eye(32)
        tensors[f"layer_{layer}_gram"] = tensors[f"layer_{layer}_sigma_rope"]
    return Calibration(tensors, {})


def rebuilt(codec: str, ranks: int) -> torch.Tensor:
    """Values of layer 1 after the round trip, by ranks that have their heads and their part of the
    calibration.
    """
    x = torch.randn(4, 192, 32, generator=torch.Generator().manual_seed(2))
    x *= torch.tensor([1.0, 3.0, 0.2, 8.0])[:, None, None]
    parts = []
    for rank, own in enumerate(x.chunk(ranks)):
        layer_coders = LayerCoders(SHAPE.of_rank(ranks), None, calibration().of_rank(rank, ranks))
        parts.append(layer_coders.fit(parse_spec(codec).v, 1, "v").reconstruct(own))  # type: ignore[arg-type]
    return torch.cat(parts)


@pytest.mark.parametrize("codec", SINGLE)
def test_a_codec_of_single_heads_gives_the_same_on_ranks(codec: str) -> None:
    check_ranks("vllm:m?tensor_parallel=2", codec)
    whole, shared = rebuilt(codec, 1), rebuilt(codec, 2)
    torch.testing.assert_close(shared, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("codec", JOINT)
def test_what_joins_heads_is_refused_in_one_line(codec: str) -> None:
    with pytest.raises(
        UsageError, match="codes all KV heads of a layer together, and each of 4 ranks"
    ) as caught:
        hook_spec("vllm:m?tensor_parallel=4", codec=f"sinks(n=4)+{codec}", mode="decode", length=9)
    assert "\n" not in caught.value.message and "single heads" in str(caught.value.remedy)
    check_ranks("vllm:m", codec)
    check_ranks("vllm:m?pipeline_parallel=2", codec)


def test_a_prediction_across_stages_is_refused() -> None:
    with pytest.raises(UsageError, match="predicts from the layer before, which another of 2"):
        check_ranks("vllm:m?pipeline_parallel=2", "prerope+pca(predict=below)")
    check_ranks("vllm:m?pipeline_parallel=2", "prerope+pca(predict=k)")


def test_every_codec_says_what_it_joins() -> None:
    said = {name: codec_type(name).single_heads for name in CODECS}
    assert [name for name, single in said.items() if not single] == ["pca", "noise"]
    assert all(wrapper_type(name).single_heads for name in WRAPPERS)


def engagement(share: tuple[int, int], layers: range = range(LAYERS)) -> Any:
    """What a hook counts on a rank that has a share of the heads, and some of the layers."""
    context: Any = Context()
    context.share = share
    context.attentions = {
        n: SimpleNamespace(num_kv_heads=HEADS // share[1], attn=SimpleNamespace()) for n in layers
    }
    settings = {
        "codec": "hadamard(bits=4)",
        "mode": "inforward",
        "length": LENGTH,
        "measure_windows": 1,
    }
    hook = load_hook(hook_spec("vllm:m", **settings))
    hook.bind(LlamaForCausalLM(), context)
    hook.check_ranks(2, 2)
    context.steps.requests = (Request("w", 0, LENGTH - 1, 0, LENGTH, 0),)
    x = torch.randn(
        LAYERS, LENGTH - 1, HEADS, WIDTH, generator=torch.Generator().manual_seed(4)
    ).bfloat16()
    own = x.chunk(share[1], 2)[share[0]]
    for layer in layers:
        hook.on_kv(layer, own[layer], own[layer] + 1, torch.arange(LENGTH - 1))
    hook.commit()
    return type(hook), hook.engagement()


@pytest.mark.parametrize(
    "parts",
    [
        [((0, 2), range(LAYERS)), ((1, 2), range(LAYERS))],
        [((0, 1), range(1)), ((0, 1), range(1, LAYERS))],
    ],
)
def test_ranks_and_stages_add_up_to_one_engine(parts: list[Any]) -> None:
    kind, whole = engagement((0, 1))
    merged = kind.merged([engagement(*part)[1] for part in parts])
    assert (merged.fires, merged.per_layer) == (whole.fires, whole.per_layer)
    one, other = stream_facts(whole), stream_facts(merged)
    assert one.keys() == other.keys()
    for key, found in one.items():
        for mine, theirs in zip(found, other[key], strict=True):
            assert theirs.exact == mine.exact
            assert theirs.error == pytest.approx(mine.error, rel=1e-5)
            assert mine.stored <= theirs.stored <= mine.stored + 128  # a second header
    assert merged.notes["kv"]["cache"] == whole.notes["kv"]["cache"]
