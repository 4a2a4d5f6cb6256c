"""Points of D4 or E8 after a random Hadamard rotation, numbered and packed: the idea of KakeyaLattice with a real rate.

Each vector is rotated and scaled by its largest coordinate, y = q R x / max |R x|, so that it fills the cube |y| ≤ q;
every 4 or 8 coordinates become the nearest lattice point inside, stored as its number in ⌈log₂ points⌉ bits. The fp16
factor gives the decoded vector the least squared error. A head_dim that is no multiple of the dimension is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from assay.kv.codec import BlockCoder, Codec, Parts, Samples, Site
from assay.kv.payload import as_bytes, from_halves, join_fields, split_fields, to_halves, typed
from assay.quant.hadamard import Rotation
from assay.quant.lattice import dimension, nearest, number, point, points
from assay.quant.packing import pack, packed_bytes, unpack

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Lattice(Codec):
    """`q` is the half-width of the cube: the rate grows by one bit a value for every doubling."""

    name = "lattice"
    summary = "D4 or E8 points, numbered"
    lattice: Literal["D4", "E8"] = "E8"
    q: int = 10
    seed: int = 1

    def __post_init__(self) -> None:
        points(self.lattice, self.q)

    def fit(self, samples: Samples) -> BlockCoder:
        return LatticeCoder(samples.site, self)


class LatticeCoder(BlockCoder):
    """Codes: numbers [blocks, heads, tokens, groups], factors as halves, exponents."""

    def __init__(self, site: Site, codec: Lattice) -> None:
        super().__init__(site)
        self._lattice, self._q = codec.lattice, codec.q
        self._size = dimension(codec.lattice)
        self._groups = -(-site.head_dim // self._size)
        self._rotation = Rotation(site.head_dim, codec.seed)
        bits = (points(codec.lattice, codec.q) - 1).bit_length()
        # Numbers of more than 16 bits are packed in planes of 16 bits and a rest.
        self._planes = [16] * (bits // 16) + ([bits % 16] if bits % 16 else [])

    def quantise(self, x: torch.Tensor, side: torch.Tensor | None = None) -> Parts:
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

    def dequantise(self, parts: Parts, side: torch.Tensor | None = None) -> torch.Tensor:
        numbers, half, exponent = parts
        y = point(numbers, self._lattice, self._q).flatten(-2)[..., : self.site.head_dim]
        return self._rotation.inverse(y) * from_halves(half, exponent)[..., None]

    def pack(self, parts: Parts) -> list[bytes]:
        numbers, half, exponent = parts
        flat = numbers.flatten(1)
        planes = [pack((flat >> (16 * i)) & 0xFFFF, width) for i, width in enumerate(self._planes)]
        return join_fields([*planes, as_bytes(half), exponent])

    def unpack(self, payloads: Sequence[bytes], tokens: int) -> Parts:
        import torch

        shape = (len(payloads), self.site.heads, tokens, self._groups)
        vectors = self.site.heads * tokens
        sizes = [packed_bytes(vectors * self._groups, width) for width in self._planes]
        *planes, half, exponent = split_fields(payloads, [*sizes, 2 * vectors, 1])
        numbers = torch.zeros(len(payloads), vectors * self._groups, dtype=torch.int64)
        for i, (plane, width) in enumerate(zip(planes, self._planes, strict=True)):
            numbers |= unpack(plane, width, numbers.shape[1]).long() << (16 * i)
        return (
            numbers.reshape(shape),
            typed(half, torch.float16).reshape(shape[:3]),
            typed(exponent, torch.int8),
        )

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.nn.functional.pad(x, (0, self._groups * self._size - x.shape[-1]))
