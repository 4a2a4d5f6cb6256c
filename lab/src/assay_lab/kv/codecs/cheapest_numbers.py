"""The numbers of coefficients along a trellis: the cheapest in squared error and weighed bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from assay_lab.kv.codecs.distributions import ESCAPE
from assay_lab.trellis import Trellis, candidates, cheapest_path, values


def nearest(c: torch.Tensor, most: int, code: Trellis) -> torch.Tensor:
    """Numbers [rows, n] up to `most` with the least squared error of coefficients [rows, n]."""
    tried = [(candidates(c, c.new_full((), most), q), q) for q in (0, 1)]
    numbers = [number for pair, _ in tried for number in pair]
    return _along(numbers, [_error(number, c, q) for pair, q in tried for number in pair], code)


def cheapest(
    c: torch.Tensor,
    lengths: torch.Tensor,
    zero: torch.Tensor,
    radius: torch.Tensor,
    rdo: float,
    code: Trellis,
) -> torch.Tensor:
    """Numbers [rows, n] with the least Σ error² + rdo · bits; bank.ESCAPE where c is beyond what
    its distribution knows.

    `zero` [2, rows, n] is the place of the number 0 of each quantiser in `lengths`, `radius` like
    it the largest number. An escape counts as even and has no error.
    """

    def bits(number: torch.Tensor | int, quantiser: int) -> torch.Tensor:
        places = zero[quantiser] + number
        return lengths.index_select(0, places.flatten().int()).view(c.shape)

    numbers, costs = [], []
    for quantiser in (0, 1):
        even, odd = candidates(c, radius[quantiser], quantiser)
        even_cost, odd_cost = (
            _error(n, c, quantiser) + rdo * bits(n, quantiser) for n in (even, odd)
        )
        # The number 0 is cheap to code: it replaces the even one wherever it costs less.
        zero_cost = c.square() + rdo * bits(0, quantiser)
        even = torch.where(zero_cost < even_cost, 0.0, even)
        even_cost = torch.minimum(zero_cost, even_cost)
        beyond = c.abs() > radius[quantiser] + 0.5
        even = torch.where(beyond, float(ESCAPE), even)
        even_cost = torch.where(beyond, rdo * bits(ESCAPE, quantiser), even_cost)
        numbers += [even, odd]
        costs += [even_cost, odd_cost]
    return _along(numbers, costs, code)


def _error(number: torch.Tensor, c: torch.Tensor, quantiser: int) -> torch.Tensor:
    """Squared errors of numbers of a quantiser."""
    return (values(number, quantiser) - c).square()


def _along(
    numbers: Sequence[torch.Tensor], costs: Sequence[torch.Tensor], code: Trellis
) -> torch.Tensor:
    """Of four numbers [rows, n] by quantiser and parity those of the path that costs least,
    int64.
    """
    path = cheapest_path(torch.stack(list(costs), dim=-1).unflatten(-1, (2, 2)), code)
    found = numbers[0]
    for choice in (1, 2, 3):
        found = torch.where(path == choice, numbers[choice], found)
    return found.long()
