"""config.json against itself and against the tensors' shapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

from assay.checkpoint.expected import FAMILIES, Dims, Piece
from assay.checkpoint.findings import found, warned
from assay.checkpoint.quantization.declared import weight_shape
from assay.checkpoint.structure import head_name, is_stored
from assay.checkpoint.subject import BrokenDocument, Checkpoint
from assay.verdict import Finding

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "half": "F16"}


def check_config(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Contradictions of config.json."""
    document = checkpoint.document("config.json")
    if isinstance(document, BrokenDocument):
        remedies = ["download config.json again"]
        yield found("config_conflict", f"config.json cannot be read: {document.reason}", remedies=remedies)
        return
    if document is None:
        return
    yield from _heads(checkpoint)
    yield from _layers(checkpoint)
    yield from _layer_types(checkpoint)
    yield from _embedding_rows(checkpoint)
    yield from _dtype(checkpoint)
    yield from _tie(checkpoint)


def _heads(checkpoint: Checkpoint) -> Iterator[Finding]:
    d = Dims(checkpoint.text_config)
    if not d.hidden or not checkpoint.dims("num_attention_heads"):
        return
    if "head_dim" not in d.config and not checkpoint.dims("qk_nope_head_dim") and d.hidden % d.heads:
        title = f"hidden_size {d.hidden} is not divisible by {d.heads} heads, and no head_dim is given"
        yield found("config_conflict", title, hidden_size=d.hidden, num_attention_heads=d.heads)
        return
    if d.kv_heads and d.heads % d.kv_heads:
        title = f"{d.heads} query heads cannot share {d.kv_heads} key-value heads"
        yield found("config_conflict", title, num_attention_heads=d.heads, num_key_value_heads=d.kv_heads)
        return
    layout = FAMILIES.get(str(d.config.get("model_type")))
    for projection, count in (("q_proj", d.heads), ("k_proj", d.kv_heads)):
        stored = _rows(checkpoint, projection)
        wanted = {
            shape[0] for i in range(min(d.layers, 64))
            for name, shape in takewhile(_before_experts, layout(d, i) if layout else ())
            if name == f"self_attn.{projection}.weight"
        }  # fmt: skip
        if len(stored) == 1 and len(wanted) == 1 and stored != wanted:
            (rows,), (expected,) = stored, wanted
            title = f"every {projection} has {rows} rows; {count} heads of {d.head_dim} need {expected}"
            causes = ["head_dim, or a number of heads, was changed in config.json"]
            fits = rows * d.head_dim // expected if rows * d.head_dim % expected == 0 else None
            remedies = [f"head_dim {fits} would fit"] if fits and projection == "q_proj" else []
            yield found(
                "config_conflict", title, causes=causes, remedies=remedies, rows=rows, expected=expected
            )
            return


def _before_experts(piece: Piece) -> bool:
    """Every layout names its attention first; hundreds of experts need not be counted for it."""
    return ".experts." not in piece[0]


def _rows(checkpoint: Checkpoint, projection: str) -> set[int]:
    rows = set()
    for module, params in checkpoint.modules.items():
        if module.startswith(f"{checkpoint.prefix}layers.") and module.endswith(f".self_attn.{projection}"):
            shape = weight_shape(params)
            if shape is not None and len(shape) == 2:
                rows.add(shape[0])
    return rows


def _layers(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Stored layers beyond the configured number, unless they are a draft head that lies there."""
    count = checkpoint.dims("num_hidden_layers")
    if count is None:
        return
    beyond: dict[int, set[str]] = defaultdict(set)
    start = f"{checkpoint.prefix}layers."
    for module in checkpoint.modules:
        if module.startswith(start):
            index, _, tail = module[len(start) :].partition(".")
            if index.isdigit() and int(index) >= count:
                beyond[int(index)].add(tail)
    extra = sorted(
        i for i, tails in beyond.items() if not tails & {"eh_proj", "enorm", "hnorm", "shared_head.norm"}
    )
    if extra:
        title = f"config.json says {count} layers, the tensors go on to layer {extra[-1]}"
        causes = ["num_hidden_layers was changed", "config.json belongs to a smaller model"]
        yield found("config_conflict", title, causes=causes, num_hidden_layers=count, stored=extra[-1] + 1)


def _layer_types(checkpoint: Checkpoint) -> Iterator[Finding]:
    config = checkpoint.text_config
    types, count = config.get("layer_types"), checkpoint.dims("num_hidden_layers")
    if not isinstance(types, list) or not types:
        return
    if count and len(types) != count:
        title = f"layer_types names {len(types)} layers, num_hidden_layers is {count}"
        yield found("config_conflict", title, layer_types=len(types), num_hidden_layers=count)
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True) and set(types) == {"full_attention"}:
        title = f"sliding_window is {window}, but every layer attends in full"
        references = ["https://github.com/vllm-project/vllm/issues/49795"]
        yield warned("config_conflict", title, references=references, sliding_window=window)


def _embedding_rows(checkpoint: Checkpoint) -> Iterator[Finding]:
    """For families without a known layout; the others are held to all their shapes."""
    if str(checkpoint.text_config.get("model_type")) in FAMILIES:
        return
    tensor = checkpoint.tensors.get(f"{checkpoint.prefix}embed_tokens.weight")
    vocab = checkpoint.dims("vocab_size")
    if (
        tensor is not None
        and vocab
        and len(tensor.shape) == 2
        and tensor.shape[0] != vocab
        and tensor.dtype != "U32"
    ):
        title = f"the embedding has {tensor.shape[0]} rows, vocab_size is {vocab}"
        yield found("tensor_shape", title, tensor=tensor.name, shape=tensor.shape, vocab_size=vocab)


def _dtype(checkpoint: Checkpoint) -> Iterator[Finding]:
    said = checkpoint.text_config.get("dtype") or checkpoint.text_config.get("torch_dtype")
    said = said or checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    wanted = _DTYPES.get(str(said).removeprefix("torch."))
    stored = {
        t.dtype for t in checkpoint.tensors.values() if t.dtype in {"BF16", "F16"} and len(t.shape) == 2
    }
    if wanted == "F16" and stored == {"BF16"}:
        title = "config.json says float16, the weights are bfloat16: values beyond 65504 overflow to inf"
        references = ["https://github.com/vllm-project/vllm/issues/14126"]
        remedies = ["set dtype to bfloat16 in config.json, or serve with --dtype bfloat16"]
        yield warned(
            "config_conflict", title, remedies=remedies, references=references, dtype=said, stored="BF16"
        )


def _tie(checkpoint: Checkpoint) -> Iterator[Finding]:
    nested, top = (
        checkpoint.text_config.get("tie_word_embeddings"),
        checkpoint.config.get("tie_word_embeddings"),
    )
    split = isinstance(nested, bool) and isinstance(top, bool) and nested != top
    if (
        split
        and checkpoint.text_config is not checkpoint.config
        and not is_stored(checkpoint, head_name(checkpoint))
    ):
        title = (
            f"tie_word_embeddings is {top} at the top and {nested} in the text config, and no head is stored"
        )
        references = ["https://github.com/huggingface/transformers/issues/43429"]
        yield found("config_conflict", title, references=references, top=top, nested=nested)


# -----------------------------------------------------------------------------
# Rotary position settings: old key against new key, scaling factors against lengths.

_TYPES = frozenset({
    "default", "linear", "dynamic", "yarn", "longrope", "su", "llama3", "mrope", "proportional", "deepseek_yarn",
    "dynamic_alpha", "deepseek_llama_scaling", "xdrope",
})  # fmt: skip
_NEEDS_FACTOR = frozenset({"linear", "dynamic", "yarn", "llama3", "deepseek_yarn"})
_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def check_rope(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Contradictions in rope_scaling, rope_parameters and rope_theta."""
    config = checkpoint.text_config
    named = (config.get("rope_scaling"), config.get("rope_parameters"))
    both: list[Mapping[str, Any]] = [settings for settings in named if isinstance(settings, Mapping)]
    if len(both) == 2:
        differing = sorted(k for k in both[0] if k in both[1] and both[0][k] != both[1][k])
        if differing:
            title = f"rope_scaling and rope_parameters disagree on {', '.join(differing)}"
            yield found("config_conflict", title, rope_scaling=both[0], rope_parameters=both[1])
    for settings in both:
        yield from _settings(settings, config)
    theta = config.get("rope_theta")
    for settings in both:
        inner = settings.get("rope_theta")
        if isinstance(theta, int | float) and isinstance(inner, int | float) and theta != inner:
            title = f"rope_theta is {theta:g} at the top and {inner:g} in the rope settings"
            yield found("config_conflict", title, top=theta, nested=inner)
    if isinstance(theta, int | float) and theta <= 0:
        yield found("config_conflict", f"rope_theta is {theta:g}", rope_theta=theta)


def _settings(settings: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[Finding]:
    if settings and all(isinstance(v, Mapping) for v in settings.values()):  # one entry per kind of attention
        for inner in settings.values():
            yield from _settings(inner, config)
        return
    old, new = settings.get("type"), settings.get("rope_type")
    kind = new or old
    if old and new and old != new and {old, new} != {"su", "longrope"} and "mrope" not in {old, new}:
        references = ["https://github.com/vllm-project/vllm/issues/10293"]
        title = f"rope_scaling has type {old!r} and rope_type {new!r}: versions read one or the other"
        yield found("config_conflict", title, references=references, type=old, rope_type=new)
    if not isinstance(kind, str):
        return
    if kind not in _TYPES:
        yield warned("config_conflict", f"rope type {kind!r} is not one that engines know", rope_type=kind)
    factor = settings.get("factor")
    if kind in _NEEDS_FACTOR and not (isinstance(factor, int | float) and factor >= 1):
        yield found(
            "config_conflict", f"rope type {kind} needs a factor of at least 1, not {factor!r}", factor=factor
        )
    if kind == "llama3":
        lacking = [k for k in _LLAMA3 if not isinstance(settings.get(k), int | float)]
        if lacking:
            yield found("config_conflict", f"rope type llama3 lacks {', '.join(lacking)}", missing=lacking)
    if kind in {"longrope", "su"}:
        yield from _longrope(settings, config)
    original, limit = settings.get("original_max_position_embeddings"), config.get("max_position_embeddings")
    if type(original) is int and type(limit) is int and original > limit:
        title = f"original_max_position_embeddings {original} is beyond max_position_embeddings {limit}"
        yield found("config_conflict", title, original=original, limit=limit)


def _longrope(settings: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[Finding]:
    d = Dims(config)
    partial = config.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1.0))
    rotary = d.int_or("qk_rope_head_dim") or int(
        d.head_dim * partial if isinstance(partial, int | float) else d.head_dim
    )
    for key in ("short_factor", "long_factor"):
        factors = settings.get(key)
        if not isinstance(factors, list):
            yield found("config_conflict", f"rope type longrope lacks {key}", missing=key)
        elif rotary and len(factors) != rotary // 2:
            title = f"{key} has {len(factors)} entries, {rotary} rotary dimensions need {rotary // 2}"
            yield found("config_conflict", title, key=key, entries=len(factors), needed=rotary // 2)


# -----------------------------------------------------------------------------
# generation_config.json: sampling settings that a server takes over as its defaults.

NAME = "generation_config.json"


def check_generation(checkpoint: Checkpoint) -> Iterator[Finding]:
    """A missing, broken or nonsensical generation config."""
    document = checkpoint.document(NAME)
    if document is None:
        if checkpoint.config.get("architectures"):
            title = (
                f"no {NAME}: servers fall back on their own sampling defaults and on config.json's end tokens"
            )
            yield warned("config_conflict", title, path=NAME)
        return
    if isinstance(document, BrokenDocument):
        yield found("config_conflict", f"{NAME} cannot be read: {document.reason}", path=NAME)
        return
    for key, (holds, rule) in _SANE.items():
        value = document.get(key)
        if value is not None and not holds(value):
            title = f"{NAME} sets {key} to {str(value)[:40]}, which is not {rule}"
            yield found(
                "config_conflict",
                title,
                key=key,
                value=value if isinstance(value, int | float) else str(value),
            )
    penalty = document.get("repetition_penalty")
    if isinstance(penalty, int | float) and penalty >= 1.2:
        title = f"{NAME} sets repetition_penalty to {penalty:g}, which hides loops of a broken model"
        yield warned("config_conflict", title, repetition_penalty=penalty)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_SANE: dict[str, tuple[Any, str]] = {
    "temperature": (lambda v: _number(v) and 0 <= v <= 10, "a number from 0 to 10"),
    "top_p": (lambda v: _number(v) and 0 < v <= 1, "above 0 and at most 1"),
    "min_p": (lambda v: _number(v) and 0 <= v <= 1, "from 0 to 1"),
    "top_k": (lambda v: type(v) is int and v >= -1, "a natural number"),
    "repetition_penalty": (lambda v: _number(v) and 0 < v <= 5, "above 0 and at most 5"),
    "max_new_tokens": (lambda v: type(v) is int and v > 0, "a positive number"),
    "max_length": (lambda v: type(v) is int and v > 0, "a positive number"),
}
