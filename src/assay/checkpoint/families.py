"""The layer layouts that assay knows by heart, by `model_type`.

A family is a function from the config's dimensions and a layer's index to the pieces of that
decoder
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from assay.checkpoint.pieces import (
    Dims,
    Piece,
    attention,
    delta_net,
    experts,
    gated_mlp,
    latent_attention,
    norms,
)

Layer = Callable[[Dims, int], Iterator[Piece]]


def _attending(
    qk_norm: str = "", qkv_bias: bool | None = None, out_bias: bool | None = None
) -> Layer:
    """Grouped-query attention whose biases follow `attention_bias` unless the family fixes them."""

    def part(d: Dims, layer: int) -> Iterator[Piece]:
        own = d.flag("attention_bias")
        qkv, out = own if qkv_bias is None else qkv_bias, own if out_bias is None else out_bias
        return attention(d, qkv_bias=qkv, out_bias=out, qk_norm=qk_norm)

    return part


def _glm_attention(d: Dims, layer: int) -> Iterator[Piece]:
    return attention(
        d, qkv_bias=d.flag("attention_bias"), qk_norm="head" if d.flag("use_qk_norm") else ""
    )


def full_attention(d: Dims, layer: int) -> bool:
    """Whether a layer of a Qwen3-Next or Qwen3.5 model attends to all tokens (every fourth does by
    default).
    """
    types = d.config.get("layer_types")
    if types and layer < len(types):
        return bool(types[layer] == "full_attention")
    return (layer + 1) % d.get("full_attention_interval", 4) == 0


def _hybrid_attention(split: bool) -> Layer:
    """Qwen3-Next and Qwen3.5: gated full attention or a gated delta net."""

    def part(d: Dims, layer: int) -> Iterator[Piece]:
        if not full_attention(d, layer):
            return delta_net(d, split)
        bias = d.flag("attention_bias")
        return attention(d, qkv_bias=bias, out_bias=bias, qk_norm="head", gated=True)

    return part


def _dense(d: Dims, layer: int) -> Iterator[Piece]:
    return gated_mlp(d, d["intermediate_size"], bias=d.flag("mlp_bias"))


def _sparse(d: Dims, layer: int) -> Iterator[Piece]:
    """Qwen3-MoE: routed experts every `decoder_sparse_step` layers but those of
    `mlp_only_layers`.
    """
    only, step = d.config.get("mlp_only_layers") or (), max(d.get("decoder_sparse_step", 1), 1)
    if layer in only or (layer + 1) % step or not d.experts:
        return gated_mlp(d, d["intermediate_size"])
    return experts(d, d.experts)


def shared_expert_moe(d: Dims, layer: int) -> Iterator[Piece]:
    """Qwen3-Next and Qwen3.5-MoE: routed experts, and one shared expert behind a gate."""
    if layer in (d.config.get("mlp_only_layers") or ()) or not d.experts:
        yield from gated_mlp(d, d["intermediate_size"])
        return
    yield from experts(d, d.experts)
    if shared := d.get("shared_expert_intermediate_size"):
        yield from gated_mlp(d, shared, "mlp.shared_expert")
        yield "mlp.shared_expert_gate.weight", (1, d.hidden)


def _mixtral_moe(d: Dims, layer: int) -> Iterator[Piece]:
    """Mixtral as it is stored: experts w1, w2, w3 below block_sparse_moe."""
    count, width = d["num_local_experts"], d["intermediate_size"]
    yield "block_sparse_moe.gate.weight", (count, d.hidden)
    for expert in range(count):
        yield f"block_sparse_moe.experts.{expert}.w1.weight", (width, d.hidden)
        yield f"block_sparse_moe.experts.{expert}.w2.weight", (d.hidden, width)
        yield f"block_sparse_moe.experts.{expert}.w3.weight", (width, d.hidden)


def _grouped_moe(d: Dims, layer: int) -> Iterator[Piece]:
    """DeepSeek V3 and GLM-4.5: a dense MLP in the first layers, then routed and shared experts."""
    if layer < d.get("first_k_dense_replace"):
        yield from gated_mlp(d, d["intermediate_size"])
        return
    count = d["n_routed_experts"]
    yield from experts(d, count)
    yield "mlp.gate.e_score_correction_bias", (count,)
    if shared := d.get("n_shared_experts"):
        yield from gated_mlp(d, shared * d["moe_intermediate_size"], "mlp.shared_experts")


_PRE_POST = ("input_layernorm", "post_attention_layernorm")

_SANDWICH = (*_PRE_POST, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def _decoder(attending: Layer, mlp: Layer, names: tuple[str, ...] = _PRE_POST) -> Layer:
    def layer(d: Dims, index: int) -> Iterator[Piece]:
        yield from attending(d, index)
        yield from mlp(d, index)
        yield from norms(d, *names)

    return layer


_LLAMA = _decoder(_attending(), _dense)

_QWEN2 = _decoder(_attending(qkv_bias=True, out_bias=False), _dense)

_GEMMA3 = _decoder(_attending("head"), _dense, _SANDWICH)

_QWEN3_5 = _decoder(_hybrid_attention(split=True), _dense)

_QWEN3_5_MOE = _decoder(_hybrid_attention(split=True), shared_expert_moe)

FAMILIES: dict[str, Layer] = {
    "llama": _LLAMA,
    "smollm3": _LLAMA,
    "gemma": _LLAMA,
    "qwen2": _QWEN2,
    "mimo": _QWEN2,
    "mistral": _decoder(_attending(qkv_bias=False, out_bias=False), _dense),
    "qwen3": _decoder(_attending("head"), _dense),
    "qwen3_moe": _decoder(_attending("head"), _sparse),
    "gemma2": _decoder(_attending(), _dense, _SANDWICH),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "olmo2": _decoder(
        _attending("full"), _dense, ("post_attention_layernorm", "post_feedforward_layernorm")
    ),
    "mixtral": _decoder(_attending(qkv_bias=False, out_bias=False), _mixtral_moe),
    "deepseek_v3": _decoder(latent_attention, _grouped_moe),
    "glm4_moe": _decoder(_glm_attention, _grouped_moe),
    "qwen3_next": _decoder(_hybrid_attention(split=False), shared_expert_moe),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5_MOE,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
}
"""Layer layouts by `model_type`."""

TIED_BY_DEFAULT = frozenset(
    {"gemma", "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "cohere", "cohere2"}
)
"""Families whose output head is the embedding unless the config says otherwise."""
