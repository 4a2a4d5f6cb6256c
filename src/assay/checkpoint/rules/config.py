"""The documents against themselves and against the tensors' shapes: config, rope, generation config."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import takewhile

from assay.checkpoint import SHOWN, found, plural, warned
from assay.checkpoint.documents import INDEX, ROPE, TABLES, Document
from assay.checkpoint.draft import is_draft
from assay.checkpoint.quantization.declared import weight_shape
from assay.checkpoint.structure import FAMILIES, Dims, head_name, is_stored
from assay.checkpoint.subject import BrokenDocument, Checkpoint
from assay.verdict import Finding


def check_documents(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Values that are not what their keys take, in every document that the rules read."""
    for name in TABLES:
        nonsense = checkpoint.nonsense(name)
        for entry in nonsense[:SHOWN]:
            area = "tokenizer_conflict" if name.startswith("tokenizer") else "config_conflict"
            if "quant" in name or entry.path.startswith(
                ("quantization_config", "compression_config", "text_config.quant")
            ):
                area = "quantization_conflict"
            write = found if entry.serious else warned
            detail = "" if entry.serious else "Engines read it too, or pass it on; whether they stop differs."
            yield write(
                "index_mismatch" if name == INDEX else area, f"{name} {entry.text}", detail=detail, key=entry.path,
                value=repr(entry.value)[:80], remedies=[f"take {name} from the original repository"],
            )  # fmt: skip
        if len(nonsense) > SHOWN:
            more = plural(len(nonsense) - SHOWN, "more value")
            yield found("config_conflict", f"{name} has {more} that are not what their keys take")


def check_config(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Contradictions of config.json."""
    document = checkpoint.document("config.json")
    if isinstance(document, BrokenDocument):
        remedies = ["download config.json again"]
        yield found("config_conflict", f"config.json cannot be read: {document.reason}", remedies=remedies)
    if not isinstance(document, dict):
        return
    for key in ("quantization_config", "compression_config"):
        if document.get(key) == {}:
            yield found("quantization_conflict", f"config.json has an empty {key}: engines find no method in it")
    yield from _heads(checkpoint)
    yield from _layers(checkpoint)
    yield from _layer_types(checkpoint)
    yield from _embedding_rows(checkpoint)
    yield from _dtype(checkpoint)
    yield from _tie(checkpoint)


def _heads(checkpoint: Checkpoint) -> Iterator[Finding]:
    d = Dims(checkpoint.text_config)
    if not d.hidden or not d.heads:
        return
    if d.config.get("head_dim") == 0 and checkpoint.model_type in FAMILIES:
        yield found("config_conflict", f"head_dim is 0; {d.heads} heads of {d.hidden} need {d.head_dim}", head_dim=0)
        return
    if not d.get("head_dim") and not d.get("qk_nope_head_dim") and d.hidden % d.heads:
        title = f"hidden_size {d.hidden} is not divisible by {d.heads} heads, and no head_dim is given"
        yield found("config_conflict", title, hidden_size=d.hidden, num_attention_heads=d.heads)
        return
    if d.heads % d.kv_heads:
        title = f"{d.heads} query heads cannot share {d.kv_heads} key-value heads"
        yield found("config_conflict", title, num_attention_heads=d.heads, num_key_value_heads=d.kv_heads)
        return
    layout = FAMILIES.get(checkpoint.model_type)
    for projection, count in (("q_proj", d.heads), ("k_proj", d.kv_heads)):
        # Every layout names its attention first; hundreds of experts need not be counted for it.
        wanted = {
            shape[0] for i in range(min(d.layers, 64))
            for name, shape in takewhile(lambda piece: ".experts." not in piece[0], layout(d, i) if layout else ())
            if name == f"self_attn.{projection}.weight"
        }  # fmt: skip
        stored = _rows(checkpoint, projection)
        if len(stored) == 1 and len(wanted) == 1 and stored != wanted:
            (rows,), (expected,) = stored, wanted
            title = f"every {projection} has {rows} rows; {count} heads of {d.head_dim} need {expected}"
            causes = ["head_dim, or a number of heads, was changed in config.json"]
            fits = rows * d.head_dim // expected if expected and rows * d.head_dim % expected == 0 else None
            remedies = [f"head_dim {fits} would fit"] if fits and projection == "q_proj" else []
            yield found("config_conflict", title, causes=causes, remedies=remedies, rows=rows, expected=expected)
            return


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
            if index.isdecimal() and len(index) < 8 and int(index) >= count:
                beyond[int(index)].add(tail)
    marks = {"eh_proj", "enorm", "hnorm", "shared_head.norm"}
    extra = sorted(i for i, tails in beyond.items() if not tails & marks)
    if extra:
        title = f"config.json says {count} layers, the tensors go on to layer {extra[-1]}"
        causes = ["num_hidden_layers was changed", "config.json belongs to a smaller model"]
        yield found("config_conflict", title, causes=causes, num_hidden_layers=count, stored=extra[-1] + 1)


def _layer_types(checkpoint: Checkpoint) -> Iterator[Finding]:
    config = checkpoint.text_config
    types, count, window = (config.get("layer_types"), config.get("num_hidden_layers"), config.get("sliding_window"))
    if not types:
        return
    if count and len(types) != count:
        title = f"layer_types names {len(types)} layers, num_hidden_layers is {count}"
        yield found("config_conflict", title, layer_types=len(types), num_hidden_layers=count)
    if window and config.get("use_sliding_window") is not False and set(types) == {"full_attention"}:
        title = f"sliding_window is {window}, but every layer attends in full"
        references = ["https://github.com/vllm-project/vllm/issues/49795"]
        yield warned("config_conflict", title, references=references, sliding_window=window)


def _embedding_rows(checkpoint: Checkpoint) -> Iterator[Finding]:
    """For families without a known layout; the others are held to all their shapes."""
    tensor, vocab = (checkpoint.tensors.get(f"{checkpoint.prefix}embed_tokens.weight"), checkpoint.dims("vocab_size"))
    if checkpoint.model_type in FAMILIES or tensor is None or not vocab or tensor.dtype == "U32":
        return
    if len(tensor.shape) == 2 and tensor.shape[0] != vocab:
        title = f"the embedding has {tensor.shape[0]} rows, vocab_size is {vocab}"
        yield found("tensor_shape", title, tensor=tensor.name, shape=tensor.shape, vocab_size=vocab)


def _dtype(checkpoint: Checkpoint) -> Iterator[Finding]:
    places = (checkpoint.text_config, checkpoint.config)
    said = next((v for config in places for key in ("dtype", "torch_dtype") if (v := config.get(key))), "")
    stored = {t.dtype for t in checkpoint.tensors.values() if t.dtype in {"BF16", "F16"} and len(t.shape) == 2}
    if said.removeprefix("torch.") in {"float16", "half"} and stored == {"BF16"}:
        title = "config.json says float16, the weights are bfloat16: values beyond 65504 overflow to inf"
        references = ["https://github.com/vllm-project/vllm/issues/14126"]
        remedies = ["set dtype to bfloat16 in config.json, or serve with --dtype bfloat16"]
        yield warned("config_conflict", title, remedies=remedies, references=references, dtype=said, stored="BF16")


def _tie(checkpoint: Checkpoint) -> Iterator[Finding]:
    nested, top = (c.get("tie_word_embeddings") for c in (checkpoint.text_config, checkpoint.config))
    if None not in {nested, top} and nested != top and not is_stored(checkpoint, head_name(checkpoint)):
        title = f"tie_word_embeddings is {top} at the top and {nested} in the text config, and no head is stored"
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
    both: list[Document] = [s for key in ("rope_scaling", "rope_parameters") if (s := config.get(key)) is not None]
    if len(both) == 2:
        differing = sorted(k for k in both[0] if k in both[1] and both[0][k] != both[1][k])
        if differing:
            title = f"rope_scaling and rope_parameters disagree on {', '.join(differing)}"
            yield found("config_conflict", title, rope_scaling=both[0], rope_parameters=both[1])
    theta = config.get("rope_theta")
    for settings in both:
        yield from _settings(settings, config)
        inner = settings.get("rope_theta")
        if theta is not None and inner is not None and theta != inner:
            title = f"rope_theta is {_shown(theta)} at the top and {_shown(inner)} in the rope settings"
            yield found("config_conflict", title, top=theta, nested=inner)


def _shown(value: float | list[float]) -> str:
    return str(value)[:40] if isinstance(value, list) else f"{value:g}"


def _settings(settings: Document, config: Document) -> Iterator[Finding]:
    for key, inner in settings.items():
        if key not in ROPE and isinstance(inner, dict):  # one entry per kind of attention
            yield from _settings(inner, config)
    old, new = settings.get("type"), settings.get("rope_type")
    kind = new or old
    if old and new and old != new and {old, new} != {"su", "longrope"} and "mrope" not in {old, new}:
        references = ["https://github.com/vllm-project/vllm/issues/10293"]
        title = f"rope_scaling has type {old!r} and rope_type {new!r}: versions read one or the other"
        yield found("config_conflict", title, references=references, type=old, rope_type=new)
    if not kind:
        return
    if kind not in _TYPES:
        yield warned("config_conflict", f"rope type {kind[:40]!r} is not one that engines know", rope_type=kind[:40])
    factor = settings.get("factor")
    if kind in _NEEDS_FACTOR and (factor is None or factor < 1):
        given = "gives none" if factor is None else f"gives {factor:g}"
        title = f"rope type {kind} needs a factor of at least 1, the config {given}"
        yield found("config_conflict", title, factor=factor)
    lacking = [k for k in _LLAMA3 if settings.get(k) is None] if kind == "llama3" else []
    if lacking:
        yield found("config_conflict", f"rope type llama3 lacks {', '.join(lacking)}", missing=lacking)
    if kind in {"longrope", "su"}:
        yield from _longrope(settings, config)
    original, limit = settings.get("original_max_position_embeddings"), config.get("max_position_embeddings")
    if original and limit and original > limit:
        title = f"original_max_position_embeddings {original} is beyond max_position_embeddings {limit}"
        yield found("config_conflict", title, original=original, limit=limit)


def _longrope(settings: Document, config: Document) -> Iterator[Finding]:
    d, partial = (Dims(config), config.get("partial_rotary_factor") or settings.get("partial_rotary_factor") or 1.0)
    rotary = d.get("qk_rope_head_dim") or int(d.head_dim * partial)
    for key in ("short_factor", "long_factor"):
        factors = settings.get(key)
        if factors is None:
            yield found("config_conflict", f"rope type longrope lacks {key}", missing=key)
        elif rotary and len(factors) != rotary // 2:
            title = f"{key} has {len(factors)} entries, {rotary} rotary dimensions need {rotary // 2}"
            yield found("config_conflict", title, key=key, entries=len(factors), needed=rotary // 2)


# -----------------------------------------------------------------------------

NAME = "generation_config.json"


def check_generation(checkpoint: Checkpoint) -> Iterator[Finding]:
    """A generation config, whose sampling settings a server takes over, that is missing, broken, or hides a fault."""
    document = checkpoint.document(NAME)
    if isinstance(document, BrokenDocument):
        yield found("config_conflict", f"{NAME} cannot be read: {document.reason}", path=NAME)
    elif document is None and checkpoint.config.get("architectures") and not is_draft(checkpoint):
        title = f"no {NAME}: servers fall back on their own sampling defaults and on config.json's end tokens"
        yield warned("config_conflict", title, path=NAME)
    penalty = checkpoint.object(NAME).get("repetition_penalty") or 1
    if penalty >= 1.2:
        title = f"{NAME} sets repetition_penalty to {penalty:g}, which hides loops of a broken model"
        yield warned("config_conflict", title, repetition_penalty=penalty)
