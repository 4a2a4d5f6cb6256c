"""The tensors that a config promises, for the families whose layout assay knows by heart.

A family is a function from the config's dimensions and a layer's index to the pieces of that decoder layer: names
below the layer, and shapes. A Linear weight is [out, in] as PyTorch stores it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Piece = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Dims:
    """The dimensions of a language model's config. `d[key]` must be given: what was not stands in `lacking`."""

    config: Mapping[str, Any]
    lacking: set[str] = field(default_factory=set)

    def __getitem__(self, key: str) -> int:
        value = self.config.get(key)
        if type(value) is int:
            return value
        self.lacking.add(key)
        return 0

    def get(self, key: str, default: int = 0) -> int:
        """A whole number of the config, or the default if the key is not given."""
        value = self.config.get(key)
        return value if type(value) is int else default

    def flag(self, key: str) -> bool:
        """A switch of the config, off if it is not given."""
        return self.config.get(key) is True

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self["hidden_size"]

    @property
    def heads(self) -> int:
        """Query heads."""
        return self["num_attention_heads"]

    @property
    def kv_heads(self) -> int:
        """Key and value heads (grouped-query attention)."""
        return self.get("num_key_value_heads", self.heads)

    @property
    def head_dim(self) -> int:
        """Width of one head; hidden / heads unless the config names it."""
        return self.get("head_dim") or self.hidden // max(self.heads, 1)

    @property
    def layers(self) -> int:
        """Decoder layers of the backbone."""
        return self["num_hidden_layers"]

    @property
    def experts(self) -> int:
        """Routed experts of a layer, however the family calls them (0 for a dense model)."""
        return max(self.get(key) for key in ("n_routed_experts", "num_experts", "num_local_experts"))


# -----------------------------------------------------------------------------
# The pieces that decoder layers are built of.


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


def latent_attention(d: Dims, layer: int = 0) -> Iterator[Piece]:
    """Multi-head latent attention (DeepSeek V2 and V3): low-rank query and key-value projections with norms."""
    rope, nope, value, rank = d["qk_rope_head_dim"], d["qk_nope_head_dim"], d["v_head_dim"], d["kv_lora_rank"]
    query, bias = d.heads * (rope + nope), d.flag("attention_bias")
    if query_rank := d.get("q_lora_rank"):
        yield from linear("self_attn.q_a_proj", query_rank, d.hidden, bias)
        yield "self_attn.q_a_layernorm.weight", (query_rank,)
        yield from linear("self_attn.q_b_proj", query, query_rank)
    else:
        yield from linear("self_attn.q_proj", query, d.hidden)
    yield from linear("self_attn.kv_a_proj_with_mqa", rank + rope, d.hidden, bias)
    yield "self_attn.kv_a_layernorm.weight", (rank,)
    yield from linear("self_attn.kv_b_proj", d.heads * (nope + value), rank)
    yield from linear("self_attn.o_proj", d.hidden, d.heads * value, bias)


def delta_net(d: Dims, split: bool) -> Iterator[Piece]:
    """Gated delta net: Qwen3-Next fuses its input projections two by two, Qwen3.5 keeps four."""
    value_heads, value_dim = d["linear_num_value_heads"], d["linear_value_head_dim"]
    key, value = d["linear_num_key_heads"] * d["linear_key_head_dim"], value_heads * value_dim
    if split:
        yield from linear("linear_attn.in_proj_qkv", 2 * key + value, d.hidden)
        yield from linear("linear_attn.in_proj_z", value, d.hidden)
        yield from linear("linear_attn.in_proj_b", value_heads, d.hidden)
        yield from linear("linear_attn.in_proj_a", value_heads, d.hidden)
    else:
        yield from linear("linear_attn.in_proj_qkvz", 2 * key + 2 * value, d.hidden)
        yield from linear("linear_attn.in_proj_ba", 2 * value_heads, d.hidden)
    yield "linear_attn.conv1d.weight", (2 * key + value, 1, d["linear_conv_kernel_dim"])
    yield "linear_attn.dt_bias", (value_heads,)
    yield "linear_attn.A_log", (value_heads,)
    yield "linear_attn.norm.weight", (value_dim,)
    yield from linear("linear_attn.out_proj", d.hidden, value)


def gated_mlp(d: Dims, width: int, parent: str = "mlp", bias: bool = False) -> Iterator[Piece]:
    """SwiGLU: gate, up and down projections."""
    yield from linear(f"{parent}.gate_proj", width, d.hidden, bias)
    yield from linear(f"{parent}.up_proj", width, d.hidden, bias)
    yield from linear(f"{parent}.down_proj", d.hidden, width, bias)


def experts(d: Dims, count: int) -> Iterator[Piece]:
    """A router and its routed experts, one gated MLP each."""
    yield "mlp.gate.weight", (count, d.hidden)
    for expert in range(count):
        yield from gated_mlp(d, d["moe_intermediate_size"], f"mlp.experts.{expert}")


def fused_experts(pieces: Iterator[Piece], d: Dims) -> Iterator[Piece]:
    """`pieces` with the single experts as two three-dimensional tensors (how transformers 5 and Qwen3.5 store them)."""
    width = d["moe_intermediate_size"]
    for name, shape in pieces:
        at, single, rest = name.partition("mlp.experts.")
        if not single:
            yield name, shape
        elif rest.startswith("0.gate_proj."):
            yield f"{at}mlp.experts.gate_up_proj", (d.experts, 2 * width, d.hidden)
            yield f"{at}mlp.experts.down_proj", (d.experts, d.hidden, width)


def norms(d: Dims, *names: str) -> Iterator[Piece]:
    """RMS norms over the residual stream."""
    for name in names:
        yield f"{name}.weight", (d.hidden,)


# -----------------------------------------------------------------------------
# Attention and MLP of each family, as functions of (dimensions, layer).

Layer = Callable[[Dims, int], Iterator[Piece]]


def _attending(qk_norm: str = "", qkv_bias: bool | None = None, out_bias: bool | None = None) -> Layer:
    """Grouped-query attention whose biases follow `attention_bias` unless the family fixes them."""

    def part(d: Dims, layer: int) -> Iterator[Piece]:
        own = d.flag("attention_bias")
        qkv, out = own if qkv_bias is None else qkv_bias, own if out_bias is None else out_bias
        return attention(d, qkv_bias=qkv, out_bias=out, qk_norm=qk_norm)

    return part


def _glm_attention(d: Dims, layer: int) -> Iterator[Piece]:
    return attention(d, qkv_bias=d.flag("attention_bias"), qk_norm="head" if d.flag("use_qk_norm") else "")


def full_attention(d: Dims, layer: int) -> bool:
    """Whether a layer of a Qwen3-Next or Qwen3.5 model attends to all tokens (every fourth does by default)."""
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
    """Qwen3-MoE: routed experts every `decoder_sparse_step` layers but those of `mlp_only_layers`."""
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


# -----------------------------------------------------------------------------

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
    "llama": _LLAMA, "smollm3": _LLAMA, "gemma": _LLAMA, "qwen2": _QWEN2, "mimo": _QWEN2,
    "mistral": _decoder(_attending(qkv_bias=False, out_bias=False), _dense),
    "qwen3": _decoder(_attending("head"), _dense), "qwen3_moe": _decoder(_attending("head"), _sparse),
    "gemma2": _decoder(_attending(), _dense, _SANDWICH), "gemma3": _GEMMA3, "gemma3_text": _GEMMA3,
    "olmo2": _decoder(_attending("full"), _dense, ("post_attention_layernorm", "post_feedforward_layernorm")),
    "mixtral": _decoder(_attending(qkv_bias=False, out_bias=False), _mixtral_moe),
    "deepseek_v3": _decoder(latent_attention, _grouped_moe), "glm4_moe": _decoder(_glm_attention, _grouped_moe),
    "qwen3_next": _decoder(_hybrid_attention(split=False), shared_expert_moe),
    "qwen3_5": _QWEN3_5, "qwen3_5_text": _QWEN3_5, "qwen3_5_moe": _QWEN3_5_MOE, "qwen3_5_moe_text": _QWEN3_5_MOE,
}  # fmt: skip
"""Layer layouts by `model_type`."""

TIED_BY_DEFAULT = frozenset(
    {"gemma", "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "cohere", "cohere2"}
)
"""Families whose output head is the embedding unless the config says otherwise."""
