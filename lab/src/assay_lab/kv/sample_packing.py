"""Samples as a calibration file keeps them: rotated to uncorrelated channels, rounded,
Huffman-coded.

Each head's samples are rotated (KLT) and rounded to a sixteenth of the channel's standard
deviation. The error then has the covariance of the samples themselves, 1/3072 of it, along every
direction and in every metric. Outlying tokens (sinks) are kept as they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_STEP = 16.0
_LEAST = 4
"""Samples for each channel below which a KLT is not worth its bytes."""


def coded(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a calibration with the samples coded."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        enough = tensor.ndim == 3 and tensor.shape[1] >= _LEAST * tensor.shape[2]
        if name.endswith(("_k", "_v")) and name.startswith("layer_") and enough:
            found |= {f"{name}.{part}": value for part, value in coded_samples(tensor).items()}
        else:
            found[name] = tensor
    return found


def decoded(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a calibration, from those of its file."""
    names = {name.partition(".")[0] for name in tensors if "." in name}
    parts = {
        n: {k.partition(".")[2]: v for k, v in tensors.items() if k.startswith(f"{n}.")}
        for n in names
    }
    return {name: tensor for name, tensor in tensors.items() if "." not in name} | {
        name: decoded_samples(part) for name, part in parts.items()
    }


def coded_samples(samples: torch.Tensor) -> dict[str, torch.Tensor]:
    """Parts from which `decoded_samples` makes samples [heads, n, d] again."""
    import torch

    x = samples.float()
    size = x.square().sum((0, 2))
    usual = size <= 16 * size.median()
    mean = x[:, usual].mean(1, keepdim=True)
    centred = x - mean
    covariance = centred[:, usual].mT @ centred[:, usual] / max(1, int(usual.sum()) - 1)
    basis = torch.linalg.eigh(covariance.double()).eigenvectors.to(torch.float16).contiguous()
    z = torch.linalg.solve(
        basis.float(), centred.mT
    ).mT  # x = z basisᵀ, with the basis as it is stored
    step = z[:, usual].std(1, keepdim=True).clamp_min(1e-12) / _STEP
    q = (z / step).round()
    far = (q.abs() > 127).any((0, 2))
    raw = q.masked_fill(far[None, :, None], 0).to(torch.int8).numpy().tobytes()
    packer = zlib.compressobj(9, zlib.DEFLATED, 15, 9, zlib.Z_HUFFMAN_ONLY)
    packed = packer.compress(raw) + packer.flush()
    return {
        "basis": basis,
        "mean": mean,
        "step": step,
        "coded": torch.frombuffer(bytearray(packed), dtype=torch.uint8),
        "rows": far.nonzero().flatten().to(torch.int32),
        "exact": samples[:, far].contiguous(),
    }


def decoded_samples(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Samples [heads, n, d] in the type that they had; ValueError where the parts do not belong
    together.
    """
    import torch

    basis, rows = parts["basis"], parts["rows"].long()
    heads, width = basis.shape[:2]
    raw = zlib.decompress(parts["coded"].numpy().tobytes())
    q = torch.frombuffer(bytearray(raw), dtype=torch.int8).reshape(heads, -1, width)
    # In float64, so that machines that add in another order round to the same 16 bits.
    x = (q.double() * parts["step"].double()) @ basis.double().mT + parts["mean"].double()
    x = x.to(parts["exact"].dtype)
    x[:, rows] = parts["exact"]
    return x
