"""The codec `lattice`: points of D4 or E8 after a random Hadamard rotation, numbered and packed.

The idea of KakeyaLattice with a real rate. Each vector is rotated and scaled by its largest
coordinate, y = q R x / max |R x|, so that it
fills the cube |y| ≤ q; every 4 or 8 coordinates become the nearest lattice point inside, stored
as its number in ⌈log₂ points⌉ bits. The fp16 factor gives the decoded vector the least squared
error. A head_dim that is no multiple of the dimension is padded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from assay_lab.kv.codecs.base import BlockCoder, Capabilities, Codec, Parts
from assay_lab.kv.codecs.fields import EXPONENT, Field, from_halves, to_halves
from assay_lab.kv.codecs.lattice_points import dimension, nearest, number, point, points
from assay_lab.kv.codecs.samples import LayerStream, Samples
from assay_lab.quantisation.hadamard import Rotation


@dataclass(frozen=True)
class Lattice(Codec):
    """`q` is the half-width of the cube: the rate grows by one bit a value for every doubling."""

    name = "lattice"
    single_heads = True
    summary = "D4 or E8 points, numbered"
    lattice: Literal["D4", "E8"] = "E8"
    q: int = 10
    seed: int = 1

    def __post_init__(self) -> None:
        points(self.lattice, self.q)

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, token_by_token=True)

    def fit(self, samples: Samples) -> BlockCoder:
        return LatticeCoder(samples.site, self)


class LatticeCoder(BlockCoder):
    """Codes: numbers [blocks, heads, tokens, groups], factors as halves, exponents."""

    def __init__(self, site: LayerStream, codec: Lattice) -> None:
        super().__init__(site)
        self._lattice, self._q = codec.lattice, codec.q
        self._size = dimension(codec.lattice)
        self._groups = -(-site.head_dim // self._size)
        self._rotation = Rotation(site.head_dim, codec.seed)
        self._bits = (points(codec.lattice, codec.q) - 1).bit_length()

    def quantise(self, x: torch.Tensor, predictors: torch.Tensor | None = None) -> Parts:
        x = x.float()
        top = x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30)
        turned = self._padded(self._rotation.forward(x / top))
        scale = turned.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30) / self._q
        y = (turned / scale).clamp(-self._q, self._q)
        found = nearest(y.unflatten(-1, (self._groups, self._size)), self._lattice, self._q)
        flat = found.flatten(-2)
        factor = (flat * y).sum(-1) / flat.square().sum(-1).clamp_min(1e-30)
        half, exponent = to_halves(factor * scale[..., 0] * top[..., 0])
        return number(found, self._lattice, self._q), half, exponent

    def dequantise(self, parts: Parts, predictors: torch.Tensor | None = None) -> torch.Tensor:
        numbers, half, exponent = parts
        y = point(numbers.long(), self._lattice, self._q).flatten(-2)[..., : self.site.head_dim]
        return self._rotation.inverse(y) * from_halves(half, exponent)[..., None]

    def layout(self, tokens: int) -> list[Field]:
        vectors = (self.site.heads, tokens)
        return [
            Field((*vectors, self._groups), self._bits),
            Field(vectors, torch.float16),
            EXPONENT,
        ]

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, self._groups * self._size - x.shape[-1]))
