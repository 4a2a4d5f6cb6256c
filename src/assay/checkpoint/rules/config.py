"""Contradictions of config.json, in itself and with the tensors' shapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import takewhile

from assay.checkpoint.comparison import is_stored
from assay.checkpoint.expectation import head_name
from assay.checkpoint.families import FAMILIES
from assay.checkpoint.findings import found, warned
from assay.checkpoint.pieces import Dims
from assay.checkpoint.storage import weight_shape
from assay.checkpoint.subject import BrokenDocument, Checkpoint
from assay.verdict import Finding


def check_config(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Contradictions of config.json."""
    document = checkpoint.document("config.json")
    if isinstance(document, BrokenDocument):
        remedies = ["download config.json again"]
        yield found(
            "config_conflict", f"config.json cannot be read: {document.reason}", remedies=remedies
        )
    if not isinstance(document, dict):
        return
    for key in ("quantization_config", "compression_config"):
        if document.get(key) == {}:
            yield found(
                "quantization_conflict",
                f"config.json has an empty {key}: engines find no method in it",
            )
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
        yield found(
            "config_conflict",
            f"head_dim is 0; {d.heads} heads of {d.hidden} need {d.head_dim}",
            head_dim=0,
        )
        return
    if not d.get("head_dim") and not d.get("qk_nope_head_dim") and d.hidden % d.heads:
        title = (
            f"hidden_size {d.hidden} is not divisible by {d.heads} heads, and no head_dim is given"
        )
        yield found("config_conflict", title, hidden_size=d.hidden, num_attention_heads=d.heads)
        return
    if d.heads % d.kv_heads:
        title = f"{d.heads} query heads cannot share {d.kv_heads} key-value heads"
        yield found(
            "config_conflict", title, num_attention_heads=d.heads, num_key_value_heads=d.kv_heads
        )
        return
    layout = FAMILIES.get(checkpoint.model_type)
    for projection, count in (("q_proj", d.heads), ("k_proj", d.kv_heads)):
        # Every layout names its attention first; hundreds of experts need not be counted for it.
        wanted = {
            shape[0]
            for i in range(min(d.layers, 64))
            for name, shape in takewhile(
                lambda piece: ".experts." not in piece[0], layout(d, i) if layout else ()
            )
            if name == f"self_attn.{projection}.weight"
        }
        stored = _rows(checkpoint, projection)
        if len(stored) == 1 and len(wanted) == 1 and stored != wanted:
            (rows,), (expected,) = stored, wanted
            title = (
                f"every {projection} has {rows} rows; {count} heads of {d.head_dim} need {expected}"
            )
            causes = ["head_dim, or a number of heads, was changed in config.json"]
            fits = (
                rows * d.head_dim // expected
                if expected and rows * d.head_dim % expected == 0
                else None
            )
            remedies = [f"head_dim {fits} would fit"] if fits and projection == "q_proj" else []
            yield found(
                "config_conflict",
                title,
                causes=causes,
                remedies=remedies,
                rows=rows,
                expected=expected,
            )
            return


def _rows(checkpoint: Checkpoint, projection: str) -> set[int]:
    rows = set()
    for module, params in checkpoint.modules.items():
        if module.startswith(f"{checkpoint.prefix}layers.") and module.endswith(
            f".self_attn.{projection}"
        ):
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
        yield found(
            "config_conflict", title, causes=causes, num_hidden_layers=count, stored=extra[-1] + 1
        )


def _layer_types(checkpoint: Checkpoint) -> Iterator[Finding]:
    config = checkpoint.text_config
    types, count, window = (
        config.get("layer_types"),
        config.get("num_hidden_layers"),
        config.get("sliding_window"),
    )
    if not types:
        return
    if count and len(types) != count:
        title = f"layer_types names {len(types)} layers, num_hidden_layers is {count}"
        yield found("config_conflict", title, layer_types=len(types), num_hidden_layers=count)
    if (
        window
        and config.get("use_sliding_window") is not False
        and set(types) == {"full_attention"}
    ):
        title = f"sliding_window is {window}, but every layer attends in full"
        references = ["https://github.com/vllm-project/vllm/issues/49795"]
        yield warned("config_conflict", title, references=references, sliding_window=window)


def _embedding_rows(checkpoint: Checkpoint) -> Iterator[Finding]:
    """For families without a known layout; the others are held to all their shapes."""
    tensor, vocab = (
        checkpoint.tensors.get(f"{checkpoint.prefix}embed_tokens.weight"),
        checkpoint.dims("vocab_size"),
    )
    if checkpoint.model_type in FAMILIES or tensor is None or not vocab or tensor.dtype == "U32":
        return
    if len(tensor.shape) == 2 and tensor.shape[0] != vocab:
        title = f"the embedding has {tensor.shape[0]} rows, vocab_size is {vocab}"
        yield found("tensor_shape", title, tensor=tensor.name, shape=tensor.shape, vocab_size=vocab)


def _dtype(checkpoint: Checkpoint) -> Iterator[Finding]:
    places = (checkpoint.text_config, checkpoint.config)
    said = next(
        (v for config in places for key in ("dtype", "torch_dtype") if (v := config.get(key))), ""
    )
    stored = {
        t.dtype
        for t in checkpoint.tensors.values()
        if t.dtype in {"BF16", "F16"} and len(t.shape) == 2
    }
    if said.removeprefix("torch.") in {"float16", "half"} and stored == {"BF16"}:
        title = (
            "config.json says float16, the weights are bfloat16: values beyond 65504 overflow"
            " to inf"
        )
        references = ["https://github.com/vllm-project/vllm/issues/14126"]
        remedies = ["set dtype to bfloat16 in config.json, or serve with --dtype bfloat16"]
        yield warned(
            "config_conflict",
            title,
            remedies=remedies,
            references=references,
            dtype=said,
            stored="BF16",
        )


def _tie(checkpoint: Checkpoint) -> Iterator[Finding]:
    nested, top = (
        c.get("tie_word_embeddings") for c in (checkpoint.text_config, checkpoint.config)
    )
    if (
        None not in {nested, top}
        and nested != top
        and not is_stored(checkpoint, head_name(checkpoint))
    ):
        title = (
            f"tie_word_embeddings is {top} at the top and {nested} in the text config, and no head"
            " is stored"
        )
        references = ["https://github.com/huggingface/transformers/issues/43429"]
        yield found("config_conflict", title, references=references, top=top, nested=nested)
