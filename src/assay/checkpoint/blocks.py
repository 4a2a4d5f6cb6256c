"""Names and shapes of the pieces that decoder layers are built of, from a config alone.

Every function yields (name below its parent, shape); a Linear weight is [out, in] as stored by PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
