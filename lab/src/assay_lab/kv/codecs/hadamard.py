"""The codec `hadamard`: random signs, Hadamard rotation, Lloyd-Max levels, one fp16 norm a vector.

For each vector x of a head: z = √d R x / ‖x‖ has nearly Gaussian coordinates, which get the 2^b
levels of the Gaussian Lloyd-Max quantiser (the family of QuaRot, arXiv:2404.00456, PolarQuant and
TurboQuant, arXiv:2504.19874). What is stored for the norm is the factor g of the decoded vector g
R⁻¹ ẑ:

    norm        g = ‖x‖ / ‖ẑ‖       the decoded vector is as long as x
    error       g = ⟨x, R⁻¹ẑ⟩/‖ẑ‖²  the least squared error
    projection  g = ‖x‖² / ⟨x, R⁻¹ẑ⟩ the decoded vector's projection on x is x

Fractional bits give the last coordinates one bit more; after the rotation all coordinates are
alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

from assay_lab.kv.codecs.base import BlockCoder, Capabilities, Codec, Parts, Stage
from assay_lab.kv.codecs.fields import EXPONENT, Field, from_halves, to_halves
from assay_lab.kv.codecs.samples import LayerStream, Samples
from assay_lab.quantisation.hadamard import Rotation, lengths
from assay_lab.quantisation.levels import gaussian_levels, mixed_widths
from assay_lab.quantisation.nearest import nearest_level


@dataclass(frozen=True)
class Hadamard(Codec):
    """`bits` a value, 1 to 10, fractions allowed, and 16 bits a vector."""

    name = "hadamard"
    single_heads = True
    summary = "Hadamard rotation and Lloyd-Max levels, the strong baseline"
    bits: float = 4.0
    norm: Literal["norm", "error", "projection"] = "norm"
    seed: int = 1

    def __post_init__(self) -> None:
        mixed_widths(self.bits, 1)

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, token_by_token=True)

    def fit(self, samples: Samples) -> BlockCoder:
        return HadamardCoder(samples.site, self)


class HadamardCoder(BlockCoder):
    """Codes: levels of the narrow coordinates, of the wide ones, factors as halves, their
    exponent.
    """

    def __init__(self, site: LayerStream, codec: Hadamard) -> None:
        super().__init__(site)
        self._norm = codec.norm
        self._rotation = Rotation(site.head_dim, codec.seed)
        self._width, wide = mixed_widths(codec.bits, site.head_dim)
        self._narrow = site.head_dim - wide

    def quantise(self, x: torch.Tensor, predictors: torch.Tensor | None = None) -> Parts:
        _, low, high, factor = self._analysed(x.float())
        return low, high, *to_halves(factor)

    def stages(self, x: torch.Tensor, predictors: torch.Tensor | None = None) -> list[Stage]:
        """rotation loses nothing; levels with the factor unrounded; factor: as it is stored."""
        z, low, high, factor = self._analysed(x.float())
        levels = self._rotation.inverse(self._shape(low, high)) * factor[..., None]
        whole = self.dequantise((low, high, *to_halves(factor)))
        return [
            Stage("rotation", x.float(), z.flatten(2)),
            Stage("levels", levels),
            Stage("factor", whole),
        ]

    def _analysed(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated vectors of variance 1, their narrow and wide levels, and the factor, not yet
        rounded.
        """
        # Scaled by the largest value first: squares of huge values would overflow.
        top = x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30)
        unit = x / top
        length = lengths(unit)[..., None].clamp_min(1e-30)
        z = self._rotation.forward(unit) * (self.site.head_dim**0.5 / length)
        low = nearest_level(z[..., : self._narrow], _levels(self._width, z.device))
        high = z[..., self._narrow :]
        # No table where no place is wide: one bit more than the most may be too many.
        high = (
            nearest_level(high, _levels(self._width + 1, z.device))
            if high.shape[-1]
            else high.byte()
        )
        shape = self._shape(low, high)
        size = lengths(shape)
        if self._norm == "norm":
            return z, low, high, length[..., 0] / size * top[..., 0]
        inner = (shape * z).sum(-1) * (length[..., 0] / self.site.head_dim**0.5)
        error = self._norm == "error"
        factor = (
            inner / size.square() if error else length[..., 0].square() / inner.clamp_min(1e-30)
        )
        return z, low, high, factor * top[..., 0]

    def dequantise(self, parts: Parts, predictors: torch.Tensor | None = None) -> torch.Tensor:
        low, high, half, exponent = parts
        return (
            self._rotation.inverse(self._shape(low, high)) * from_halves(half, exponent)[..., None]
        )

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


@lru_cache(maxsize=64)
def _levels(bits: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(gaussian_levels(2**bits), dtype=torch.float32, device=device)


def _picked(levels: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return levels.index_select(0, index.reshape(-1).int()).view(index.shape)
