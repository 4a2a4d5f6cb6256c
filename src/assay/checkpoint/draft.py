"""A separate draft (EAGLE, EAGLE-3) against the target it is to draft for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from assay.checkpoint.findings import found
from assay.checkpoint.subject import Checkpoint
from assay.checkpoint.tensors import Tensor
from assay.verdict import Finding


def is_draft(checkpoint: Checkpoint) -> bool:
    """Whether this is an EAGLE-style draft: it says so, or has its entry projection and vocabulary maps."""
    names = checkpoint.config.get("architectures") or []
    named = any(isinstance(n, str) and "eagle" in n.lower() for n in names)
    return named or _named(checkpoint, "fc.weight") is not None or _named(checkpoint, "d2t") is not None


def _named(checkpoint: Checkpoint, name: str) -> Tensor | None:
    return checkpoint.tensors.get(name) or checkpoint.tensors.get(f"model.{name}")


def aux_layers(config: dict[str, Any]) -> int:
    """How many of the target's hidden states EAGLE-3 concatenates (3 unless the config lists them)."""
    count = config.get("num_aux_hidden_states")
    if type(count) is int and count > 0:
        return count
    eagle = config.get("eagle_config")
    ids = eagle.get("eagle_aux_hidden_state_layer_ids") if isinstance(eagle, dict) else None
    ids = ids or config.get("eagle_aux_hidden_state_layer_ids")
    return len(ids) if isinstance(ids, list) and ids else 3


def is_eagle3(checkpoint: Checkpoint) -> bool:
    """EAGLE-3 maps a smaller draft vocabulary and reads several hidden states; EAGLE reads one."""
    names = str(checkpoint.config.get("architectures")).lower()
    return (
        "eagle3" in names or _named(checkpoint, "d2t") is not None or "draft_vocab_size" in checkpoint.config
    )


def check_draft(draft: Checkpoint, target: Checkpoint | None) -> Iterator[Finding]:
    """Findings on a draft's own shapes, and on the pair where the target is known."""
    config = draft.config
    hidden, vocab = draft.dims("hidden_size"), draft.dims("vocab_size")
    target_hidden = config.get("target_hidden_size") or hidden
    if target is not None:
        yield from _pair(draft, target)
        target_hidden = config.get("target_hidden_size") or target.dims("hidden_size") or hidden
        vocab = target.dims("vocab_size") or vocab
    entry = _named(draft, "fc.weight")
    if entry is not None and hidden and type(target_hidden) is int and len(entry.shape) == 2:
        count = aux_layers(config)
        wanted = target_hidden * count if is_eagle3(draft) else hidden + target_hidden
        if entry.shape != (hidden, wanted):
            parts = (
                f"{count} hidden states of {target_hidden}"
                if is_eagle3(draft)
                else "embedding and hidden state"
            )
            title = f"fc.weight is {list(entry.shape)}; {parts} need {[hidden, wanted]}"
            causes = ["the draft was trained for another target or for other auxiliary layers"]
            yield found("draft_mismatch", title, causes=causes, tensor=entry.name, shape=entry.shape)
    yield from _attention(draft, hidden)
    yield from _vocabulary(draft, vocab)


def _attention(draft: Checkpoint, hidden: int | None) -> Iterator[Finding]:
    """EAGLE-3's first layer attends over embedding and hidden state side by side; EAGLE's over their projection."""
    for layer in ("midlayer", "layers.0"):
        query = _named(draft, f"{layer}.self_attn.q_proj.weight")
        if query is None or len(query.shape) != 2 or not hidden:
            continue
        wanted = 2 * hidden if is_eagle3(draft) else hidden
        if query.shape[1] != wanted:
            kind = "EAGLE-3" if is_eagle3(draft) else "EAGLE"
            title = f"{query.name} reads {query.shape[1]} values, the first layer of {kind} reads {wanted}"
            causes = ["the draft is of another kind than its config says", "its hidden size is another"]
            yield found("draft_mismatch", title, causes=causes, tensor=query.name, shape=query.shape)


def _vocabulary(draft: Checkpoint, vocab: int | None) -> Iterator[Finding]:
    small = draft.config.get("draft_vocab_size") or draft.dims("vocab_size")
    if type(small) is not int:
        return
    wanted = (("d2t", small), ("t2d", vocab), ("lm_head.weight", small))
    for name, length in wanted:
        tensor = _named(draft, name)
        if tensor is not None and length and tensor.shape[:1] != (length,):
            title = (
                f"{name} of the draft has {tensor.shape[0] if tensor.shape else 0} entries, it needs {length}"
            )
            causes = ["the draft belongs to another target or another draft vocabulary"]
            yield found("draft_mismatch", title, causes=causes, tensor=tensor.name, shape=tensor.shape)
    if vocab and small < vocab and _named(draft, "d2t") is None and is_eagle3(draft):
        title = f"the draft predicts {small} of {vocab} tokens, but has no d2t map"
        yield found("draft_mismatch", title, draft_vocab_size=small, vocab_size=vocab)


def _pair(draft: Checkpoint, target: Checkpoint) -> Iterator[Finding]:
    pairs = (
        ("vocab_size", draft.dims("vocab_size"), target.dims("vocab_size")),
        ("hidden_size", draft.config.get("target_hidden_size"), target.dims("hidden_size")),
    )
    for name, own, other in pairs:
        if type(own) is int and other and own != other:
            title = f"the draft is for a target with {name} {own}, this target has {other}"
            yield found(
                "draft_mismatch",
                title,
                causes=["the draft belongs to another model"],
                draft=own,
                target=other,
            )
    if "target_hidden_size" not in draft.config and not is_eagle3(draft):
        own, other = draft.dims("hidden_size"), target.dims("hidden_size")
        if own and other and own != other:
            title = f"the draft reads hidden states of {own}, the target gives {other}"
            yield found("draft_mismatch", title, draft=own, target=other)
