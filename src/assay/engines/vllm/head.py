"""The output head of a model of vLLM, and the check that it gives the engine's own logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from assay.engines.scoring import Head
from assay.errors import AssayError

if TYPE_CHECKING:
    import torch

_PLAIN = frozenset({"UnquantizedEmbeddingMethod", "UnquantizedLinearMethod"})


def output_head(model: Any) -> Head:
    """The head of `model`, its rows of padding cut off. AssayError where there is none in plain numbers."""
    linear = getattr(model, "lm_head", None)
    processor = getattr(model, "logits_processor", None)
    if linear is None or processor is None:
        raise _no_head(model, "it has no lm_head with a logits processor")
    method = type(getattr(linear, "quant_method", None)).__name__
    if method not in _PLAIN or linear.weight.dim() != 2 or not linear.weight.numel():
        raise _no_head(model, f"its output head is quantised or packed ({method})")
    if processor.soft_cap is not None and processor.scale != 1.0:
        raise _no_head(model, "it both caps and scales its logits")
    size = int(processor.org_vocab_size)
    bias = getattr(linear, "bias", None)
    return Head(
        linear.weight.detach()[:size],
        None if bias is None else bias.detach()[:size],
        softcap=processor.soft_cap,
        scale=float(processor.scale),
    )


def check_head(model: Any, head: Head, states: torch.Tensor) -> None:
    """Compare the head with the engine's own logits on some states [n, d]; AssayError where they differ."""
    import torch

    own = model.compute_logits(states).float()
    rebuilt = head.logits(states)
    finite = torch.isfinite(own)
    tolerance = (
        4 * float(torch.finfo(states.dtype).eps) * float(own[finite].abs().max()) if finite.any() else 0.0
    )
    difference = float((own - rebuilt)[finite].abs().max()) if finite.any() else 0.0
    if own.shape != rebuilt.shape or not difference <= tolerance:
        raise AssayError(
            f"the logits of {type(model).__name__} cannot be rebuilt from its final states: they differ by {difference:.3g}",
            finding_id="fidelity.no_head",
            remedy="compare it through another engine (hf:, gguf:)",
            evidence={"max_difference": difference, "tolerance": tolerance},
        )


def _no_head(model: Any, why: str) -> AssayError:
    return AssayError(
        f"the logits of {type(model).__name__} cannot be rebuilt from its final states: {why}",
        finding_id="fidelity.no_head",
        remedy="compare it through another engine (hf:, gguf:)",
    )
