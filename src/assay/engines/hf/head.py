"""The output head of a causal model of transformers, checked against the model's own logits."""

from __future__ import annotations

from typing import Any

from assay.engines.scoring import Head
from assay.errors import AssayError


def output_head(model: Any) -> Head:
    """The head of `model`. AssayError where its logits are not those that the model itself computes.

    Besides the matrix a model may scale its logits (Cohere's `logit_scale`, Granite's `logits_scaling`) or cap them
    (Gemma 2's `final_logit_softcapping`).
    """
    linear = model.get_output_embeddings()
    if linear is None:
        raise AssayError(
            f"{type(model).__name__} has no output head that states could be put through",
            finding_id="fidelity.no_head",
            remedy="compare causal language models",
        )
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    if divisor := getattr(config, "logits_scaling", None):
        scale /= float(divisor)
    head = Head(
        linear.weight.detach(),
        None if linear.bias is None else linear.bias.detach(),
        softcap=getattr(config, "final_logit_softcapping", None),
        scale=scale,
    )
    _check(model, head)
    return head


def _check(model: Any, head: Head) -> None:
    """Compare the head with the model's own logits on a few tokens."""
    import torch

    ids = torch.arange(1, 9, device=model.device).unsqueeze(0)
    with torch.inference_mode():
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        own = model(input_ids=ids, use_cache=False).logits[0].float()
        rebuilt = head.logits(states)
    # One unit of the logits' own rounding, relative to the largest of them.
    tolerance = 4 * float(torch.finfo(model.dtype).eps) * float(own.abs().max())
    difference = float((own - rebuilt).abs().max())
    if not difference <= tolerance and bool(torch.isfinite(own).all()):
        raise AssayError(
            f"the logits of {type(model).__name__} cannot be rebuilt from its final states: they differ by {difference:.3g}",
            finding_id="fidelity.no_head",
            remedy="compare it through another engine (vllm:, gguf:)",
            evidence={"max_difference": difference, "tolerance": tolerance},
        )
