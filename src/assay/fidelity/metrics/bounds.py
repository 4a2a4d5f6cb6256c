"""What log-probabilities of a few ids say about KL: an interval, never a point.

Let p be the reference's distribution, known as a whole, and q the candidate's, known at the ids of
a set S. Lumping all other ids into one bucket on both sides never increases KL (data processing;
Cover and Thomas, Elements of Information Theory, section 2.8), so with P = 1 − Σ_S p and
Q = 1 − Σ_S q

    KL(p‖q) ≥ Σ_S p (log p − log q) + P (log P − log Q),

for any S, with equality where S leaves at most one id over. Above, nothing bounds it as soon as two
ids are left over: q may be as small as it likes at one of them. What is bounded on both sides is
the total variation,

    ½ (Σ_S |p − q| + |P − Q|)  ≤  TV  ≤  ½ (Σ_S |p − q| + P + Q).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from assay.engines.scoring import WindowRows

if TYPE_CHECKING:
    from assay.engines.server.topk import TopkLogprobs
from assay.fidelity.metrics.token_statistics import BLOCK_BYTES, RowStatistics, beyond_rounding

SLACK = 2e-6
"""How far rounding of float32 log-probabilities may move the mass that they leave over; a bound
allows for it.
"""


@dataclass(frozen=True)
class BoundedStatistics(RowStatistics):
    """Statistics of n tokens where the candidate is known at a few ids only.

    Exact: `nll_ref`, `nll_cand`, `p_ref`, `p_cand`, `conf`. Lower bounds: `kl`, `kl_rev`, `tv`.
    `top1` holds where both certainly have the same likeliest token, `top1_possible` where they may;
    `beyond` where it certainly differs beyond rounding. `tail_ref` and `tail_cand` are P and Q,
    `kl_upper` is infinite where nothing bounds KL from above, `tv_lo` and `tv_hi` bound the total
    variation.
    """

    top1_possible: torch.Tensor
    tail_ref: torch.Tensor
    tail_cand: torch.Tensor
    kl_upper: torch.Tensor
    tv_lo: torch.Tensor
    tv_hi: torch.Tensor


def choose_ids(reference: WindowRows, count: int) -> list[list[int]]:
    """The `count` likeliest ids of the reference at each scored token, likeliest first, the one
    that came among them.
    """
    import torch

    gold = torch.tensor(reference.window.tokens[reference.first :], device=reference.device)
    found: list[list[int]] = []
    for lo, hi in blocks_of_rows(reference, 4):
        top = reference.logits(lo, hi).topk(min(count, reference.vocab_size), -1).indices
        came = gold[lo:hi].unsqueeze(-1)
        absent = ~(top == came).any(-1)
        top[absent, -1] = came[absent, 0]
        found += top.tolist()
    return found


def window_bounds(reference: WindowRows, scores: TopkLogprobs) -> BoundedStatistics:
    """Statistics of all scored tokens of one window, by blocks of rows, on the CPU."""
    import torch

    ids, logq = padded(scores.rows)
    ids, logq = ids.to(reference.device), logq.to(reference.device)
    gold = torch.tensor(reference.window.tokens[reference.first :], device=reference.device)
    gold_logq = torch.tensor(scores.target, dtype=torch.float64, device=reference.device)
    if not len(gold) == len(ids) == len(gold_logq) or scores.first != reference.first:
        raise ValueError(f"window {reference.window.index}: the two sides scored different tokens")
    parts = [
        bounded_statistics(
            reference.logits(lo, hi),
            gold[lo:hi],
            ids[lo:hi],
            logq[lo:hi],
            gold_logq[lo:hi],
            lists_best=scores.lists_best,
        )
        for lo, hi in blocks_of_rows(reference, 32)
    ]
    names = [f.name for f in fields(BoundedStatistics)]
    return BoundedStatistics(
        *(torch.cat([getattr(part, name) for part in parts]).cpu() for name in names)
    )


def bounded_statistics(
    ref_logits: torch.Tensor,
    gold: torch.Tensor,
    ids: torch.Tensor,
    logq: torch.Tensor,
    gold_logq: torch.Tensor,
    *,
    lists_best: bool,
) -> BoundedStatistics:
    """Statistics of n tokens from the reference's logits [n, V] and the candidate's
    log-probabilities of ids [n, K].

    −1 pads the ids of a row; `gold` [n] are the tokens that came, `gold_logq` [n] the candidate's
    log-probabilities of them. `lists_best` says that the candidate's likeliest id is among the ids
    of every row; otherwise it is known only where one of them is likelier than all that is left
    over. Rows whose logits are not finite on the reference's side, or whose token the candidate
    rules out, come back as NaN.
    """
    import torch

    ref = ref_logits.double()
    vocab = ref.shape[-1]
    total = ref.logsumexp(-1, keepdim=True)
    logp = ref - total
    given = ids >= 0
    known = given & (ids < vocab)  # ids past the reference's vocabulary have no probability in it
    where = torch.where(known, ids, vocab)
    covered = torch.zeros(ref.shape[0], vocab + 1, dtype=torch.bool, device=ref.device)
    covered = covered.scatter_(1, where, True)[:, :vocab]
    left = torch.where(covered, 0.0, logp.exp())
    tail_ref, open_ids = left.sum(-1), (left > 0).sum(-1)

    lp = torch.where(known, logp.gather(1, where.clamp_max(vocab - 1)), -torch.inf)
    p, q = lp.exp(), torch.where(given, logq.exp(), 0.0)
    tail_cand = (1 - q.sum(-1)).clamp(0.0, 1.0)
    inside = terms(p, lp, logq).sum(-1)
    bucket = terms(tail_ref, tail_ref.log(), (tail_cand + SLACK).clamp_max(1.0).log())
    inside_rev = terms(q, logq, lp).sum(-1)
    # Q log(Q / P) is least at Q = P / e; within what rounding allows, that is what a lower bound
    # may count on.
    least = (tail_ref / torch.e).clamp(
        min=(tail_cand - SLACK).clamp_min(0.0), max=tail_cand + SLACK
    )
    bucket_rev = terms(least, least.log(), tail_ref.log())
    single = inside + terms(tail_ref, tail_ref.log(), (tail_cand - SLACK).clamp_min(0.0).log())
    upper = torch.where(open_ids == 0, inside, torch.where(open_ids == 1, single, torch.inf))
    apart, apart_tail = (p - q).abs().sum(-1), (tail_ref - tail_cand).abs()

    same, sure, beyond, possible = _likeliest(ref, ids, logq, tail_cand, lists_best)
    gold_p = logp.gather(1, gold.long().unsqueeze(-1)).squeeze(-1)
    bad = ~(total.squeeze(-1).isfinite() & gold_logq.isfinite())

    def clean(values: torch.Tensor) -> torch.Tensor:
        return torch.where(bad, float("nan"), values)

    return BoundedStatistics(
        nll_ref=clean(-gold_p),
        nll_cand=clean(-gold_logq),
        kl=clean((inside + bucket).clamp_min(0.0)),
        kl_rev=clean((inside_rev + bucket_rev).clamp_min(0.0)),
        top1=same & sure & ~bad,
        p_ref=clean(gold_p.exp()),
        p_cand=clean(gold_logq.exp()),
        conf=clean(logp.max(-1).values.exp()),
        tv=clean((apart + apart_tail) / 2),
        beyond=beyond & ~bad,
        top1_possible=possible & ~bad,
        tail_ref=clean(tail_ref),
        tail_cand=clean(tail_cand),
        kl_upper=clean(upper.clamp_min(0.0)),
        tv_lo=clean((apart + apart_tail) / 2),
        tv_hi=clean(((apart + tail_ref + tail_cand) / 2).clamp_max(1.0)),
    )


def _likeliest(
    ref: torch.Tensor,
    ids: torch.Tensor,
    logq: torch.Tensor,
    tail_cand: torch.Tensor,
    lists_best: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the likeliest token of both sides is, four times bool [n].

    Whether the two seem the same; whether the candidate's is known for sure; whether a known one
    differs beyond rounding; whether the two can be the same. The lower id wins a tie.
    """
    import torch

    given, vocab = ids >= 0, ref.shape[-1]
    ref_best = ref.argmax(-1)
    best = logq.masked_fill(~given, -torch.inf).max(-1, keepdim=True).values
    is_best = given & (logq == best)
    cand_best = torch.where(is_best, ids, torch.iinfo(ids.dtype).max).min(-1).values
    sure = (best.squeeze(-1).exp() > tail_cand + SLACK) | lists_best
    same = cand_best == ref_best
    chosen = ref.gather(-1, cand_best.clamp(0, vocab - 1).unsqueeze(-1)).squeeze(-1)
    beyond = ~same & sure & beyond_rounding(ref.max(-1).values, chosen)
    beaten = ((ids == ref_best.unsqueeze(-1)) & ~is_best).any(-1)
    return same, sure, beyond, same | (~sure & ~beaten)


def terms(weight: torch.Tensor, log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
    """weight · (log a − log b), 0 where there is no weight."""
    import torch

    return torch.where(weight > 0, weight * (log_a - log_b), 0.0)


def padded(rows: Sequence[Mapping[int, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [n, K] and log-probabilities [n, K] of rows of unequal length, padded with −1
    and −inf.
    """
    import torch

    width = max(map(len, rows))
    ids = [[*row, *[-1] * (width - len(row))] for row in rows]
    values = [[*row.values(), *[-torch.inf] * (width - len(row))] for row in rows]
    return torch.tensor(ids, dtype=torch.long), torch.tensor(values, dtype=torch.float64)


def blocks_of_rows(rows: WindowRows, bytes_per_logit: int) -> list[tuple[int, int]]:
    """Blocks of rows whose working memory is bounded."""
    count = len(rows.window.tokens) - rows.first
    size = max(
        1, BLOCK_BYTES.get(rows.device.type, 32 << 20) // (bytes_per_logit * rows.vocab_size)
    )
    return [(lo, min(count, lo + size)) for lo in range(0, count, size)]
