"""The tensors that a config promises, for the families whose layout assay knows by heart.

A family is a function from the config's dimensions to the pieces of one decoder layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from assay.checkpoint import blocks
from assay.checkpoint.blocks import Dims, Piece

Layer = Callable[[Dims, int], Iterator[Piece]]

_PRE_POST = ("input_layernorm", "post_attention_layernorm")
_SANDWICH = (*_PRE_POST, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def llama(d: Dims, layer: int) -> Iterator[Piece]:
    """Llama, SmolLM2, SmolLM3."""
    bias = d.flag("attention_bias")
    yield from blocks.attention(d, qkv_bias=bias, out_bias=bias)
    yield from blocks.gated_mlp(d, d.int_or("intermediate_size"), bias=d.flag("mlp_bias"))
    yield from blocks.norms(d, *_PRE_POST)


def mistral(d: Dims, layer: int) -> Iterator[Piece]:
    """Mistral: Llama without any bias."""
    yield from blocks.attention(d)
    yield from blocks.gated_mlp(d, d.int_or("intermediate_size"))
    yield from blocks.norms(d, *_PRE_POST)


def qwen2(d: Dims, layer: int) -> Iterator[Piece]:
    """Qwen2 and Qwen2.5, MiMo: biases on query, key and value."""
    yield from blocks.attention(d, qkv_bias=True)
    yield from blocks.gated_mlp(d, d.int_or("intermediate_size"))
    yield from blocks.norms(d, *_PRE_POST)


def qwen3(d: Dims, layer: int) -> Iterator[Piece]:
    """Qwen3: norms on query and key heads."""
    bias = d.flag("attention_bias")
    yield from blocks.attention(d, qkv_bias=bias, out_bias=bias, qk_norm="head")
    yield from blocks.gated_mlp(d, d.int_or("intermediate_size"))
    yield from blocks.norms(d, *_PRE_POST)


def qwen3_moe(d: Dims, layer: int) -> Iterator[Piece]:
    """Qwen3-MoE: routed experts every `decoder_sparse_step` layers but those of `mlp_only_layers`."""
    bias = d.flag("attention_bias")
    yield from blocks.attention(d, qkv_bias=bias, out_bias=bias, qk_norm="head")
    only = d.config.get("mlp_only_layers") or []
    step = max(d.int_or("decoder_sparse_step", 1), 1)
    if layer not in only and (layer + 1) % step == 0 and d.int_or("num_experts"):
        yield "mlp.gate.weight", (d.int_or("num_experts"), d.hidden)
        yield from blocks.experts(d, d.int_or("num_experts"), d.int_or("moe_intermediate_size"))
    else:
        yield from blocks.gated_mlp(d, d.int_or("intermediate_size"))
    yield from blocks.norms(d, *_PRE_POST)


def gemma(d: Dims, layer: int) -> Iterator[Piece]:
    """Gemma 1: Llama's layout with 1 + w norms."""
    yield from llama(d, layer)


def gemma2(d: Dims, layer: int) -> Iterator[Piece]:
    """Gemma 2: four norms a layer."""
    bias = d.flag("attention_bias")
    yield from blocks.attention(d, qkv_bias=bias, out_bias=bias)
    yield from blocks.gated_mlp(d, d.int_or("intermediate_size"))
    yield from blocks.norms(d, *_SANDWICH)


def gemma3(d: Dims, layer: int) -> Iterator[Piece]:
    """Gemma 3: Gemma 2 with norms on query and key heads."""
    bias = d.flag("attention_bias")
    yield from blocks.attention(d, qkv_bias=bias, out_bias=bias, qk_norm="head")
    yield from blocks.gated_mlp(d, d.int_or("intermediate_size"))
    yield from blocks.norms(d, *_SANDWICH)


def olmo2(d: Dims, layer: int) -> Iterator[Piece]:
    """OLMo 2: norms after attention and MLP, query and key normed over all heads."""
    bias = d.flag("attention_bias")
    yield from blocks.attention(d, qkv_bias=bias, out_bias=bias, qk_norm="full")
    yield from blocks.gated_mlp(d, d.int_or("intermediate_size"))
    yield from blocks.norms(d, "post_attention_layernorm", "post_feedforward_layernorm")


def mixtral(d: Dims, layer: int) -> Iterator[Piece]:
    """Mixtral as it is stored: experts w1, w2, w3 below block_sparse_moe."""
    count, width = d.int_or("num_local_experts"), d.int_or("intermediate_size")
    yield from blocks.attention(d)
    yield "block_sparse_moe.gate.weight", (count, d.hidden)
    for expert in range(count):
        yield f"block_sparse_moe.experts.{expert}.w1.weight", (width, d.hidden)
        yield f"block_sparse_moe.experts.{expert}.w2.weight", (d.hidden, width)
        yield f"block_sparse_moe.experts.{expert}.w3.weight", (width, d.hidden)
    yield from blocks.norms(d, *_PRE_POST)


def deepseek_v3(d: Dims, layer: int) -> Iterator[Piece]:
    """DeepSeek V3: latent attention, dense MLP in the first layers, routed experts after them."""
    yield from blocks.latent_attention(d)
    yield from _dense_then_moe(d, layer)
    yield from blocks.norms(d, *_PRE_POST)


def glm4_moe(d: Dims, layer: int) -> Iterator[Piece]:
    """GLM-4.5: grouped-query attention with DeepSeek's experts."""
    qk_norm = "head" if d.flag("use_qk_norm") else ""
    yield from blocks.attention(d, qkv_bias=d.flag("attention_bias"), qk_norm=qk_norm)
    yield from _dense_then_moe(d, layer)
    yield from blocks.norms(d, *_PRE_POST)


def _dense_then_moe(d: Dims, layer: int) -> Iterator[Piece]:
    if layer < d.int_or("first_k_dense_replace"):
        yield from blocks.gated_mlp(d, d.int_or("intermediate_size"))
    else:
        yield from blocks.grouped_moe(d)


def _linear_attention(d: Dims, split: bool) -> Iterator[Piece]:
    """Gated delta net: Qwen3-Next fuses its input projections two by two, Qwen3.5 keeps four."""
    key_heads, value_heads = d.int_or("linear_num_key_heads"), d.int_or("linear_num_value_heads")
    key = key_heads * d.int_or("linear_key_head_dim")
    value = value_heads * d.int_or("linear_value_head_dim")
    kernel = d.int_or("linear_conv_kernel_dim")
    if split:
        yield from blocks.linear("linear_attn.in_proj_qkv", 2 * key + value, d.hidden)
        yield from blocks.linear("linear_attn.in_proj_z", value, d.hidden)
        yield from blocks.linear("linear_attn.in_proj_b", value_heads, d.hidden)
        yield from blocks.linear("linear_attn.in_proj_a", value_heads, d.hidden)
    else:
        yield from blocks.linear("linear_attn.in_proj_qkvz", 2 * key + 2 * value, d.hidden)
        yield from blocks.linear("linear_attn.in_proj_ba", 2 * value_heads, d.hidden)
    yield "linear_attn.conv1d.weight", (2 * key + value, 1, kernel)
    yield "linear_attn.dt_bias", (value_heads,)
    yield "linear_attn.A_log", (value_heads,)
    yield "linear_attn.norm.weight", (d.int_or("linear_value_head_dim"),)
    yield from blocks.linear("linear_attn.out_proj", d.hidden, value)


def full_attention(d: Dims, layer: int) -> bool:
    """Whether a layer of a Qwen3-Next or Qwen3.5 model attends to all tokens (every fourth does by default)."""
    types = d.config.get("layer_types")
    if isinstance(types, list) and layer < len(types):
        return bool(types[layer] == "full_attention")
    return (layer + 1) % max(d.int_or("full_attention_interval", 4), 1) == 0


def qwen_hybrid_attention(d: Dims, layer: int, split: bool) -> Iterator[Piece]:
    """Attention of Qwen3-Next and Qwen3.5: gated full attention or a gated delta net."""
    if full_attention(d, layer):
        bias = d.flag("attention_bias")
        yield from blocks.attention(d, qkv_bias=bias, out_bias=bias, qk_norm="head", gated=True)
    else:
        yield from _linear_attention(d, split)


def qwen3_next(d: Dims, layer: int) -> Iterator[Piece]:
    """Qwen3-Next: hybrid attention, shared-expert MoE."""
    yield from qwen_hybrid_attention(d, layer, split=False)
    only = d.config.get("mlp_only_layers") or []
    if layer not in only and d.int_or("num_experts"):
        yield from blocks.shared_expert_moe(d)
    else:
        yield from blocks.gated_mlp(d, d.int_or("intermediate_size"))
    yield from blocks.norms(d, *_PRE_POST)


def qwen3_5(d: Dims, layer: int) -> Iterator[Piece]:
    """Qwen3.5 dense."""
    yield from qwen_hybrid_attention(d, layer, split=True)
    yield from blocks.gated_mlp(d, d.int_or("intermediate_size"))
    yield from blocks.norms(d, *_PRE_POST)


def qwen3_5_moe(d: Dims, layer: int) -> Iterator[Piece]:
    """Qwen3.5 MoE."""
    yield from qwen_hybrid_attention(d, layer, split=True)
    yield from blocks.shared_expert_moe(d)
    yield from blocks.norms(d, *_PRE_POST)


FAMILIES: dict[str, Layer] = {
    "llama": llama, "mistral": mistral, "qwen2": qwen2, "mimo": qwen2, "qwen3": qwen3, "qwen3_moe": qwen3_moe,
    "smollm3": llama, "gemma": gemma, "gemma2": gemma2, "gemma3_text": gemma3, "gemma3": gemma3, "olmo2": olmo2,
    "mixtral": mixtral, "deepseek_v3": deepseek_v3, "glm4_moe": glm4_moe, "qwen3_next": qwen3_next,
    "qwen3_5": qwen3_5, "qwen3_5_text": qwen3_5, "qwen3_5_moe": qwen3_5_moe, "qwen3_5_moe_text": qwen3_5_moe,
}  # fmt: skip
"""Layer layouts by `model_type`."""

TIED_BY_DEFAULT = frozenset(
    {"gemma", "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "cohere", "cohere2"}
)
"""Families whose output head is the embedding unless the config says otherwise."""
