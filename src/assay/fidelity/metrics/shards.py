"""Sums over a vocabulary of which several ranks hold a shard each (tensor parallelism)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from assay.engines.scoring import VocabularyShard

if TYPE_CHECKING:
    pass
from assay.fidelity.metrics.row_sums import RowSums, dot, first_max, half_distance, shifted


def sharded_sums(
    ref: torch.Tensor, cand: torch.Tensor, gold: torch.Tensor, shard: VocabularyShard
) -> RowSums:
    """`row_sums` of whole distributions from this rank's logits [n, ids of the shard] and those of
    the other ranks.

    `gold` [n] are ids of the whole vocabulary. The largest logits come first (4 numbers a row), as
    all ranks must shift by the same; then what is relative to them (5), then what is divided by the
    sums (3).
    """
    ref_top, cand_top = _shard_max(ref, shard), _shard_max(cand, shard)
    ref_max, ref_best, cand_max, cand_best = best_of(
        shard.gather(torch.stack([*ref_top, *cand_top]))
    )
    a, b = shifted(ref, ref_max), shifted(cand, cand_max)
    own = [_at(a, gold - shard.first), _at(b, gold - shard.first), _at(a, cand_best - shard.first)]
    difference = a - b
    p, q = a.exp_(), b.exp_()
    sums = torch.stack([p.sum(-1).double(), q.sum(-1).double(), *own])
    p_sum, q_sum, gold_a, gold_b, best_a = shard.gather(sums).sum(0)
    tv = half_distance(p, p_sum, q, q_sum)
    rest = torch.stack([dot(p, difference), dot(q, difference), tv])
    p_dot, q_dot, tv = shard.gather(rest).sum(0)
    return RowSums(
        ref_max, p_sum, q_sum, p_dot, q_dot, gold_a, gold_b, best_a, tv, ref_best == cand_best
    )


def _shard_max(x: torch.Tensor, shard: VocabularyShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest value of each row [n, ids of the shard] and its lowest id, both float64; −inf where
    there are none.
    """
    if not x.shape[-1]:
        empty = x.new_full((len(x),), float("-inf"), dtype=torch.float64)
        return empty, empty.new_full((len(x),), shard.vocab_size)
    largest, place = first_max(x)
    return largest.double(), (place + shard.first).double()


def best_of(tops: torch.Tensor) -> list[torch.Tensor]:
    """Of [ranks, (value, id, …), n]: the largest value of each pair and the lowest id that has it,
    each [n].
    """
    found = []
    for pair in tops.unflatten(1, (-1, 2)).unbind(1):
        values, ids = pair.unbind(1)
        top = values.amax(0)
        has = (values == top) | (values.isnan() & top.isnan())
        found += [top, ids.where(has, float("inf")).amin(0).long()]
    return found


def _at(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Entries of each row [n, ids] at a place [n], float64; 0 where it lies in another rank's
    shard.
    """
    width = x.shape[-1]
    if not width:
        return torch.zeros(len(x), dtype=torch.float64, device=x.device)
    found = x.gather(-1, place.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1).double()
    return found.where((place >= 0) & (place < width), 0.0)
