"""Eigenvectors of many small symmetric matrices at once, by Jacobi rotations that are plain batched
products.

LAPACK's routines as torch calls them on a GPU go through a batch one matrix after the other once
it is larger than 32; thousands of blocks of a cache then take seconds. Here each round turns n /
2 disjoint pairs of coordinates of every matrix (round-robin order, Brent and Luk, SIAM J. Sci.
Stat. Comput. 6 (1985) 69), n − 1 rounds are a sweep over all pairs, and after six to nine sweeps
nothing is left beside the diagonal.
"""

from __future__ import annotations

import torch

SWEEPS = 30
"""More than is ever needed: convergence is quadratic."""


def eigh_batched(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `torch.linalg.eigh` of symmetric [sets, n, n]: values [sets, n] rising, vectors in columns
    [sets, n, n].

    Stops when the largest value beside the diagonal is below n rounding errors of the largest of
    the matrix.
    """
    sets, n, _ = matrices.shape
    odd = n % 2
    # A coordinate more, with nothing in it, makes the number of pairs whole.
    a = torch.nn.functional.pad(matrices, (0, odd, 0, odd))
    width = n + odd
    half = width // 2
    vectors = torch.eye(width, dtype=a.dtype, device=a.device).repeat(sets, 1, 1)
    pair, stay, cross = (t.to(a.device) for t in _round(half))
    stay, cross = stay.to(a.dtype), cross.to(a.dtype)
    limit = width * torch.finfo(a.dtype).eps * a.abs().amax(dim=(1, 2))
    for _ in range(SWEEPS):
        if width < 2 or bool((_beside(a) <= limit).all()):
            break
        for _ in range(width - 1):
            angle = _angles(a, half)[:, None, pair]
            turn = angle.cos() * stay + angle.sin() * cross
            a = turn.mT @ a @ turn
            vectors = vectors @ turn
    values, vectors = a.diagonal(dim1=1, dim2=2), vectors[:, :n]
    if odd:
        # The empty coordinate never mixes with others; it goes to the end, where it is cut off.
        empty = vectors.abs().amax(dim=1) == 0
        values = torch.where(empty, torch.inf, values)
    values, rising = values.sort(dim=-1)
    vectors = vectors.gather(2, rising[:, None].expand(-1, n, -1))
    return values[:, :n], vectors[..., :n]


def _angles(a: torch.Tensor, half: int) -> torch.Tensor:
    """The angles [sets, half], at most π / 4, that coordinates i and half + i are turned by to make
    a[i, half + i] 0.
    """
    first, second = a.diagonal(dim1=1, dim2=2).split(half, dim=1)
    between = a[:, :half, half:].diagonal(dim1=1, dim2=2)
    # 0 / 0 is a pair with nothing between and nothing to choose; x / 0 is π / 4.
    ratio = (2 * between / (second - first)).nan_to_num(0.0, torch.inf, -torch.inf)
    return ratio.atan() / 2


def _round(half: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which pair each coordinate of the next round comes from [n], and the matrices [n, n] that
    carry cosines and sines.

    The rotation of coordinates i and half + i by θ has cos θ on the diagonal, sin θ at (i, half +
    i) and −sin θ at (half + i, i). Its columns are put into the order of the next round: all but
    the first move on by one around the table.
    """
    top, bottom = list(range(half)), list(range(half, 2 * half))
    order = torch.tensor(top + bottom if half == 1 else [0, half, *top[1:-1], *bottom[1:], top[-1]])
    eye = torch.eye(2 * half)
    swapped = torch.cat([-eye[half:], eye[:half]]).T
    return order % half, eye[:, order], swapped[:, order]


def _beside(a: torch.Tensor) -> torch.Tensor:
    """The largest value beside the diagonal of each matrix [sets]."""
    return (a - torch.diag_embed(a.diagonal(dim1=1, dim2=2))).abs().amax(dim=(1, 2))
