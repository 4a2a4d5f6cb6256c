"""The numbers of coefficients along a trellis: those whose squared errors, and bits weighed against them, are cheapest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from assay.kv import bank
from assay.quant.trellis import Trellis, candidates, cheapest_path, values

if TYPE_CHECKING:
    import torch


def nearest(c: torch.Tensor, most: int, code: Trellis) -> torch.Tensor:
    """Numbers [rows, n] up to `most` with the least squared error of coefficients [rows, n]."""
    numbers = candidates(c, c.new_full((*c.shape, 2), most))
    return _along(numbers, _errors(numbers, c), code)


def cheapest(
    c: torch.Tensor,
    lengths: torch.Tensor,
    zero: torch.Tensor,
    radius: torch.Tensor,
    rdo: float,
    code: Trellis,
) -> torch.Tensor:
    """Numbers [rows, n] with the least Σ error² + rdo · bits; bank.ESCAPE where c lies beyond what its law knows.

    `zero` [rows, n, 2] says where in `lengths` the number 0 of each quantiser stands, `radius` like it the largest
    number. An escape counts as even and has no error.
    """
    import torch

    numbers = candidates(c, radius)
    # A quantiser's 0 is cheap to code: it stands in for the even number wherever it costs less.
    numbers = torch.cat([numbers, torch.zeros_like(numbers[..., :1])], dim=-1)
    bits = lengths.index_select(0, (zero[..., None] + numbers.int()).flatten()).view(numbers.shape)
    costs = _errors(numbers, c) + rdo * bits
    spared = costs[..., 2] < costs[..., 0]
    numbers[..., 0].masked_fill_(spared, 0)
    costs[..., 0] = torch.where(spared, costs[..., 2], costs[..., 0])
    beyond = c.abs()[..., None] > radius + 0.5
    if beyond.any():
        escape = lengths[zero + bank.ESCAPE]
        numbers[..., 0].masked_fill_(beyond, bank.ESCAPE)
        costs[..., 0] = torch.where(beyond, rdo * escape, costs[..., 0])
    return _along(numbers[..., :2], costs[..., :2], code)


def _errors(numbers: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Squared errors of numbers [rows, n, 2 quantisers, any] of coefficients [rows, n]."""
    quantiser = c.new_tensor([[0.0], [1.0]])
    return (values(numbers, quantiser) - c[..., None, None]).square()


def _along(numbers: torch.Tensor, costs: torch.Tensor, code: Trellis) -> torch.Tensor:
    """Of numbers [rows, n, 2 quantisers, 2 parities] those of the path that costs least."""
    path = cheapest_path(costs.contiguous(), code).long()
    return numbers.flatten(2).gather(-1, path[..., None])[..., 0]
