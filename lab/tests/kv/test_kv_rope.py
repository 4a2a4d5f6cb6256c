"""Rotations against what models of transformers do to their own keys."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from assay_lab.kv.rotary import Rotary, Rotation

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


def llama(**more: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **more))


def models() -> dict[str, Any]:
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "rope_theta": 10000.0,
    }
    return {
        "llama": llama(),
        "llama yarn": llama(rope_parameters=yarn),
        "qwen2": transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL)),
        "qwen3": transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, head_dim=32)),
        "gemma3": transformers.Gemma3ForCausalLM(
            transformers.Gemma3TextConfig(
                **SMALL, head_dim=32, sliding_window=16, sliding_window_pattern=2
            )
        ),
    }


@pytest.mark.parametrize("name", list(models()))
def test_keys_in_the_cache_come_back_as_they_were_before(name: str) -> None:
    """The projection (and norm, where there is one) put out by each layer, against the cached key
    turned back.
    """
    model = models()[name].eval()
    before: dict[int, Any] = {}
    for index, layer in enumerate(model.get_decoder().layers):
        attention = layer.self_attn
        module = getattr(attention, "k_norm", None) or attention.k_proj

        def keep(_: Any, __: Any, output: Any, index: int = index) -> None:
            before[index] = output

        module.register_forward_hook(keep)
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.arange(1, 13).unsqueeze(0), past_key_values=cache)
    rotary = Rotary(model, 32)
    for index, layer in enumerate(cache.layers):
        keys = layer.keys[0]  # [heads, tokens, head_dim]
        raw = before[index][0]
        raw = raw.reshape(12, 2, -1).transpose(0, 1) if raw.shape[0] == 12 else raw
        rotation = rotary.at(index, 0, 12)
        torch.testing.assert_close(rotation.remove(keys), raw.float(), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(
            rotation.apply(rotation.remove(keys)), keys.float(), atol=1e-5, rtol=1e-4
        )


def test_channels_that_are_not_rotated_stay() -> None:
    angle = torch.rand(5, 1).expand(5, 4)
    rotation = Rotation(angle.cos(), angle.sin())
    keys = torch.randn(2, 5, 10)
    assert torch.equal(rotation.apply(keys)[..., 4:], keys[..., 4:])
    torch.testing.assert_close(rotation.remove(rotation.apply(keys)), keys)
