"""The sums over the vocabulary from which the statistics of a row follow.

Both sides are shifted by their largest logit: a = logits_ref − max, b = logits_cand − max. Two
likely tokens' logits are then near 0 on both sides, and no large terms cancel in a − b.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    pass


_SPAN = 256
"""Entries of a row whose largest is found first."""


@dataclass(frozen=True)
class RowSums:
    """Sums of n rows, each [n] and float64 but for `same_best`.

    `p_sum` Σ e^a, `q_sum` Σ e^b, `p_dot` Σ e^a (a − b), `q_dot` Σ e^b (a − b), where a weight of 0
    makes its term 0 with any factor; `ref_max` the reference's largest logit,
    `gold_a` and `gold_b` a and b of the token that came, `best_a` a of the candidate's likeliest
    token, `tv` ½ Σ |e^a / Σ e^a − e^b / Σ e^b| over what the reference keeps, `same_best` whether
    both sides have the same likeliest token (the lowest id of those that tie).
    """

    ref_max: torch.Tensor
    p_sum: torch.Tensor
    q_sum: torch.Tensor
    p_dot: torch.Tensor
    q_dot: torch.Tensor
    gold_a: torch.Tensor
    gold_b: torch.Tensor
    best_a: torch.Tensor
    tv: torch.Tensor
    same_best: torch.Tensor


@dataclass(frozen=True)
class LeftOut:
    """What the reference leaves out (−inf), which the dot products then leave out too: `any` of it
    [n], and the candidate's Σ e^b over it, `q_sum` [n], float64."""

    any: torch.Tensor
    q_sum: torch.Tensor


def row_sums(
    ref: torch.Tensor, cand: torch.Tensor, gold: torch.Tensor, *, rest: bool = False
) -> tuple[RowSums, LeftOut | None]:
    """Sums of logits [n, V] of two sides, and what is left out where the reference is only a part
    (`rest`).

    Float32 inside, for logits of any type. On a GPU nothing here waits for its results.
    """
    (ref_max, ref_best), (cand_max, cand_best) = first_max(ref), first_max(cand)
    a, b = shifted(ref, ref_max), shifted(cand, cand_max)
    index = gold.unsqueeze(-1)
    gold_a, gold_b = (side.gather(-1, index).squeeze(-1).double() for side in (a, b))
    best_a = a.gather(-1, cand_best.unsqueeze(-1)).squeeze(-1).double()
    difference = a - b
    left_out = a.isneginf() if rest else None
    p, q = a.exp_(), b.exp_()  # not yet divided by their sums
    p_sum, q_sum = (side.sum(-1).double() for side in (p, q))
    apart = None
    if left_out is not None:
        apart = LeftOut(left_out.any(-1), (q * left_out).sum(-1).double())
        difference, q = difference.masked_fill(left_out, 0.0), q.masked_fill(left_out, 0.0)
    whole = p_sum if left_out is None else (-ref_max).exp().double()
    tv = half_distance(p, whole, q, q_sum)
    p_dot, q_dot = dot(p, difference), dot(q, difference)
    same = ref_best == cand_best
    return (
        RowSums(ref_max.double(), p_sum, q_sum, p_dot, q_dot, gold_a, gold_b, best_a, tv, same),
        apart,
    )


def half_distance(
    p: torch.Tensor, p_sum: torch.Tensor, q: torch.Tensor, q_sum: torch.Tensor
) -> torch.Tensor:
    """½ Σ |p / p_sum − q / q_sum| of each row [n, V], in float64 [n]."""
    scale, other = ((0.5 / total).to(p.dtype).unsqueeze(-1) for total in (p_sum, q_sum))
    apart = (p * scale).addcmul_(q, other, value=-1)
    return torch.linalg.vector_norm(apart, 1, -1).double()


def shifted(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """x − largest of each row [n, V], float32 and new."""
    largest = largest.float().unsqueeze(-1)
    if x.device.type != "cpu" or x.dtype is torch.float32:
        return x - largest  # one pass: the kernel widens what it reads
    return x.float().sub_(largest)


def dot(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Σ_v w v of each row [n, V], in float64 [n]; a weight of 0 makes its term 0 even where the
    value is infinite.

    Overwrites the weights. Zero times infinity is the only way to not-a-number in a row whose sums
    are finite, so a sum without those terms is the same; a CPU takes it only of the rows that need
    it, as asking costs it nothing.
    """
    terms = weights.mul_(values)
    if terms.device.type != "cpu":
        return terms.nansum(-1).double()
    total = terms.sum(-1)
    lost = total.isnan()
    if lost.any():
        total[lost] = terms[lost].nansum(-1)
    return total.double()


def first_max(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest value of each row [n, V] and the lowest index that has it, as `x.max(-1)`; on a CPU
    in a third of the time.

    The largest of every span of the row comes first, which takes no indices; only the span that
    holds the largest of all is searched for its index.
    """
    whole = x.shape[-1] // _SPAN * _SPAN
    if x.device.type != "cpu" or whole < 2 * _SPAN:
        largest = x.max(-1)
        return largest.values, largest.indices
    spans = x[:, :whole].unflatten(-1, (-1, _SPAN))
    values, span = spans.amax(-1).max(-1)
    place = spans[torch.arange(len(x), device=x.device), span].max(-1).indices + span * _SPAN
    if whole < x.shape[-1]:
        tail, at = x[:, whole:].max(-1)
        # Not a number is the largest of all, as it is for `max`.
        later = (tail > values) | (tail.isnan() & ~values.isnan())
        values, place = torch.where(later, tail, values), torch.where(later, at + whole, place)
    return values, place


Rows = TypeVar("Rows", RowSums, LeftOut)


def sums_of(
    ref: torch.Tensor, cand: torch.Tensor, gold: torch.Tensor, rest: bool
) -> tuple[RowSums, LeftOut | None]:
    """Sums of whole rows, by the fused kernel where the logits are on a GPU."""
    cand, gold = cand.to(ref.device), gold.to(ref.device).long()
    kernel = kernel_of() if ref.is_cuda and not rest else None
    found = None if kernel is None else kernel.sums(ref, cand, gold, _stacked_sums)
    if found is None:
        return row_sums(ref, cand, gold, rest=rest)
    names = [f.name for f in fields(RowSums)]
    sides = dict(zip(names, found, strict=True))
    return RowSums(**{**sides, "same_best": sides["same_best"] > 0}), None


def _stacked_sums(ref: torch.Tensor, cand: torch.Tensor, gold: torch.Tensor) -> torch.Tensor:
    """`row_sums` of whole distributions as one tensor [10, n], in the order of the fields of
    `RowSums`.
    """
    return torch.stack([side.double() for side in vars(row_sums(ref, cand, gold)[0]).values()])


@cache
def kernel_of() -> Any:
    """`assay.fidelity.metrics.fused_gpu`, imported where logits are on a GPU.

    None, with a warning, where it cannot be.
    """
    try:
        from assay.fidelity.metrics import fused_gpu
    except ImportError as error:
        warnings.warn(f"statistics are taken by torch: {error}", RuntimeWarning, stacklevel=2)
        return None
    return fused_gpu
