"""A target changed in place: weights and KV cache as quantisation would leave them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from assay.errors import UsageError
from assay_lab.heads.prompts import HELD_OUT
from assay_lab.heads.text import Write, generate_texts
from assay_lab.quantisation.gptq import gptq_model
from assay_lab.quantisation.hadamard import Rotation
from assay_lab.quantisation.integers import quantise_dequantise
from assay_lab.quantisation.layers import replace_weights
from assay_lab.quantisation.levels import gaussian_levels
from assay_lab.quantisation.nearest import nearest_level
from assay_lab.quantisation.polar import polar_round_trip

Change = Callable[[torch.Tensor], torch.Tensor]


def fp8_rows(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, in] in e4m3 with one scale a row, as vLLM's own fp8 has it."""
    wide = weight.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 448).clamp_min(1e-12)
    return ((wide / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)


WEIGHTS: Mapping[str, Change] = {
    "fp8": fp8_rows,
    "int8": lambda w: quantise_dequantise(w, 8, w.shape[1], symmetric=True),
    "int4-g32": lambda w: quantise_dequantise(w, 4, 32),
    "int4-g128": lambda w: quantise_dequantise(w, 4, 128),
    "w4a16-g128": lambda w: quantise_dequantise(w, 4, 128, symmetric=True),
    "polar5": lambda w: polar_round_trip(w, 5),
    "polar4": lambda w: polar_round_trip(w, 4),
    "int3-g128": lambda w: quantise_dequantise(w, 3, 128),
    "int2-g32": lambda w: quantise_dequantise(w, 2, 32),
}
"""Formats of weights. The last two are controls: targets that are broken themselves."""
CALIBRATED: Mapping[str, tuple[int, int]] = {
    "gptq4-g32": (4, 32),
    "gptq4-g128": (4, 128),
    "gptq3-g128": (3, 128),
}
"""GPTQ with its bits and group, on text of the target's own."""
CALIBRATION = 64
"""Prompts whose answers GPTQ is calibrated on; none of them is held out."""


def _fp8(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


def _fp8_calibrated(x: torch.Tensor) -> torch.Tensor:
    """With one scale a head, of the largest value that is there."""
    wide = x.float()
    scale = (wide.abs().amax((0, 2, 3), keepdim=True) / 448).clamp_min(1e-12)
    return ((wide / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def _hadamard(bits: int) -> Change:
    """Lloyd-Max levels of the rotated token, scaled by its norm."""

    def change(x: torch.Tensor) -> torch.Tensor:
        wide, rotation = x.float(), Rotation(x.shape[-1], 1)
        norm = wide.norm(dim=-1, keepdim=True).clamp_min(1e-12) * x.shape[-1] ** -0.5
        levels = torch.tensor(gaussian_levels(2**bits), dtype=torch.float32, device=x.device)
        code = nearest_level(rotation.forward(wide / norm), levels).long()
        return (rotation.inverse(levels[code]) * norm).to(x.dtype)

    return change


CACHES: Mapping[str, Change] = {
    "fp8": _fp8,
    "fp8-calibrated": _fp8_calibrated,
    "hadamard4": _hadamard(4),
    "hadamard2": _hadamard(2),
}
"""What a KV cache makes of keys (after RoPE) and values [B, heads, T, D]."""
TARGETS = (
    "bf16",
    *WEIGHTS,
    *CALIBRATED,
    *(f"bf16+kv-{name}" for name in CACHES),
    "fp8+kv-fp8",
    "int4-g128+kv-fp8",
)
_READING: list[Change | None] = [None]


def _attention(module: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
    if change := _READING[0]:
        key, value = change(key), change(value)
    return sdpa_attention_forward(module, query, key, value, *rest, **more)


@contextmanager
def changed(
    target: Any, name: str, texts: Callable[[], Sequence[list[int]]] = list
) -> Iterator[None]:
    """The target with the weights and the cache of `name`, such as int4-g128+kv-fp8; as it was
    after it.

    `texts` gives the token ids that GPTQ is calibrated on. UsageError for an unknown name.
    """
    weights, _, cache = name.partition("+kv-")
    if weights not in {"bf16", *WEIGHTS, *CALIBRATED} or (cache and cache not in CACHES):
        raise UsageError(
            f"unknown target {name!r}", remedy=", ".join(TARGETS), finding_id="speculation.usage"
        )
    kept = (
        {n: p.detach().clone() for n, p in target.named_parameters()} if weights != "bf16" else {}
    )
    before = target.config._attn_implementation
    AttentionInterface.register("assay_read", _attention)
    AttentionMaskInterface.register("assay_read", sdpa_mask)
    try:
        if weights in CALIBRATED:
            gptq_model(target, texts(), *CALIBRATED[weights])
        elif weights != "bf16":
            replace_weights(target, WEIGHTS[weights], lambda w: 0)
        if cache:
            _READING[0] = CACHES[cache]
            target.set_attn_implementation("assay_read")
        yield
    finally:
        _READING[0] = None
        if cache:
            target.set_attn_implementation(before)
        with torch.no_grad():
            for n, p in target.named_parameters():
                if n in kept:
                    p.copy_(kept[n])


def calibration_texts(
    every: Sequence[tuple[str, list[int]]], write: Write, tokens: int
) -> list[list[int]]:
    """Prompts that are not held out, with the greedy answers of the unchanged target."""
    asked = every[1::HELD_OUT][:CALIBRATION]
    return [t.ids for t in generate_texts(asked, write, tokens, (0.0,), None, chunk=CALIBRATION)]
