"""The strong plain codec: random signs, Hadamard rotation, Lloyd-Max levels, one fp16 norm a vector.

For each vector x of a head: z = √d R x / ‖x‖ has nearly Gaussian coordinates, which get the 2^b levels of the Gaussian
Lloyd-Max quantiser (the family of QuaRot, arXiv:2404.00456, PolarQuant and TurboQuant, arXiv:2504.19874). What is
stored for the norm is the factor g of the decoded vector g R⁻¹ ẑ:

    norm        g = ‖x‖ / ‖ẑ‖       the decoded vector is as long as x
    error       g = ⟨x, R⁻¹ẑ⟩/‖ẑ‖²  the least squared error
    projection  g = ‖x‖² / ⟨x, R⁻¹ẑ⟩ the decoded vector's projection on x is x

Fractional bits give the last coordinates one bit more; after the rotation all coordinates are alike.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal

import torch

from assay.environment import gives_the_same
from assay.lab.kv.codec import BlockCoder, Codec, Parts, Samples, Site, Stage
from assay.lab.kv.stream import EXPONENT, Field, from_halves, to_halves
from assay.lab.quant.hadamard import (
    Rotation,
    correct_sqrt,
    random_normal,
    signs_on,
    sum_of_squares,
)
from assay.lab.quant.levels import gaussian_levels, mixed_widths, nearest_level

if TYPE_CHECKING:
    from assay.lab.quant.hadamard_kernel import RoundTrip

MOST_LEVELS = 32
"""More levels than that are left to torch: the kernel compares with one after the other."""

_LARGEST = 32.0
"""No level of up to 1,024 is farther out than its root."""

_SAME: dict[tuple[int, int, int, torch.device, torch.dtype, torch.dtype], bool] = {}


@dataclass(frozen=True)
class Hadamard(Codec):
    """`bits` a value, 1 to 10, fractions allowed, and 16 bits a vector."""

    name = "hadamard"
    summary = "Hadamard rotation and Lloyd-Max levels, the strong baseline"
    bits: float = 4.0
    norm: Literal["norm", "error", "projection"] = "norm"
    seed: int = 1

    def __post_init__(self) -> None:
        mixed_widths(self.bits, 1)

    def fit(self, samples: Samples) -> BlockCoder:
        return HadamardCoder(samples.site, self)


class HadamardCoder(BlockCoder):
    """Codes: levels of the narrow coordinates, of the wide ones, factors as halves, their exponent."""

    def __init__(self, site: Site, codec: Hadamard) -> None:
        super().__init__(site)
        self._norm = codec.norm
        self._rotation = Rotation(site.head_dim, codec.seed)
        self._width, wide = mixed_widths(codec.bits, site.head_dim)
        self._narrow = site.head_dim - wide

    def quantise(self, x: torch.Tensor, side: torch.Tensor | None = None) -> Parts:
        _, low, high, factor = self._analysed(x.float())
        return low, high, *to_halves(factor)

    def stages(self, x: torch.Tensor, side: torch.Tensor | None = None) -> list[Stage]:
        """rotation loses nothing; levels with the factor unrounded; factor: as it is stored."""
        z, low, high, factor = self._analysed(x.float())
        levels = self._rotation.inverse(self._shape(low, high)) * factor[..., None]
        whole = self.dequantise((low, high, *to_halves(factor)))
        return [
            Stage("rotation", x.float(), z.flatten(2)),
            Stage("levels", levels),
            Stage("factor", whole),
        ]

    def _analysed(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated vectors of variance 1, their narrow and wide levels, and the factor, not yet rounded."""
        # Scaled by the largest value first: squares of huge values would overflow.
        top = x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30)
        unit = x / top
        length = correct_sqrt(sum_of_squares(unit, 1.0))[..., None].clamp_min(1e-30)
        z = self._rotation.forward(unit) * (self.site.head_dim**0.5 / length)
        low = nearest_level(z[..., : self._narrow], _levels(self._width, z.device))
        high = z[..., self._narrow :].to(low.dtype)
        if high.shape[-1]:
            high = nearest_level(z[..., self._narrow :], _levels(self._width + 1, z.device))
        shape = self._shape(low, high)
        square = sum_of_squares(shape, _LARGEST)
        if self._norm == "norm":
            return z, low, high, length[..., 0] / correct_sqrt(square) * top[..., 0]
        inner = (shape * z).sum(-1) * (length[..., 0] / self.site.head_dim**0.5)
        error = self._norm == "error"
        factor = inner / square if error else length[..., 0].square() / inner.clamp_min(1e-30)
        return z, low, high, factor * top[..., 0]

    def dequantise(self, parts: Parts, side: torch.Tensor | None = None) -> torch.Tensor:
        low, high, half, exponent = parts
        return self._rotation.inverse(self._shape(low, high)) * from_halves(half, exponent)[..., None]

    def reconstruct(self, x: torch.Tensor, side: torch.Tensor | None = None) -> torch.Tensor:
        found = self.round_trip(x.transpose(1, 2), torch.float32)
        return super().reconstruct(x, side) if found is None else found.transpose(1, 2)

    def alike(self, other: BlockCoder) -> bool:
        """Whether `other` makes the same of the same vectors."""
        return isinstance(other, HadamardCoder) and self._settings == other._settings

    @property
    def _settings(self) -> tuple[object, ...]:
        return self._norm, self._rotation.length, self._rotation.seeds, self._width, self._narrow

    def round_trip(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Blocks with tokens first, [blocks, tokens, heads, d], through one kernel, rounded to `dtype`.

        None where there is no GPU, or no kernel that gives the bits of torch there: both are compared once.
        """
        if not (x.is_cuda and x.stride(-1) == 1 and self._has_kernel):
            return None
        key = (self.site.head_dim, self._rotation.seeds[0], self._width, x.device, x.dtype, dtype)
        if key not in _SAME:
            _SAME[key] = self._same_by_both(x.device, x.dtype, dtype)
        return self._fused(x, dtype) if _SAME[key] else None

    @cached_property
    def _has_kernel(self) -> bool:
        whole = self._narrow == self.site.head_dim and len(self._rotation.seeds) == 1
        return self._norm == "norm" and whole and 2**self._width <= MOST_LEVELS

    def _fused(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return _kernel(self._rotation.seeds[0], self.site.head_dim, self._width, x.device)(x, dtype)

    def _same_by_both(self, device: torch.device, given: torch.dtype, dtype: torch.dtype) -> bool:
        """Compare kernel and torch on 8,192 vectors of many sizes, a zero among them."""
        if os.environ.get("ASSAY_NO_TRITON"):
            return False
        width = self.site.head_dim
        x = random_normal(7, 8192 * width).reshape(2, 2048, 2, width).to(device)
        x = (x * 10.0 ** (torch.arange(2048, device=device) % 9 - 4.0)[:, None, None]).to(given)
        x[:, 1] = 0
        by_torch = super().reconstruct

        def same() -> bool:
            wanted = by_torch(x.transpose(1, 2)).transpose(1, 2).to(dtype)
            return bool(torch.equal(self._fused(x, dtype), wanted))

        return gives_the_same("the fused kernel of hadamard", same)

    def layout(self, tokens: int) -> list[Field]:
        vectors = (self.site.heads, tokens)
        low = Field((*vectors, self._narrow), self._width)
        high = Field((*vectors, self.site.head_dim - self._narrow), self._width + 1)
        return [low, high, Field(vectors, torch.float16), EXPONENT]

    def _shape(self, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        narrow = _picked(_levels(self._width, low.device), low)
        if not high.shape[-1]:
            return narrow
        return torch.cat([narrow, _picked(_levels(self._width + 1, low.device), high)], dim=-1)


def fused_kernels() -> bool | None:
    """Whether the fused kernel is in use; None where no tensor was on a GPU yet."""
    return all(_SAME.values()) if _SAME else None


@lru_cache(maxsize=64)
def _kernel(seed: int, width: int, bits: int, device: torch.device) -> RoundTrip:
    from assay.lab.quant.hadamard_kernel import RoundTrip

    tables = signs_on(seed, width, device), _levels(bits, device), _edges(bits, device)
    return RoundTrip(*tables, largest=_LARGEST)


@lru_cache(maxsize=64)
def _levels(bits: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(gaussian_levels(2**bits), dtype=torch.float32, device=device)


@lru_cache(maxsize=64)
def _edges(bits: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        levels = _levels(bits, device)
        return (levels[1:] + levels[:-1]) / 2


def _picked(levels: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return levels.index_select(0, index.reshape(-1).int()).view(index.shape)
