"""How far one distribution is from another at every scored token: pure functions of two rows of logits.

With p the reference's distribution and q the candidate's, x the token that came:

    NLL = −log p(x),   KL(p‖q) = Σ_v p(v) (log p(v) − log q(v)),   reverse KL = KL(q‖p),

in nats, over the whole vocabulary, without smoothing. Both sides are shifted by their largest logit first, so that the
differences are small numbers where the distributions are close; then

    KL = Σ_v e^{a(v)} (a(v) − b(v)) / S_a − (log S_a − log S_b),   a = logits_ref − max, S_a = Σ_v e^{a(v)},

needs one exponential a logit and no large terms that cancel.

Where the reference gives only a part of its distribution (`rest`: log-probabilities, −inf for what it leaves out), the ids
it leaves out are one bucket on both sides: KL = Σ_kept p (log p − log q) + m_p log(m_p / m_q), a lower bound by the
data-processing inequality, tight to the size of m_p.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from assay.engines.scoring import WindowRows

BLOCK_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}
"""Bytes of logits of one side that the output head makes at once: few enough to hold, enough to read its weight for."""
CACHE_BYTES = {"cpu": 3 << 20, "cuda": 512 << 20}
"""Bytes of them that statistics are taken of at once: on a CPU what stays in its cache from one pass to the next."""
_SPAN = 256
"""Entries of a row whose largest is found first."""


def statistics_device() -> torch.device:
    """Where statistics of two stored runs are computed: no engine has to be open for them."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of n scored tokens, each a tensor [n]; not-a-number where either side's logits are not finite.

    `nll_ref`, `nll_cand`, `kl`, `kl_rev` in nats (float64), `top1` whether both sides have the same likeliest token
    (the lower id wins a tie), `p_ref` and `p_cand` the probability of the token that came, `conf` the reference's
    largest probability.
    """

    nll_ref: torch.Tensor
    nll_cand: torch.Tensor
    kl: torch.Tensor
    kl_rev: torch.Tensor
    top1: torch.Tensor
    p_ref: torch.Tensor
    p_cand: torch.Tensor
    conf: torch.Tensor


def row_statistics(
    ref_logits: torch.Tensor, cand_logits: torch.Tensor, gold: torch.Tensor, *, rest: bool = False
) -> RowStatistics:
    """Statistics of n tokens from logits [n, V] of both sides and the ids [n] of the tokens that came.

    A token that the reference rules out (logit −inf) contributes nothing to KL; one that only the candidate rules out
    makes KL infinite, as it is. Rows with a NaN or +inf on either side come back as NaN, `top1` False. With `rest` the
    reference's values are log-probabilities of a part of its distribution, and −inf stands for one of the rest.
    """
    import torch

    ref, cand = ref_logits.float(), cand_logits.to(ref_logits.device).float()
    (ref_max, ref_best), (cand_max, cand_best) = first_max(ref), first_max(cand)
    a, b = ref - ref_max.unsqueeze(-1), cand - cand_max.unsqueeze(-1)
    index = gold.to(ref.device).long().unsqueeze(-1)
    gold_a, gold_b = a.gather(-1, index).squeeze(-1).double(), b.gather(-1, index).squeeze(-1).double()
    difference = a - b
    left_out = a.isneginf() if rest else None
    p, q = a.exp_(), b.exp_()  # not yet divided by their sums
    p_sum, q_sum = p.sum(-1).double(), q.sum(-1).double()
    p_kept = q_kept = torch.ones_like(p_sum)
    if left_out is not None:
        p_kept = torch.where(left_out.any(-1), p_sum * ref_max.double().exp(), 1.0).clamp(max=1.0)
        p_sum = (-ref_max).double().exp()  # the values are normalised already, over more than is kept
        q_kept = 1.0 - (q * left_out).sum(-1).double() / q_sum
        difference, q = difference.masked_fill(left_out, 0.0), q.masked_fill(left_out, 0.0)
    log_ratio = p_sum.log() - q_sum.log()
    kl = _dot(p, difference) / p_sum - log_ratio * p_kept + _bucket(1.0 - p_kept, 1.0 - q_kept)
    kl_rev = -_dot(q, difference) / q_sum + log_ratio * q_kept + _bucket(1.0 - q_kept, 1.0 - p_kept)
    log_p, log_q = gold_a - p_sum.log(), gold_b - q_sum.log()
    bad = ~(p_sum.isfinite() & q_sum.isfinite())

    def clean(values: torch.Tensor) -> torch.Tensor:
        return torch.where(bad, float("nan"), values)

    return RowStatistics(
        nll_ref=clean(-log_p),
        nll_cand=clean(-log_q),
        kl=clean(kl),
        kl_rev=clean(kl_rev),
        top1=(ref_best == cand_best) & ~bad,
        p_ref=clean(log_p.exp()),
        p_cand=clean(log_q.exp()),
        conf=clean(1.0 / p_sum),
    )


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


def _bucket(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """p log(p / q) of one bucket; 0 where either side has nothing in it, as rounding may leave it."""
    import torch

    return torch.where((p > 0) & (q > 0), p * (p / q).log(), 0.0)


def _dot(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Σ_v w v of each row [n, V], in float64 [n]; a weight of 0 makes its term 0 even where the value is infinite."""
    import torch

    total = torch.linalg.vecdot(weights, values).double()
    for row in total.isnan().nonzero().flatten().tolist():
        terms = torch.where(weights[row] > 0, weights[row] * values[row], 0.0)
        total[row] = terms.sum(dtype=torch.float64)
    return total


def window_statistics(reference: WindowRows, candidate: WindowRows) -> RowStatistics:
    """Statistics of all scored tokens of one window, by blocks of rows, on the CPU.

    Both sides must have scored the same tokens of the same window. Logits past the smaller vocabulary (padding rows)
    are left out on both sides.
    """
    import torch

    if reference.window.tokens != candidate.window.tokens or reference.first != candidate.first:
        raise ValueError(f"window {reference.window.index}: the two sides scored different tokens")
    reference = reference.to(candidate.device)
    gold = torch.tensor(reference.window.tokens[reference.first :], device=candidate.device)
    vocab = min(reference.vocab_size, candidate.vocab_size)
    parts: list[RowStatistics] = []
    lo, count = 0, len(gold)
    rows = 1
    while lo < count:
        hi = min(count, lo + rows)
        ref, cand = reference.logits(lo, hi)[:, :vocab], candidate.logits(lo, hi)[:, :vocab]
        few = _rows_of(CACHE_BYTES, ref.device.type, vocab)
        for own, other, ids in zip(ref.split(few), cand.split(few), gold[lo:hi].split(few), strict=True):
            parts.append(row_statistics(own, other, ids, rest=getattr(reference, "rest", False)))
        lo = hi
        rows = _rows_of(BLOCK_BYTES, ref.device.type, vocab)
    return RowStatistics(
        *(torch.cat([getattr(part, f.name) for part in parts]).cpu() for f in fields(RowStatistics))
    )


def _rows_of(sizes: dict[str, int], device: str, vocab: int) -> int:
    """Rows of `vocab` logits that take as many bytes as a device of this kind may work on at once."""
    return max(1, sizes.get(device, sizes["cuda"]) // (4 * vocab))
