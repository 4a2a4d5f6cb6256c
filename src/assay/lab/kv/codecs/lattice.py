"""Points of D4 or E8 after a random Hadamard rotation, numbered and packed: the idea of KakeyaLattice with a real rate.

Each vector is rotated and scaled by its largest coordinate, y = q R x / max |R x|, so that it fills the cube |y| ≤ q;
every 4 or 8 coordinates become the nearest lattice point inside, stored as its number in ⌈log₂ points⌉ bits. The fp16
factor gives the decoded vector the least squared error. A head_dim that is no multiple of the dimension is padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from assay.errors import UsageError
from assay.lab.kv.codec import EXPONENT, BlockCoder, Codec, Field, Parts, Samples, Site, from_halves, to_halves
from assay.lab.quant.scalar import Rotation

# The lattices D4 and E8 inside a cube: nearest point, and the number of each point, so that a rate is real.
#
# D_n holds the integer vectors with an even sum; E8 = D8 ∪ (D8 + ½). In the cube |x_i| ≤ Q they are counted by their
# digits: with odd base B = 2Q + 1, Σ dᵢ Bⁱ ≡ Σ dᵢ (mod 2), so the integer vectors with an even sum of digits x + Q are
# those of even rank, and rank / 2 numbers them without a gap. (n Q is even, so sums of digits and of x agree.) Points of
# D8 + ½ have base 2Q; the last digit's parity follows from the others.

MAX_Q = {"D4": 2000, "E8": 110}


def dimension(lattice: str) -> int:
    """4 or 8."""
    return int(lattice[1])


def points(lattice: str, q: int) -> int:
    """How many points of the lattice lie in the cube of half-width `q`; UsageError for a cube that is too large."""
    if lattice not in MAX_Q or not 1 <= q <= MAX_Q[lattice]:
        raise UsageError(f"{lattice} with q={q}: D4 takes q 1 to 2000, E8 1 to 110", finding_id="kv.spec")
    whole: int = ((2 * q + 1) ** dimension(lattice) + 1) // 2
    half: int = (2 * q) ** 8 // 2
    return whole if lattice == "D4" else whole + half


def nearest(y: torch.Tensor, lattice: str, q: int) -> torch.Tensor:
    """The nearest point of the lattice in the cube to y [..., dimension], |y| ≤ q (Conway and Sloane 1982)."""
    whole = _even(y, float(-q), float(q))
    if lattice == "D4":
        return whole
    half = _even(y - 0.5, float(-q), float(q - 1)) + 0.5
    closer = (y - half).square().sum(-1, keepdim=True) < (y - whole).square().sum(-1, keepdim=True)
    return torch.where(closer, half, whole)


def number(x: torch.Tensor, lattice: str, q: int) -> torch.Tensor:
    """0 … points − 1 of lattice points [..., dimension], int64."""
    count = ((2 * q + 1) ** dimension(lattice) + 1) // 2
    whole = _rank((x.floor() + q).long(), 2 * q + 1) // 2
    if lattice == "D4":
        return whole
    digits = (x.floor() + q).long()
    half = count + _rank(digits[..., :7], 2 * q) * q + digits[..., 7] // 2
    return torch.where(x[..., 0] == x[..., 0].floor(), whole, half)


def point(numbers: torch.Tensor, lattice: str, q: int) -> torch.Tensor:
    """The lattice points [..., dimension] of their numbers, float32; numbers past the last give the last."""
    numbers = numbers.clamp(0, points(lattice, q) - 1)
    count = ((2 * q + 1) ** dimension(lattice) + 1) // 2
    whole = _digits(2 * numbers.clamp_max(count - 1), 2 * q + 1, dimension(lattice)).float() - q
    if lattice == "D4":
        return whole
    rest = (numbers - count).clamp_min(0)
    first = _digits(rest // q, 2 * q, 7)
    last = 2 * (rest % q) + first.sum(-1) % 2
    half = torch.cat([first, last[..., None]], dim=-1).float() - q + 0.5
    return torch.where((numbers < count)[..., None], whole, half)


def _even(y: torch.Tensor, lo: float, hi: float) -> torch.Tensor:
    """The nearest integer vector with an even sum in the cube lo … hi."""
    x = y.round().clamp(lo, hi)
    gap = y - x
    # The cheapest single move that stays inside: towards y, or away from it at the face of the cube.
    move = torch.where(gap >= 0, 1.0, -1.0)
    move = torch.where((x + move > hi) | (x + move < lo), -move, move)
    price = (gap - move).square() - gap.square()
    cheapest = price.argmin(dim=-1, keepdim=True)
    odd = x.sum(-1, keepdim=True).remainder(2) == 1
    return x + torch.zeros_like(x).scatter(-1, cheapest, move.gather(-1, cheapest)) * odd


def _rank(digits: torch.Tensor, base: int) -> torch.Tensor:
    rank = digits[..., 0]
    for i in range(1, digits.shape[-1]):
        rank = rank * base + digits[..., i]
    return rank


def _digits(rank: torch.Tensor, base: int, count: int) -> torch.Tensor:
    found = []
    for _ in range(count):
        found.append(rank % base)
        rank = rank // base
    return torch.stack(found[::-1], dim=-1)


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
        self._bits = (points(codec.lattice, codec.q) - 1).bit_length()

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
        y = point(numbers.long(), self._lattice, self._q).flatten(-2)[..., : self.site.head_dim]
        return self._rotation.inverse(y) * from_halves(half, exponent)[..., None]

    def layout(self, tokens: int) -> list[Field]:
        vectors = (self.site.heads, tokens)
        return [Field((*vectors, self._groups), self._bits), Field(vectors, torch.float16), EXPONENT]

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, self._groups * self._size - x.shape[-1]))
