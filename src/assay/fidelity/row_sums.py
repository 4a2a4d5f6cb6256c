"""The sums over the vocabulary from which the statistics of a row of logits follow, by torch.

Both sides are shifted by their largest logit: a = logits_ref − max, b = logits_cand − max. Two likely tokens' logits are
then near 0 on both sides, and no large terms cancel in a − b.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SPAN = 256
"""Entries of a row whose largest is found first."""


@dataclass(frozen=True)
class RowSums:
    """Sums of n rows, each [n] and float64 but for `same_best`.

    `p_sum` Σ e^a, `q_sum` Σ e^b, `p_dot` Σ e^a (a − b), `q_dot` Σ e^b (a − b), where a weight of 0 makes its term 0
    whatever it is multiplied with; `ref_max` the reference's largest logit, `gold_a` and `gold_b` a and b of the token
    that came, `same_best` whether both sides have the same likeliest token (the lowest id of those that tie).
    """

    ref_max: torch.Tensor
    p_sum: torch.Tensor
    q_sum: torch.Tensor
    p_dot: torch.Tensor
    q_dot: torch.Tensor
    gold_a: torch.Tensor
    gold_b: torch.Tensor
    same_best: torch.Tensor


@dataclass(frozen=True)
class LeftOut:
    """What the reference leaves out (−inf), which the dot products then leave out too: `any` of it [n], and the
    candidate's Σ e^b over it, `q_sum` [n], float64."""

    any: torch.Tensor
    q_sum: torch.Tensor


def row_sums(
    ref: torch.Tensor, cand: torch.Tensor, gold: torch.Tensor, *, rest: bool = False
) -> tuple[RowSums, LeftOut | None]:
    """Sums of logits [n, V] of two sides, and what is left out where the reference is only a part (`rest`).

    Float32 inside, whatever the logits are. On a GPU nothing here waits for its results.
    """
    (ref_max, ref_best), (cand_max, cand_best) = first_max(ref), first_max(cand)
    a, b = _shifted(ref, ref_max), _shifted(cand, cand_max)
    index = gold.unsqueeze(-1)
    gold_a, gold_b = (side.gather(-1, index).squeeze(-1).double() for side in (a, b))
    difference = a - b
    left_out = a.isneginf() if rest else None
    p, q = a.exp_(), b.exp_()  # not yet divided by their sums
    p_sum, q_sum = (side.sum(-1).double() for side in (p, q))
    apart = None
    if left_out is not None:
        apart = LeftOut(left_out.any(-1), (q * left_out).sum(-1).double())
        difference, q = difference.masked_fill(left_out, 0.0), q.masked_fill(left_out, 0.0)
    p_dot, q_dot = _dot(p, difference), _dot(q, difference)
    return RowSums(ref_max.double(), p_sum, q_sum, p_dot, q_dot, gold_a, gold_b, ref_best == cand_best), apart


def _shifted(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """x − largest of each row [n, V], float32 and new."""
    import torch

    largest = largest.float().unsqueeze(-1)
    if x.device.type != "cpu" or x.dtype is torch.float32:
        return x - largest  # one pass: the kernel widens what it reads
    return x.float().sub_(largest)


def _dot(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Σ_v w v of each row [n, V], in float64 [n]; a weight of 0 makes its term 0 even where the value is infinite.

    Overwrites the weights. Zero times infinity is the only way to not-a-number in a row whose sums are finite, so a sum
    without those terms is the same; a CPU takes it only of the rows that need it, as asking costs it nothing.
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
    """Largest value of each row [n, V] and the lowest index that has it, as `x.max(-1)`; on a CPU in a third of the time.

    The largest of every span of the row comes first, which takes no indices; only the span that holds the largest
    of all is searched for its index.
    """
    import torch

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
