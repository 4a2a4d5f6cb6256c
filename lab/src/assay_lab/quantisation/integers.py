"""Weights of a model rounded to the nearest integer in groups: a control, and a candidate to
compare.

Each group of `group` weights along the input of a linear layer has one scale (and, asymmetric,
one zero point): ŵ = s · clamp(round(w / s) + z, 0, 2ᵇ − 1) − s · z, with s and z from the
smallest and largest weight of the group. With a real minimum m instead of a rounded zero point
(llama.cpp's Q4_1): ŵ = s · round((w − m) / s) + m.
"""

from __future__ import annotations

from typing import Any

import torch

from assay.errors import UsageError
from assay_lab.quantisation.layers import replace_weights


def quantise_dequantise(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool = False, minimum: bool = False
) -> torch.Tensor:
    """`weight` [out, in] on the integer grid, in its own type. The last group of a row may be
    shorter.

    `minimum` keeps the smallest weight of a group as it is, in place of a zero point that is one of
    the levels.
    """
    rows, width = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -width % group))
    grouped = padded.reshape(rows, -1, group)
    # Padding must not widen the range of the last group.
    real = torch.nn.functional.pad(
        torch.ones(width, dtype=torch.bool, device=weight.device), (0, -width % group)
    )
    real = real.reshape(1, -1, group).expand(grouped.shape)
    levels = 2**bits - 1
    if symmetric:
        top = 2 ** (bits - 1) - 1
        scale = grouped.abs().amax(-1, keepdim=True) / max(top, 1)
        codes = torch.round(grouped / scale.clamp_min(1e-30)).clamp(-top - 1, top)
        result = codes * scale
    elif minimum:
        lo = torch.where(real, grouped, torch.inf).amin(-1, keepdim=True)
        hi = torch.where(real, grouped, -torch.inf).amax(-1, keepdim=True)
        scale = ((hi - lo) / levels).clamp_min(1e-30)
        result = torch.round((grouped - lo) / scale) * scale + lo
    else:
        lo = torch.where(real, grouped, torch.inf).amin(-1, keepdim=True).clamp_max(0.0)
        hi = torch.where(real, grouped, -torch.inf).amax(-1, keepdim=True).clamp_min(0.0)
        scale = ((hi - lo) / levels).clamp_min(1e-30)
        zero = torch.round(-lo / scale)
        codes = (torch.round(grouped / scale) + zero).clamp(0, levels)
        result = (codes - zero) * scale
    return result.reshape(rows, -1)[:, :width].to(weight.dtype)


def stored_bytes(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool = False, minimum: bool = False
) -> int:
    """Bytes of the codes, packed, with an fp16 scale a group and, asymmetric, a zero point of
    `bits` or an fp16 minimum.
    """
    rows, width = weight.shape
    groups = -(-width // group)
    extra = 16 + (0 if symmetric else 16 if minimum else bits)
    size: int = rows * (-(-width * bits // 8) + -(-groups * extra // 8))
    return size


def quantise_model(
    model: Any, bits: int = 4, group: int = 128, symmetric: bool = False, minimum: bool = False
) -> int:
    """Round every linear layer but the output head of `model` in place; returns the bytes of all
    its parameters.

    UsageError for a width that is not 1 … 8 bits, a group below 1, or a symmetric grid with a
    minimum.
    """
    if not 1 <= bits <= 8 or group < 1 or (symmetric and minimum):
        raise UsageError(
            f"int(bits={bits}, group={group}): bits must be 1 to 8 and group at least 1; "
            "symmetric and minimum exclude each other",
            finding_id="fidelity.usage",
        )
    kind = {"symmetric": symmetric, "minimum": minimum}
    return replace_weights(
        model,
        lambda weight: quantise_dequantise(weight, bits, group, **kind),
        lambda weight: stored_bytes(weight, bits, group, **kind),
    )
