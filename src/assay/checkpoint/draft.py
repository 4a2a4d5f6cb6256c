"""A separate draft (EAGLE, EAGLE-3, DFlash and its kin) against itself and against the target that
it drafts for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from assay.checkpoint.document_types import Document
from assay.checkpoint.findings import found, warned
from assay.checkpoint.peers import holes_among_peers
from assay.checkpoint.subject import Checkpoint
from assay.checkpoint.tensors import Tensor
from assay.verdict import Finding

Kind = Literal["eagle", "eagle3", "dflash", "dspark"]
_MARKS: tuple[tuple[str, Kind], ...] = (
    ("eagle3", "eagle3"),
    ("eagle", "eagle"),
    ("dspark", "dspark"),
    ("dflash", "dflash"),
    ("lilicorr", "dflash"),
    ("museglimmerassistant", "dflash"),
)
"""Part of an architecture's name (or of `speculators_model_type`), in lower case, and the kind it
stands for.
"""


@dataclass(frozen=True)
class Layers:
    """The target's layers whose hidden states a draft reads.

    `key` names them in the config; `first` is the id of the first layer's output: EAGLE-3 counts
    the embedding as 0, DFlash counts layers from 0 (vLLM 0.32 adds 1 to its ids).
    """

    key: str
    ids: tuple[int, ...]
    first: int


def draft_kind(checkpoint: Checkpoint) -> Kind | None:
    """What kind of draft this is, by its architecture, its settings or its tensors; None for a
    whole model.
    """
    config = checkpoint.config
    names = [*(config.get("architectures") or ()), str(config.get("speculators_model_type") or "")]
    for mark, kind in _MARKS:
        if any(
            mark in n.lower().replace("-", "") and not n.endswith("ConditionalGeneration")
            for n in names
        ):
            mapped = _named(checkpoint, "d2t") is not None or config.get("draft_vocab_size")
            return "eagle3" if kind == "eagle" and mapped else kind
    if config.get("dflash_config"):
        return "dflash"
    if _named(checkpoint, "d2t") is not None:
        return "eagle3"
    if _named(checkpoint, "fc.weight") is not None:
        return (
            "dflash"
            if config.get("target_layer_ids")
            else "eagle3"
            if config.get("draft_vocab_size")
            else "eagle"
        )
    return None


def is_draft(checkpoint: Checkpoint) -> bool:
    """Whether this is a draft that cannot be served alone."""
    return draft_kind(checkpoint) is not None


def _named(checkpoint: Checkpoint, name: str) -> Tensor | None:
    places = (name, f"model.{name}", f"encoder.{name}")
    return next((checkpoint.tensors[n] for n in places if n in checkpoint.tensors), None)


def read_layers(config: Document) -> Layers | None:
    """The target's layers that the draft reads, in vLLM's order of keys; None where the config
    names none.
    """
    eagle, dflash = config.get("eagle_config") or {}, config.get("dflash_config") or {}
    places = [
        ("eagle_aux_hidden_state_layer_ids", config.get("eagle_aux_hidden_state_layer_ids"), 1),
        (
            "eagle_config.eagle_aux_hidden_state_layer_ids",
            eagle.get("eagle_aux_hidden_state_layer_ids"),
            1,
        ),
        ("aux_hidden_state_layer_ids", config.get("aux_hidden_state_layer_ids"), 1),
        ("dflash_config.target_layer_ids", dflash.get("target_layer_ids"), 0),
        ("dspark_target_layer_ids", config.get("dspark_target_layer_ids"), 0),
        ("target_layer_ids", config.get("target_layer_ids"), 0),
        ("dflash_config.layer_ids", dflash.get("layer_ids"), 1),
        ("eagle_config.layer_ids", eagle.get("layer_ids"), 1),
    ]
    return next((Layers(key, tuple(ids), first) for key, ids, first in places if ids), None)


def hidden_states(config: Document, kind: Kind) -> int:
    """How many hidden states of the target `fc` takes in: those that the config lists, else the
    kind's habit.
    """
    layers = read_layers(config)
    if kind in {"dflash", "dspark"}:
        return len(layers.ids) if layers else int(config.get("num_hidden_layers") or 1)
    return int(config.get("num_aux_hidden_states") or (len(layers.ids) if layers else 3))


def check_draft(draft: Checkpoint, target: Checkpoint | None) -> Iterator[Finding]:
    """Findings on a draft's own shapes, and on the pair where the target is known."""
    kind, config = draft_kind(draft) or "eagle", draft.text_config | draft.config
    hidden, vocab = config.get("hidden_size"), config.get("vocab_size")
    read = config.get("target_hidden_size") or hidden
    if target is not None:
        yield from _pair(draft, kind, target)
        read = config.get("target_hidden_size") or target.dims("hidden_size") or hidden
        vocab = target.dims("vocab_size") or vocab
    entry = _named(draft, "fc.weight")
    if entry is not None and hidden and read and len(entry.shape) == 2:
        count = hidden_states(config, kind)
        wanted = hidden + read if kind == "eagle" else read * count
        if entry.shape != (hidden, wanted):
            parts = (
                "embedding and hidden state"
                if kind == "eagle"
                else f"{count} hidden states of {read}"
            )
            title = f"{entry.name} is {list(entry.shape)}; {parts} need {[hidden, wanted]}"
            causes = ["the draft was trained for another target or for other auxiliary layers"]
            yield found(
                "draft_mismatch", title, causes=causes, tensor=entry.name, shape=entry.shape
            )
    yield from _layer_ids(config, target)
    yield from _missing(draft, kind)
    yield from _attention(draft, kind, hidden)
    yield from _vocabulary(draft, config, kind, vocab)
    yield from holes_among_peers(draft)


def _layer_ids(config: Document, target: Checkpoint | None) -> Iterator[Finding]:
    layers = read_layers(config)
    depth = (target.dims("num_hidden_layers") if target is not None else None) or config.get(
        "num_target_layers"
    )
    if layers is None:
        return
    outside = [i for i in layers.ids if depth and i >= depth + layers.first]
    causes = ["the draft belongs to a deeper target", "the list was typed for another model"]
    if outside:
        title = f"{layers.key} names layer {outside[0]} of a target with {depth} layers"
        yield found("draft_mismatch", title, causes=causes, ids=layers.ids, target_layers=depth)
    if len(set(layers.ids)) < len(layers.ids):
        title = f"{layers.key} names a layer twice: {list(layers.ids)}"
        detail = "vLLM reads such a layer once, and then finds fc wider than what it has read."
        yield warned("draft_mismatch", title, detail=detail, causes=causes[1:], ids=layers.ids)


_LLAMA_LAYER = (
    "hidden_norm",
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def _missing(draft: Checkpoint, kind: Kind) -> Iterator[Finding]:
    """Tensors without which an EAGLE-3 head of Llama's layout drafts from random numbers; those
    shared by the target may miss.
    """
    if kind != "eagle3" or "LlamaForCausalLMEagle3" not in (
        draft.config.get("architectures") or ()
    ):
        return
    layer = "midlayer" if any("midlayer." in name for name in draft.tensors) else "layers.0"
    stems = ["fc", "norm", *(f"{layer}.{part}" for part in _LLAMA_LAYER)]
    lost = [
        s
        for s in stems
        if not any(name.startswith((f"{s}.", f"model.{s}.")) for name in draft.tensors)
    ]
    if lost:
        title = f"the draft has no {lost[0]}" + (
            f" and {len(lost) - 1} more tensors" if lost[1:] else ""
        )
        causes = [
            "they were left out when the draft was saved or quantised",
            "they have names that no engine reads",
        ]
        yield found("tensor_missing", title, causes=causes, missing=lost)


def _attention(draft: Checkpoint, kind: Kind, hidden: int | None) -> Iterator[Finding]:
    """EAGLE-3's first layer attends over embedding and hidden state side by side; the others' over
    one of that width.
    """
    for layer in ("midlayer", "layers.0"):
        query = _named(draft, f"{layer}.self_attn.q_proj.weight")
        if query is None or len(query.shape) != 2 or not hidden:
            continue
        wanted = 2 * hidden if kind == "eagle3" else hidden
        if query.shape[1] != wanted:
            name = {"eagle": "EAGLE", "eagle3": "EAGLE-3", "dflash": "DFlash", "dspark": "DSpark"}[
                kind
            ]
            title = (
                f"{query.name} reads {query.shape[1]} values, the first layer of {name} reads"
                f" {wanted}"
            )
            causes = [
                "the draft is of another kind than its config says",
                "its hidden size is another",
            ]
            yield found(
                "draft_mismatch", title, causes=causes, tensor=query.name, shape=query.shape
            )


def _vocabulary(
    draft: Checkpoint, config: Document, kind: Kind, vocab: int | None
) -> Iterator[Finding]:
    small = config.get("draft_vocab_size") or config.get("vocab_size")
    mask = (config.get("dflash_config") or {}).get("mask_token_id", config.get("mask_token_id"))
    if mask is not None and vocab and mask >= vocab:
        title = f"mask_token_id {mask} is beyond the {vocab} tokens of the vocabulary"
        yield found("draft_mismatch", title, mask_token_id=mask, vocab_size=vocab)
    for name, length in (("d2t", small), ("t2d", vocab), ("lm_head.weight", small)):
        tensor = _named(draft, name)
        if tensor is not None and length and tensor.shape[:1] != (length,):
            entries = tensor.shape[0] if tensor.shape else 0
            title = f"{name} of the draft has {entries} entries, it needs {length}"
            causes = ["the draft belongs to another target or another draft vocabulary"]
            yield found(
                "draft_mismatch", title, causes=causes, tensor=tensor.name, shape=tensor.shape
            )
    if vocab and small and small < vocab and _named(draft, "d2t") is None and kind != "eagle":
        title = f"the draft predicts {small} of {vocab} tokens, but has no d2t map"
        yield found("draft_mismatch", title, draft_vocab_size=small, vocab_size=vocab)


def _pair(draft: Checkpoint, kind: Kind, target: Checkpoint) -> Iterator[Finding]:
    config = draft.text_config | draft.config
    pairs = (
        ("vocab_size", config.get("vocab_size"), target.dims("vocab_size")),
        ("hidden_size", config.get("target_hidden_size"), target.dims("hidden_size")),
        ("num_hidden_layers", config.get("num_target_layers"), target.dims("num_hidden_layers")),
    )
    causes = ["the draft belongs to another model"]
    for name, own, other in pairs:
        if own and other and own != other:
            title = f"the draft is for a target with {name} {own}, this target has {other}"
            yield found("draft_mismatch", title, causes=causes, draft=own, target=other)
    own, other = config.get("hidden_size"), target.dims("hidden_size")
    if kind == "eagle" and not config.get("target_hidden_size") and own and other and own != other:
        title = f"the draft reads hidden states of {own}, the target gives {other}"
        yield found("draft_mismatch", title, causes=causes, draft=own, target=other)
