"""The pieces that decoder layers are built of: names below the layer, and shapes.

A Linear weight is [out, in] as PyTorch stores it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Piece = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Dims:
    """The dimensions of a language model's config. `d[key]` must be given: what was not stands in
    `lacking`.
    """

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
        return max(
            self.get(key) for key in ("n_routed_experts", "num_experts", "num_local_experts")
        )


def linear(name: str, out: int, width: int, bias: bool = False) -> Iterator[Piece]:
    """A Linear: its weight, and its bias if it has one."""
    yield f"{name}.weight", (out, width)
    if bias:
        yield f"{name}.bias", (out,)


def attention(
    d: Dims,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: str = "",
    gated: bool = False,
) -> Iterator[Piece]:
    """Grouped-query attention; `qk_norm` is `head` (per head) or `full` (over all heads), `gated`
    doubles the query.
    """
    query, key = d.heads * d.head_dim, d.kv_heads * d.head_dim
    yield from linear("self_attn.q_proj", query * (2 if gated else 1), d.hidden, qkv_bias)
    yield from linear("self_attn.k_proj", key, d.hidden, qkv_bias)
    yield from linear("self_attn.v_proj", key, d.hidden, qkv_bias)
    yield from linear("self_attn.o_proj", d.hidden, query, out_bias)
    if qk_norm:
        yield "self_attn.q_norm.weight", (d.head_dim if qk_norm == "head" else query,)
        yield "self_attn.k_norm.weight", (d.head_dim if qk_norm == "head" else key,)


def latent_attention(d: Dims, layer: int = 0) -> Iterator[Piece]:
    """Multi-head latent attention (DeepSeek V2 and V3): low-rank query and key-value projections
    with norms.
    """
    rope, nope, value, rank = (
        d["qk_rope_head_dim"],
        d["qk_nope_head_dim"],
        d["v_head_dim"],
        d["kv_lora_rank"],
    )
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
    """`pieces` with the single experts as two three-dimensional tensors (how transformers 5 and
    Qwen3.5 store them).
    """
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


Shape = tuple[int, ...]
