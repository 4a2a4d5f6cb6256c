"""Weights of a model rounded to levels after a rotation, row by row.

Each row of a linear layer is cut into blocks of `block` inputs (a power of two; the last is
padded with zeros). A block w becomes z = √n R w / ‖w‖ with R random signs and an orthonormal
Hadamard matrix; the coordinates of z are nearly Gaussian and get the 2^b Lloyd-Max levels; the
stored fp16 factor gives the decoded block the least squared error.
"""

from __future__ import annotations

from typing import Any

import torch

from assay.errors import UsageError
from assay_lab.quantisation.hadamard import Rotation
from assay_lab.quantisation.layers import replace_weights
from assay_lab.quantisation.levels import gaussian_levels
from assay_lab.quantisation.packing import packed_bytes


def polar_round_trip(
    weight: torch.Tensor, bits: int, block: int = 128, seed: int = 1
) -> torch.Tensor:
    """`weight` [out, in] as its codes decode, in its own type."""
    _check_format(bits, block)
    width = weight.shape[1]
    padded = torch.nn.functional.pad(weight.float(), (0, -width % block)).unflatten(-1, (-1, block))
    norm = padded.norm(dim=-1, keepdim=True)
    rotation = Rotation(block, seed)
    z = rotation.forward(padded) * (block**0.5 / norm.clamp_min(1e-30))
    levels = torch.tensor(gaussian_levels(2**bits), dtype=torch.float32, device=weight.device)
    shape = levels[torch.bucketize(z, (levels[1:] + levels[:-1]) / 2)]
    # ⟨w, R⁻¹ẑ⟩ / ‖ẑ‖², in the rotated frame.
    factor = (
        (shape * z).sum(-1, keepdim=True) / shape.square().sum(-1, keepdim=True) * norm / block**0.5
    )
    half = factor.clamp(-65504, 65504).half().float()
    back: torch.Tensor = rotation.inverse(shape * half).flatten(1)[:, :width]
    return back.to(weight.dtype)


def polar_bytes(rows: int, width: int, bits: int, block: int = 128) -> int:
    """Stored bytes of a [rows, width] weight: packed levels of whole blocks and 2 bytes a block."""
    blocks = rows * -(-width // block)
    return packed_bytes(blocks * block, bits) + 2 * blocks


def polar_quantise(model: Any, bits: int, block: int = 128, seed: int = 1) -> int:
    """Replace the weights of every linear layer but the output head; returns the bytes of all
    parameters.
    """
    _check_format(bits, block)
    return replace_weights(
        model,
        lambda weight: polar_round_trip(weight, bits, block, seed),
        lambda weight: polar_bytes(weight.shape[0], weight.shape[1], bits, block),
    )


def _check_format(bits: int, block: int) -> None:
    if not 2 <= bits <= 8 or block < 2 or block & (block - 1):
        raise UsageError(
            f"polar(bits={bits}, block={block}): bits is 2 to 8 and block a power of two",
            finding_id="fidelity.usage",
        )
