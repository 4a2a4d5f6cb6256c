"""The tensors that a config promises, for the families of assay's own table."""

from __future__ import annotations

from dataclasses import dataclass

from assay.checkpoint.families import FAMILIES, TIED_BY_DEFAULT
from assay.checkpoint.pieces import Dims, Shape, fused_experts
from assay.checkpoint.subject import Checkpoint

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
