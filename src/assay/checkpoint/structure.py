"""The tensors that a config promises, for the families whose layout assay knows by heart.

A family is a function from the config's dimensions and a layer's index to the pieces of that
decoder layer: names below the layer, and shapes. A Linear weight is [out, in] as PyTorch stores it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from assay.checkpoint import SHOWN, found, noted, plural, some, unexamined, warned
from assay.checkpoint.declared import carrier, stored_kind, weight_shape
from assay.checkpoint.documents import INDEX
from assay.checkpoint.safetensors import layer_index
from assay.checkpoint.subject import BrokenDocument, Checkpoint
from assay.verdict import Finding, Severity

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


# The pieces that decoder layers are built of.


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


# Attention and MLP of each family, as functions of (dimensions, layer).

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


# The tensors that index and config promise against those that are stored.


Shape = tuple[int, ...]
MAX_PIECES = 200_000
"""Layers times experts that are enumerated; the largest models have some 30,000."""


@dataclass(frozen=True)
class Expectation:
    """Shapes by tensor name, and who says so; `problem` says why there are none."""

    shapes: dict[str, Shape]
    origin: str
    problem: str = ""


def tied(checkpoint: Checkpoint) -> bool:
    """Whether the output head is the embedding: the text config's word, the top level's, the
    family's habit.
    """
    for config in (checkpoint.text_config, checkpoint.config):
        value = config.get("tie_word_embeddings")
        if value is not None:
            return bool(value)
    return checkpoint.model_type in TIED_BY_DEFAULT


def has_head(checkpoint: Checkpoint) -> bool:
    """Whether the architecture has an output head at all (an embedding model has none)."""
    names = checkpoint.config.get("architectures") or []
    return any("CausalLM" in n or "ConditionalGeneration" in n for n in names)


def expectation(checkpoint: Checkpoint) -> Expectation | None:
    """What the config promises, for a family that assay knows; None for any other."""
    layer, d = FAMILIES.get(checkpoint.model_type), Dims(checkpoint.text_config)
    if layer is None:
        return None
    if d.layers * max(d.experts, 1) > MAX_PIECES:
        problem = (
            f"config.json promises {d.layers} layers of {d.experts} experts, more than assay counts"
        )
        return Expectation({}, "config.json", problem)
    prefix = checkpoint.prefix
    shapes: dict[str, Shape] = {
        f"{prefix}embed_tokens.weight": (d["vocab_size"], d.hidden),
        f"{prefix}norm.weight": (d.hidden,),
    }
    for index in range(d.layers):
        pieces, at = layer(d, index), f"{prefix}layers.{index}."
        if any(
            p.startswith("gate_up_proj") for p in checkpoint.modules.get(f"{at}mlp.experts", {})
        ):
            pieces = fused_experts(pieces, d)
        shapes.update((at + name, shape) for name, shape in pieces)
    if has_head(checkpoint) and not tied(checkpoint):
        shapes[head_name(checkpoint)] = (d["vocab_size"], d.hidden)
    if d.lacking:
        names = ", ".join(sorted(d.lacking))
        return Expectation(
            {}, "config.json", f"config.json gives no {names} for a {checkpoint.model_type}"
        )
    return Expectation(shapes, "config.json")


def head_name(checkpoint: Checkpoint) -> str:
    """Name of the output head as this checkpoint would store it."""
    for name in ("lm_head", "language_model.lm_head"):
        if name in checkpoint.modules:
            return f"{name}.weight"
    nested = checkpoint.prefix.startswith("language_model.")
    return "language_model.lm_head.weight" if nested else "lm_head.weight"


def check_structure(checkpoint: Checkpoint, promised: Expectation | None) -> Iterator[Finding]:
    """Missing tensors and wrong shapes; without an expectation, layers that lack what their peers
    have.
    """
    yield from _names(checkpoint)
    if promised is None or promised.problem:
        if promised is not None:
            title = f"{promised.problem}: the names and shapes of the tensors were not examined"
            yield unexamined(
                title,
                severity=Severity.WARNING,
                remedies=["take config.json from the original repository"],
            )
        yield from holes_among_peers(checkpoint)
        return
    missing = [name for name in promised.shapes if not is_stored(checkpoint, name)]
    if missing:
        yield _missing(checkpoint, missing, promised.origin)
    wrong = dict(_wrong_shapes(checkpoint, promised))
    if wrong:
        name, (stored, wanted) = next(iter(wrong.items()))
        title = (
            f"{plural(len(wrong), 'tensor')} of another shape than the config says, first {name}: "
        )
        title += f"{list(stored)} stored, {list(wanted)} expected"
        evidence = {n: {"stored": s, "expected": w} for n, (s, w) in list(wrong.items())[:SHOWN]}
        causes = [
            "config.json belongs to another size of this model",
            "the tensor was resized without the config",
        ]
        yield found("tensor_shape", title, causes=causes, tensors=evidence, count=len(wrong))


def _names(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Tensors named as another architecture would name them, which no engine maps into this one.

    vLLM 0.32 maps `model.language_model.` for the text-only forms of Qwen3.5 and Gemma 4, and for
    no others.
    """
    config, prefix = checkpoint.config, checkpoint.prefix
    names = config.get("architectures") or []
    text_only = (
        names and all(n.endswith("ForCausalLM") for n in names) and checkpoint.text_config is config
    )
    if (
        not text_only
        or config.get("auto_map")
        or config.get("vision_config")
        or config.get("quantization")
    ):
        return
    if prefix == "model.language_model." and checkpoint.model_type.startswith(
        ("qwen3_5", "gemma4")
    ):
        return
    known = checkpoint.model_type in FAMILIES
    if "language_model." in prefix or (known and prefix not in {"", "model."}):
        title = (
            f"config.json says {names[0]}, a text-only model, but the tensors are named {prefix}*"
        )
        causes = [
            "the language model was taken out of a multimodal one, and only the config was changed",
            "the names were left as a training wrapper gave them",
        ]
        detail = (
            "No engine maps these names into that architecture: it stops, or leaves all weights"
            " random."
        )
        remedies = ["rename the tensors to model.*, or restore the multimodal config.json"]
        yield found(
            "config_conflict", title, detail=detail, causes=causes, remedies=remedies, prefix=prefix
        )


def is_stored(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a promised tensor is there, as it is or quantised."""
    if name in checkpoint.tensors:
        return True
    module, _, parameter = name.rpartition(".")
    params = checkpoint.modules.get(module, {})
    if parameter == "weight":
        return carrier(params) is not None
    return any(
        p.startswith(f"{parameter}_") for p in params
    )  # fused experts: gate_up_proj_blocks, …_packed


def _missing(checkpoint: Checkpoint, missing: list[str], origin: str) -> Finding:
    layers = sorted({i for n in missing if (i := layer_index(n)) is not None})
    causes = ["a shard is missing or was cut", "the checkpoint was saved without them"]
    title = f"{plural(len(missing), 'tensor')} that {origin} promises not stored: {some(missing)}"
    if len(missing) == 1 and missing[0].endswith("lm_head.weight"):
        title = "lm_head.weight is not stored, and tie_word_embeddings is not true"
        causes = [
            "tie_word_embeddings was lost from config.json; then the head is the embedding",
            "the head was dropped; a loader fills it with random numbers",
        ]
    remedies = ["download the checkpoint again, or correct config.json"]
    return found(
        "tensor_missing",
        title,
        causes=causes,
        remedies=remedies,
        tensors=missing[:SHOWN],
        count=len(missing),
        layers=layers[:SHOWN],
    )


def _wrong_shapes(
    checkpoint: Checkpoint, promised: Expectation
) -> Iterator[tuple[str, tuple[Shape, Shape]]]:
    for name, shape in promised.shapes.items():
        tensor = checkpoint.tensors.get(name)
        if tensor is None or tensor.shape == shape:
            continue
        module, _, parameter = name.rpartition(".")
        params = checkpoint.modules.get(module, {})
        packed = stored_kind(params) is None or weight_shape(params) is None
        if not (
            parameter == "weight" and len(shape) == 2 and packed
        ):  # a scheme checks what is packed
            yield name, (tensor.shape, shape)


def holes_among_peers(checkpoint: Checkpoint) -> Iterator[Finding]:
    """For an unknown architecture: layers that count up with a gap, or one layer that lacks a part
    of its peers.
    """
    suffixes: dict[int, set[str]] = defaultdict(set)
    for module in checkpoint.modules:
        head, marker, rest = module.partition("layers.")
        index, _, tail = rest.partition(".")
        if marker and head == checkpoint.prefix and index.isdecimal() and len(index) < 7:
            suffixes[int(index)].add(tail)
    count = checkpoint.dims("num_hidden_layers")
    if not suffixes or not count:
        return
    gaps = [i for i in range(count) if i not in suffixes]
    if gaps:
        title = f"{plural(len(gaps), 'layer')} of {count} not stored: {some(map(str, gaps))}"
        yield found("tensor_missing", title, layers=gaps[:SHOWN], causes=["a shard is missing"])
    holes = [
        f"{checkpoint.prefix}layers.{at}.{tail}"
        for at, lost in lost_parts(suffixes, 4).items()
        for tail in lost
    ]
    if holes:
        title = (
            f"{plural(len(holes), 'module')} that the other layers have not stored: {some(holes)}"
        )
        yield found(
            "tensor_missing", title, modules=holes[:SHOWN], causes=["a shard is missing or was cut"]
        )


def lost_parts(layers: dict[int, set[str]], least: int) -> dict[int, list[str]]:
    """What a single layer lacks of the parts that at least half of its peers have; needs `least`
    layers.
    """
    forms = Counter(frozenset(parts) for parts in layers.values())
    lost: dict[int, list[str]] = {}
    for index, own in layers.items() if len(layers) >= least else ():
        fuller = [form for form in forms if own < form]
        if (
            forms[frozenset(own)] == 1
            and sum(forms[f] for f in fuller) >= len(layers) // 2
            and fuller
        ):
            lost[index] = sorted(fuller[0] - own)
    return lost


# `model.safetensors.index.json` against the shards, both ways.

_NUMBERED = re.compile(r"^(.*?)-(\d{5})-of-(\d{5})\.safetensors$")


def loaded_files(checkpoint: Checkpoint) -> set[str]:
    """The weight files that a loader reads: those that the index names, or `model.safetensors`."""
    return set((checkpoint.weight_map or {"": "model.safetensors"}).values())


def check_index(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Findings on the index, on the numbering of shards and on tensors stored twice."""
    index, mapped = checkpoint.document(INDEX), checkpoint.weight_map
    if isinstance(index, BrokenDocument):
        yield found("index_mismatch", f"{INDEX} cannot be read: {index.reason}", path=INDEX)
    elif index is not None and mapped is None:
        yield found("index_mismatch", f"{INDEX} has no weight_map of names to files", path=INDEX)
    yield from _doubled(checkpoint)
    yield from _numbering(checkpoint) if mapped is None else _against_shards(checkpoint, mapped)


def _numbering(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Numbered shards without an index: are all of them here?"""
    series: dict[tuple[str, str], set[int]] = defaultdict(set)
    for file in checkpoint.files:
        numbered = _NUMBERED.match(file)
        if numbered and "/" not in file:
            series[numbered[1], numbered[3]].add(int(numbered[2]))
    for (stem, total), present in series.items():
        lost = [
            f"{stem}-{i:05d}-of-{total}.safetensors"
            for i in range(1, int(total) + 1)
            if i not in present
        ]
        if lost:
            title = f"{plural(len(lost), 'shard')} missing: {some(lost)}"
            yield found("shard_missing", title, paths=lost[:SHOWN])
        if int(total) > 1:
            title = f"{total} shards of {stem}, but no {INDEX} that says what is in them"
            yield found(
                "index_mismatch", title, causes=["the index was not downloaded"], path=INDEX
            )


def _doubled(checkpoint: Checkpoint) -> Iterator[Finding]:
    where: dict[str, set[str]] = defaultdict(set)
    for file, header in checkpoint.headers.items():
        for tensor in header.tensors if file not in checkpoint.stray else ():
            where[tensor.name].add(file)
    doubled = {name: sorted(files) for name, files in where.items() if len(files) > 1}
    if doubled:
        name, files = next(iter(doubled.items()))
        title = (
            f"{plural(len(doubled), 'tensor')} stored in two shards, first {name}"
            f" ({' and '.join(files)})"
        )
        causes = ["shards of two revisions or two saves lie in one folder"]
        remedies = ["delete the shards that do not belong to this revision"]
        evidence = dict(list(doubled.items())[:SHOWN])
        yield found("tensor_duplicate", title, causes=causes, remedies=remedies, tensors=evidence)


def _against_shards(checkpoint: Checkpoint, mapped: dict[str, str]) -> Iterator[Finding]:
    files = Counter(mapped.values())
    outside = sorted(f for f in files if PurePosixPath(f).is_absolute() or ".." in f.split("/"))
    if outside:
        title = f"{INDEX} names files outside the folder: {some(outside)}"
        yield found("index_mismatch", title, paths=outside[:SHOWN])
    lost = sorted(f for f in files if f not in outside and f not in checkpoint.files)
    if lost:
        count = sum(files[s] for s in lost)
        title = f"{plural(len(lost), 'shard')} missing with {plural(count, 'tensor')}: {some(lost)}"
        remedies = ["download the missing shards again"]
        yield found("shard_missing", title, remedies=remedies, paths=lost[:SHOWN], tensors=count)
    actual = {t.name: file for file, header in checkpoint.headers.items() for t in header.tensors}
    shards = {f: h.tensors for f, h in checkpoint.headers.items() if h.tensors or not h.faults}
    names = {f: {t.name for t in tensors} for f, tensors in shards.items()}
    elsewhere = [n for n, f in mapped.items() if n in actual and f in shards and n not in names[f]]
    if elsewhere:
        name = elsewhere[0]
        title = (
            f"{plural(len(elsewhere), 'tensor')} not in the shard that the index names, first"
            f" {name} "
        )
        title += f"(index: {mapped[name]}, really: {actual[name]})"
        causes = ["two shards were swapped or renamed", "the index belongs to another save"]
        yield found("index_mismatch", title, causes=causes, tensors=elsewhere[:SHOWN])
    nowhere = [n for n, f in mapped.items() if n not in actual and f in shards]
    if nowhere:
        title = (
            f"{plural(len(nowhere), 'tensor')} named by the index and in no shard: {some(nowhere)}"
        )
        causes = ["a shard of another revision", "tensors were dropped without rewriting the index"]
        yield found(
            "index_mismatch", title, causes=causes, tensors=nowhere[:SHOWN], count=len(nowhere)
        )
    unnamed = [t.name for f in files if f in shards for t in shards[f] if t.name not in mapped]
    if unnamed:
        title = (
            f"{plural(len(unnamed), 'tensor')} in the shards that the index does not name:"
            f" {some(unnamed)}"
        )
        yield found("index_mismatch", title, tensors=unnamed[:SHOWN], count=len(unnamed))
    if checkpoint.stray:
        unlisted = sorted(checkpoint.stray)
        title = (
            f"{plural(len(unlisted), 'weight file')} that the index does not name: {some(unlisted)}"
        )
        detail = "Engines load the files of the index only, so these tensors take no part."
        yield warned("index_mismatch", title, detail=detail, paths=unlisted[:SHOWN])
    total = (checkpoint.object(INDEX).get("metadata") or {}).get("total_size")
    stored = sum(
        t.nbytes for f in files if f in checkpoint.headers for t in checkpoint.headers[f].tensors
    )
    if total is not None and stored and int(total) != stored and not (lost or nowhere or unnamed):
        title = f"the index says {int(total)} bytes of tensors, the shards hold {stored}"
        detail = (
            "Some exporters count tied or packed weights differently; engines do not read this"
            " figure."
        )
        yield noted("index_mismatch", title, detail=detail, total_size=int(total), stored=stored)


# Names and shapes from transformers' own meta-device model, for families that assay has no layout
# of.
#
# Needs the `hf` extra. The model is built without memory for its weights and without running code
# of the checkpoint.

_COUNTS = re.compile(r"layers|experts|depth|blocks|stages")
MAX_COUNT, MAX_MODULES = 1024, 40_000
"""Largest number of layers or experts of a config that is built, and of both multiplied: each costs
time.
"""


def meta_expectation(checkpoint: Checkpoint) -> Expectation | None:
    """What transformers would allocate for this config; None if it does not know the type or
    renames on load.
    """
    config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    kind = config.pop("model_type", None)
    if not kind or config.get("auto_map") or not _sane(config):
        return None
    try:
        return _expect(checkpoint, kind, config)
    except Exception:
        # Hundreds of model classes read this config, each with errors of its own. What cannot be
        # built says nothing about the tensors.
        return None


def _sane(config: dict[str, Any], depth: int = 0) -> bool:
    """Bounds on what the meta model has to enumerate, nested configs included."""
    counts = {k: v for k, v in config.items() if type(v) is int and _COUNTS.search(k)}
    layers = max((v for k, v in counts.items() if "experts" not in k), default=1)
    experts = max((v for k, v in counts.items() if "experts" in k), default=1)
    if max(counts.values(), default=0) > MAX_COUNT or layers * max(experts, 1) > MAX_MODULES:
        return False
    return depth <= 4 and all(_sane(v, depth + 1) for v in config.values() if isinstance(v, dict))


def _expect(checkpoint: Checkpoint, kind: str, config: dict[str, Any]) -> Expectation | None:
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        if get_checkpoint_conversion_mapping(kind):
            return None  # stored under other names than the model's own
    except ImportError:
        pass
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))
    optional = [
        re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_missing", None) or []
    ]
    tied = set(
        getattr(model, "all_tied_weights_keys", None)
        or getattr(model, "_tied_weights_keys", None)
        or []
    )
    shapes = {
        name: tuple(value.shape)
        for name, value in model.state_dict().items()
        if name not in tied and not any(p.search(name) for p in optional)
    }
    own = next((n for n in shapes if n.endswith("embed_tokens.weight")), "")
    if own and own.removesuffix("embed_tokens.weight") != checkpoint.prefix:
        return None
    return Expectation(shapes, f"transformers {transformers.__version__}")
