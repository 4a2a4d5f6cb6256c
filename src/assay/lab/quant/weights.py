"""The linear layers of a model of transformers, whose weights a quantisation replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from assay.errors import UsageError
from assay.lab.quant.levels import Rotation, gaussian_levels, packed_bytes


def linear_layers(model: Any) -> list[Any]:
    """The linear layers but the output head; a weight that several share is named once."""
    head = model.get_output_embeddings()
    found: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            found.setdefault(id(module.weight), module)
    return list(found.values())


def replace_weights(
    model: Any,
    round_trip: Callable[[torch.Tensor], torch.Tensor],
    stored_bytes: Callable[[torch.Tensor], int],
) -> int:
    """Put every linear layer's weight through `round_trip` in place.

    Returns the bytes of all parameters: `stored_bytes` of the replaced ones, the others as they are held.
    """
    total: int = 0
    counted = set[int]()
    with torch.no_grad():
        for module in linear_layers(model):
            module.weight.copy_(round_trip(module.weight))
            total += stored_bytes(module.weight)
            counted.add(id(module.weight))
    rest = {id(p): p for p in model.parameters() if id(p) not in counted}
    total += sum(p.numel() * p.element_size() for p in rest.values())
    return total


# Weights in Hadamard-rotated blocks with Lloyd-Max levels and one norm a block, the PolarQuant way.
#
# Each row of a linear layer is cut into blocks of `block` inputs (a power of two; the last is padded with zeros). A block
# w becomes z = √n R w / ‖w‖ with R random signs and an orthonormal Hadamard matrix; the coordinates of z are nearly
# Gaussian and get the 2^b Lloyd-Max levels; the stored fp16 factor gives the decoded block the least squared error.


def polar_round_trip(weight: torch.Tensor, bits: int, block: int = 128, seed: int = 1) -> torch.Tensor:
    """`weight` [out, in] as its codes decode, in its own type."""
    _check(bits, block)
    width = weight.shape[1]
    padded = torch.nn.functional.pad(weight.float(), (0, -width % block)).unflatten(-1, (-1, block))
    norm = padded.norm(dim=-1, keepdim=True)
    rotation = Rotation(block, seed)
    z = rotation.forward(padded) * (block**0.5 / norm.clamp_min(1e-30))
    levels = torch.tensor(gaussian_levels(2**bits), dtype=torch.float32, device=weight.device)
    shape = levels[torch.bucketize(z, (levels[1:] + levels[:-1]) / 2)]
    # ⟨w, R⁻¹ẑ⟩ / ‖ẑ‖², in the rotated frame.
    factor = (shape * z).sum(-1, keepdim=True) / shape.square().sum(-1, keepdim=True) * norm / block**0.5
    half = factor.clamp(-65504, 65504).half().float()
    back: torch.Tensor = rotation.inverse(shape * half).flatten(1)[:, :width]
    return back.to(weight.dtype)


def polar_bytes(rows: int, width: int, bits: int, block: int = 128) -> int:
    """Stored bytes of a [rows, width] weight: packed levels of whole blocks and 2 bytes a block."""
    blocks = rows * -(-width // block)
    return packed_bytes(blocks * block, bits) + 2 * blocks


def polar_quantise(model: Any, bits: int, block: int = 128, seed: int = 1) -> int:
    """Replace the weights of every linear layer but the output head; returns the bytes of all parameters."""
    _check(bits, block)
    return replace_weights(
        model,
        lambda weight: polar_round_trip(weight, bits, block, seed),
        lambda weight: polar_bytes(weight.shape[0], weight.shape[1], bits, block),
    )


@contextmanager
def polar_weights(model: Any, bits: int, block: int = 128, seed: int = 1) -> Iterator[int]:
    """`polar_quantise` for the time of the context, which gives the stored bytes; the weights come back after it."""
    kept = [(module, module.weight.detach().clone()) for module in linear_layers(model)]
    try:
        yield polar_quantise(model, bits, block, seed)
    finally:
        with torch.no_grad():
            for module, weight in kept:
                module.weight.copy_(weight)


def _check(bits: int, block: int) -> None:
    if not 2 <= bits <= 8 or block < 2 or block & (block - 1):
        raise UsageError(
            f"polar(bits={bits}, block={block}): bits is 2 to 8 and block a power of two",
            finding_id="fidelity.usage",
        )


# Round-to-nearest integer weights, the plainest quantisation: a control, and a candidate to compare with.
#
# Each group of `group` weights along the input of a linear layer has one scale (and, asymmetric, one zero point):
# ŵ = s · clamp(round(w / s) + z, 0, 2ᵇ − 1) − s · z, with s and z from the smallest and largest weight of the group.
# With a real minimum m instead of a rounded zero point (llama.cpp's Q4_1): ŵ = s · round((w − m) / s) + m.


def quantise_dequantise(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool = False, minimum: bool = False
) -> torch.Tensor:
    """`weight` [out, in] on the integer grid, in its own type. The last group of a row may be shorter.

    `minimum` keeps the smallest weight of a group as it is, in place of a zero point that is one of the levels.
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
    """Bytes of the codes, packed, with an fp16 scale a group and, asymmetric, a zero point of `bits` or an fp16 minimum."""
    rows, width = weight.shape
    groups = -(-width // group)
    extra = 16 + (0 if symmetric else 16 if minimum else bits)
    size: int = rows * (-(-width * bits // 8) + -(-groups * extra // 8))
    return size


def quantise_model(
    model: Any, bits: int = 4, group: int = 128, symmetric: bool = False, minimum: bool = False
) -> int:
    """Round every linear layer but the output head of `model` in place; returns the bytes of all its parameters.

    UsageError for a width that is not 1 … 8 bits, a group below 1, or a symmetric grid with a minimum.
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
