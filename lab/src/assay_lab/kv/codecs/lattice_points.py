"""The lattices D4 and E8 inside a cube: the nearest point, and the number of each point.

D_n holds the integer vectors with an even sum; E8 = D8 ∪ (D8 + ½). In the cube |x_i| ≤ Q they are
counted by their digits: with odd base B = 2Q + 1, Σ dᵢ Bⁱ ≡ Σ dᵢ (mod 2), so the integer vectors
with an even sum of digits x + Q are those of even rank, and rank / 2 numbers them without a gap.
(n Q is even, so sums of digits and of x agree.) Points of D8 + ½ have base 2Q; the last digit's
parity follows from the others.
"""

from __future__ import annotations

import torch

from assay.errors import UsageError

MAX_Q = {"D4": 2000, "E8": 110}


def dimension(lattice: str) -> int:
    """4 or 8."""
    return int(lattice[1])


def points(lattice: str, q: int) -> int:
    """Number of points of the lattice in the cube of half-width `q`; UsageError for a cube that
    is too large.
    """
    if lattice not in MAX_Q or not 1 <= q <= MAX_Q[lattice]:
        raise UsageError(
            f"{lattice} with q={q}: D4 takes q 1 to 2000, E8 1 to 110", finding_id="kv.spec"
        )
    whole: int = ((2 * q + 1) ** dimension(lattice) + 1) // 2
    half: int = (2 * q) ** 8 // 2
    return whole if lattice == "D4" else whole + half


def nearest(y: torch.Tensor, lattice: str, q: int) -> torch.Tensor:
    """The nearest point of the lattice in the cube to y [..., dimension], |y| ≤ q (Conway and
    Sloane 1982).
    """
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
    """The lattice points [..., dimension] of their numbers, float32; numbers past the last give the
    last.
    """
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
    # The cheapest single move that stays inside: towards y, or away from it at the face of the
    # cube.
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
