"""The tensors that a config promises, for the families whose layout assay knows by heart.

A family is a function from the config's dimensions to the pieces of one decoder layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# -----------------------------------------------------------------------------
# Names and shapes of the pieces that decoder layers are built of, from a config alone.
#
# Every function yields (name below its parent, shape); a Linear weight is [out, in] as stored by PyTorch.

Piece = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Dims:
    """The dimensions of a language model's config; `int_or` reads one with a default."""

    config: Mapping[str, Any]

    def int_or(self, key: str, default: int = 0) -> int:
        """A natural number of the config, or the default if the key is missing, null or not a number."""
        value = self.config.get(key)
        return value if type(value) is int and value >= 0 else default

    def flag(self, key: str, default: bool = False) -> bool:
        """A switch of the config."""
        value = self.config.get(key)
        return value if isinstance(value, bool) else default

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.int_or("hidden_size")

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.int_or("num_attention_heads", 1)

    @property
    def kv_heads(self) -> int:
        """Key and value heads (grouped-query attention)."""
        return self.int_or("num_key_value_heads", self.heads)

    @property
    def head_dim(self) -> int:
        """Width of one head; hidden / heads unless the config names it."""
        return self.int_or("head_dim", self.hidden // max(self.heads, 1))

    @property
    def layers(self) -> int:
        """Decoder layers of the backbone."""
        return self.int_or("num_hidden_layers")

    @property
    def experts(self) -> int:
        """Routed experts of a layer, however the family calls them (0 for a dense model)."""
        return max(self.int_or(key) for key in ("n_routed_experts", "num_experts", "num_local_experts"))


def linear(name: str, out: int, width: int, bias: bool = False) -> Iterator[Piece]:
    """A Linear: its weight, and its bias if it has one."""
    yield f"{name}.weight", (out, width)
    if bias:
        yield f"{name}.bias", (out,)


def attention(
    d: Dims, *, qkv_bias: bool = False, out_bias: bool = False, qk_norm: str = "", gated: bool = False
) -> Iterator[Piece]:
    """Grouped-query attention; `qk_norm` is `head` (per head) or `full` (over all heads), `gated` doubles the query."""
    query, key = d.heads * d.head_dim, d.kv_heads * d.head_dim
    yield from linear("self_attn.q_proj", query * (2 if gated else 1), d.hidden, qkv_bias)
    yield from linear("self_attn.k_proj", key, d.hidden, qkv_bias)
    yield from linear("self_attn.v_proj", key, d.hidden, qkv_bias)
    yield from linear("self_attn.o_proj", d.hidden, query, out_bias)
    if qk_norm:
        yield "self_attn.q_norm.weight", (d.head_dim if qk_norm == "head" else query,)
        yield "self_attn.k_norm.weight", (d.head_dim if qk_norm == "head" else key,)


def latent_attention(d: Dims) -> Iterator[Piece]:
    """Multi-head latent attention (DeepSeek V2 and V3): low-rank query and key-value projections with norms."""
    rope, nope, value = d.int_or("qk_rope_head_dim"), d.int_or("qk_nope_head_dim"), d.int_or("v_head_dim")
    rank, query_rank = d.int_or("kv_lora_rank"), d.int_or("q_lora_rank")
    query = d.heads * (rope + nope)
    if query_rank:
        yield from linear("self_attn.q_a_proj", query_rank, d.hidden, d.flag("attention_bias"))
        yield "self_attn.q_a_layernorm.weight", (query_rank,)
        yield from linear("self_attn.q_b_proj", query, query_rank)
    else:
        yield from linear("self_attn.q_proj", query, d.hidden)
    yield from linear("self_attn.kv_a_proj_with_mqa", rank + rope, d.hidden, d.flag("attention_bias"))
    yield "self_attn.kv_a_layernorm.weight", (rank,)
    yield from linear("self_attn.kv_b_proj", d.heads * (nope + value), rank)
    yield from linear("self_attn.o_proj", d.hidden, d.heads * value, d.flag("attention_bias"))


def gated_mlp(d: Dims, width: int, parent: str = "mlp", bias: bool = False) -> Iterator[Piece]:
    """SwiGLU: gate, up and down projections."""
    yield from linear(f"{parent}.gate_proj", width, d.hidden, bias)
    yield from linear(f"{parent}.up_proj", width, d.hidden, bias)
    yield from linear(f"{parent}.down_proj", d.hidden, width, bias)


def experts(d: Dims, count: int, width: int, parent: str = "mlp.experts") -> Iterator[Piece]:
    """Routed experts, one gated MLP each."""
    for expert in range(count):
        yield from gated_mlp(d, width, f"{parent}.{expert}")


def fused_experts(d: Dims, count: int, width: int, parent: str = "mlp.experts") -> Iterator[Piece]:
    """The same experts as two three-dimensional tensors."""
    yield f"{parent}.gate_up_proj", (count, 2 * width, d.hidden)
    yield f"{parent}.down_proj", (count, d.hidden, width)


def norms(d: Dims, *names: str) -> Iterator[Piece]:
    """RMS norms over the residual stream."""
    for name in names:
        yield f"{name}.weight", (d.hidden,)


def shared_expert_moe(d: Dims) -> Iterator[Piece]:
    """Qwen2-MoE, Qwen3-Next and Qwen3.5-MoE: router, routed experts, one shared expert behind a gate."""
    count, width = d.int_or("num_experts"), d.int_or("moe_intermediate_size")
    yield "mlp.gate.weight", (count, d.hidden)
    yield from experts(d, count, width)
    if shared := d.int_or("shared_expert_intermediate_size"):
        yield from gated_mlp(d, shared, "mlp.shared_expert")
        yield "mlp.shared_expert_gate.weight", (1, d.hidden)


def grouped_moe(d: Dims) -> Iterator[Piece]:
    """DeepSeek V3 and GLM-4.5: router with a correction bias, routed and shared experts."""
    count, width = d.int_or("n_routed_experts"), d.int_or("moe_intermediate_size")
    yield "mlp.gate.weight", (count, d.hidden)
    yield "mlp.gate.e_score_correction_bias", (count,)
    yield from experts(d, count, width)
    if shared := d.int_or("n_shared_experts"):
        yield from gated_mlp(d, shared * width, "mlp.shared_experts")


def with_fused_experts(pieces: Iterator[Piece], d: Dims, count: int, width: int) -> Iterator[Piece]:
    """`pieces` with the single experts replaced by their fused form (how transformers 5 and Qwen3.5 store them)."""
    for name, shape in pieces:
        if ".experts.0.gate_proj." in name:
            yield from fused_experts(d, count, width)
        elif ".experts." not in name:
            yield name, shape


# -----------------------------------------------------------------------------

Layer = Callable[[Dims, int], Iterator[Piece]]

_PRE_POST = ("input_layernorm", "post_attention_layernorm")
_SANDWICH = (*_PRE_POST, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def llama(d: Dims, layer: int) -> Iterator[Piece]:
    """Llama, SmolLM2, SmolLM3."""
    bias = d.flag("attention_bias")
    yield from attention(d, qkv_bias=bias, out_bias=bias)
    yield from gated_mlp(d, d.int_or("intermediate_size"), bias=d.flag("mlp_bias"))
    yield from norms(d, *_PRE_POST)


def mistral(d: Dims, layer: int) -> Iterator[Piece]:
    """Mistral: Llama without any bias."""
    yield from attention(d)
    yield from gated_mlp(d, d.int_or("intermediate_size"))
    yield from norms(d, *_PRE_POST)


def qwen2(d: Dims, layer: int) -> Iterator[Piece]:
    """Qwen2 and Qwen2.5, MiMo: biases on query, key and value."""
    yield from attention(d, qkv_bias=True)
    yield from gated_mlp(d, d.int_or("intermediate_size"))
    yield from norms(d, *_PRE_POST)


def qwen3(d: Dims, layer: int) -> Iterator[Piece]:
    """Qwen3: norms on query and key heads."""
    bias = d.flag("attention_bias")
    yield from attention(d, qkv_bias=bias, out_bias=bias, qk_norm="head")
    yield from gated_mlp(d, d.int_or("intermediate_size"))
    yield from norms(d, *_PRE_POST)


def qwen3_moe(d: Dims, layer: int) -> Iterator[Piece]:
    """Qwen3-MoE: routed experts every `decoder_sparse_step` layers but those of `mlp_only_layers`."""
    bias = d.flag("attention_bias")
    yield from attention(d, qkv_bias=bias, out_bias=bias, qk_norm="head")
    only = d.config.get("mlp_only_layers") or []
    step = max(d.int_or("decoder_sparse_step", 1), 1)
    if layer not in only and (layer + 1) % step == 0 and d.int_or("num_experts"):
        yield "mlp.gate.weight", (d.int_or("num_experts"), d.hidden)
        yield from experts(d, d.int_or("num_experts"), d.int_or("moe_intermediate_size"))
    else:
        yield from gated_mlp(d, d.int_or("intermediate_size"))
    yield from norms(d, *_PRE_POST)


def gemma(d: Dims, layer: int) -> Iterator[Piece]:
    """Gemma 1: Llama's layout with 1 + w norms."""
    yield from llama(d, layer)


def gemma2(d: Dims, layer: int) -> Iterator[Piece]:
    """Gemma 2: four norms a layer."""
    bias = d.flag("attention_bias")
    yield from attention(d, qkv_bias=bias, out_bias=bias)
    yield from gated_mlp(d, d.int_or("intermediate_size"))
    yield from norms(d, *_SANDWICH)


def gemma3(d: Dims, layer: int) -> Iterator[Piece]:
    """Gemma 3: Gemma 2 with norms on query and key heads."""
    bias = d.flag("attention_bias")
    yield from attention(d, qkv_bias=bias, out_bias=bias, qk_norm="head")
    yield from gated_mlp(d, d.int_or("intermediate_size"))
    yield from norms(d, *_SANDWICH)


def olmo2(d: Dims, layer: int) -> Iterator[Piece]:
    """OLMo 2: norms after attention and MLP, query and key normed over all heads."""
    bias = d.flag("attention_bias")
    yield from attention(d, qkv_bias=bias, out_bias=bias, qk_norm="full")
    yield from gated_mlp(d, d.int_or("intermediate_size"))
    yield from norms(d, "post_attention_layernorm", "post_feedforward_layernorm")


def mixtral(d: Dims, layer: int) -> Iterator[Piece]:
    """Mixtral as it is stored: experts w1, w2, w3 below block_sparse_moe."""
    count, width = d.int_or("num_local_experts"), d.int_or("intermediate_size")
    yield from attention(d)
    yield "block_sparse_moe.gate.weight", (count, d.hidden)
    for expert in range(count):
        yield f"block_sparse_moe.experts.{expert}.w1.weight", (width, d.hidden)
        yield f"block_sparse_moe.experts.{expert}.w2.weight", (d.hidden, width)
        yield f"block_sparse_moe.experts.{expert}.w3.weight", (width, d.hidden)
    yield from norms(d, *_PRE_POST)


def deepseek_v3(d: Dims, layer: int) -> Iterator[Piece]:
    """DeepSeek V3: latent attention, dense MLP in the first layers, routed experts after them."""
    yield from latent_attention(d)
    yield from _dense_then_moe(d, layer)
    yield from norms(d, *_PRE_POST)


def glm4_moe(d: Dims, layer: int) -> Iterator[Piece]:
    """GLM-4.5: grouped-query attention with DeepSeek's experts."""
    qk_norm = "head" if d.flag("use_qk_norm") else ""
    yield from attention(d, qkv_bias=d.flag("attention_bias"), qk_norm=qk_norm)
    yield from _dense_then_moe(d, layer)
    yield from norms(d, *_PRE_POST)


def _dense_then_moe(d: Dims, layer: int) -> Iterator[Piece]:
    if layer < d.int_or("first_k_dense_replace"):
        yield from gated_mlp(d, d.int_or("intermediate_size"))
    else:
        yield from grouped_moe(d)


def _linear_attention(d: Dims, split: bool) -> Iterator[Piece]:
    """Gated delta net: Qwen3-Next fuses its input projections two by two, Qwen3.5 keeps four."""
    key_heads, value_heads = d.int_or("linear_num_key_heads"), d.int_or("linear_num_value_heads")
    key = key_heads * d.int_or("linear_key_head_dim")
    value = value_heads * d.int_or("linear_value_head_dim")
    kernel = d.int_or("linear_conv_kernel_dim")
    if split:
        yield from linear("linear_attn.in_proj_qkv", 2 * key + value, d.hidden)
        yield from linear("linear_attn.in_proj_z", value, d.hidden)
        yield from linear("linear_attn.in_proj_b", value_heads, d.hidden)
        yield from linear("linear_attn.in_proj_a", value_heads, d.hidden)
    else:
        yield from linear("linear_attn.in_proj_qkvz", 2 * key + 2 * value, d.hidden)
        yield from linear("linear_attn.in_proj_ba", 2 * value_heads, d.hidden)
    yield "linear_attn.conv1d.weight", (2 * key + value, 1, kernel)
    yield "linear_attn.dt_bias", (value_heads,)
    yield "linear_attn.A_log", (value_heads,)
    yield "linear_attn.norm.weight", (d.int_or("linear_value_head_dim"),)
    yield from linear("linear_attn.out_proj", d.hidden, value)


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
        yield from attention(d, qkv_bias=bias, out_bias=bias, qk_norm="head", gated=True)
    else:
        yield from _linear_attention(d, split)


def qwen3_next(d: Dims, layer: int) -> Iterator[Piece]:
    """Qwen3-Next: hybrid attention, shared-expert MoE."""
    yield from qwen_hybrid_attention(d, layer, split=False)
    only = d.config.get("mlp_only_layers") or []
    if layer not in only and d.int_or("num_experts"):
        yield from shared_expert_moe(d)
    else:
        yield from gated_mlp(d, d.int_or("intermediate_size"))
    yield from norms(d, *_PRE_POST)


def qwen3_5(d: Dims, layer: int) -> Iterator[Piece]:
    """Qwen3.5 dense."""
    yield from qwen_hybrid_attention(d, layer, split=True)
    yield from gated_mlp(d, d.int_or("intermediate_size"))
    yield from norms(d, *_PRE_POST)


def qwen3_5_moe(d: Dims, layer: int) -> Iterator[Piece]:
    """Qwen3.5 MoE."""
    yield from qwen_hybrid_attention(d, layer, split=True)
    yield from shared_expert_moe(d)
    yield from norms(d, *_PRE_POST)


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
