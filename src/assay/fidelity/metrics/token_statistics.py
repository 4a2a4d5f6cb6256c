"""How far one distribution is from another at every scored token: pure functions of two rows of
logits.

With p the reference's distribution and q the candidate's, x the target token:

    NLL = −log p(x),   KL(p‖q) = Σ_v p(v) (log p(v) − log q(v)),   reverse KL = KL(q‖p),   TV = ½
    Σ_v |p(v) − q(v)|,

KL in nats, over the whole vocabulary, without smoothing. Both sides are shifted by their largest
logit first, so that the differences are small numbers where the distributions are close; then

    KL = Σ_v e^{a(v)} (a(v) − b(v)) / S_a − (log S_a − log S_b),   a = logits_ref − max, S_a = Σ_v
    e^{a(v)},

needs one exponential a logit and no large terms that cancel.

Where the reference gives only a part of its distribution (`rest`: log-probabilities, −inf for what
it leaves out), the ids it leaves out are one bucket on both sides: KL = Σ_kept p (log p − log q) +
m_p log(m_p / m_q), a lower bound by the data-processing inequality, tight to the size of m_p. TV is
such a lower bound too.

A likeliest token that differs is a flip *beyond rounding* where the candidate's choice lies more
than one step of bf16 below the reference's own in the reference's logits. The step is 2^(e − 7) for
a logit between 2^e and 2^(e + 1), taken at the larger of the two. It is that of bf16 for
sides of any type: the figure then does not depend on the type of the logits, in which alone
two likely tokens may tie or not.

Where ranks hold a vocabulary shard each (tensor parallelism), every sum above is taken over a
rank's own ids and the ranks' sums are added in float64, in the order of the ranks: twelve numbers a
token and rank, never a row of logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from assay.engines.scoring import VocabularyShard, WindowRows, to_device, to_host

if TYPE_CHECKING:
    pass
from assay.fidelity.metrics.row_sums import LeftOut, Rows, RowSums, sums_of
from assay.fidelity.metrics.shards import sharded_sums

BLOCK_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}
"""Bytes of logits of one side that the output head makes at once: enough to read its weight for,
and on a CPU few enough that the allocator uses the same memory again (glibc maps larger blocks
anew, page by page)."""


CACHE_BYTES = {"cpu": 3 << 20, "cuda": 1 << 30}
"""Bytes of them as float32 that statistics are taken of at once: on a CPU what stays in its cache
from one pass to the next."""


def statistics_device() -> torch.device:
    """Where statistics of two stored runs are computed: no engine has to be open for them."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of n scored tokens, each a tensor [n]; not-a-number where either side's logits are
    not finite.

    `nll_ref`, `nll_cand`, `kl`, `kl_rev` in nats (float64), `top1` whether both sides have the same
    likeliest token (the lower id wins a tie), `p_ref` and `p_cand` the probability of the target
    token, `conf` the reference's largest probability, `tv` the total variation, `beyond` whether
    the likeliest token differs beyond rounding.
    """

    nll_ref: torch.Tensor
    nll_cand: torch.Tensor
    kl: torch.Tensor
    kl_rev: torch.Tensor
    top1: torch.Tensor
    p_ref: torch.Tensor
    p_cand: torch.Tensor
    conf: torch.Tensor
    tv: torch.Tensor
    beyond: torch.Tensor


def row_statistics(
    ref_logits: torch.Tensor, cand_logits: torch.Tensor, gold: torch.Tensor, *, rest: bool = False
) -> RowStatistics:
    """Statistics of n tokens from logits [n, V] of both sides and the ids [n] of the tokens that
    came.

    A token that the reference rules out (logit −inf) contributes nothing to KL; one that only the
    candidate rules out makes KL infinite, as it is. Rows with a NaN or +inf on either side come
    back as NaN, `top1` False. With `rest` the reference's values are log-probabilities of a part of
    its distribution, and −inf stands for one of the rest.
    """
    return statistics_of(*sums_of(ref_logits, cand_logits, gold, rest))


def statistics_of(sums: RowSums, apart: LeftOut | None) -> RowStatistics:
    """What follows from the sums over the vocabulary, in float64."""
    p_sum, q_sum = sums.p_sum, sums.q_sum
    p_kept = q_kept = torch.ones_like(p_sum)
    if apart is not None:
        p_kept = torch.where(apart.any, p_sum * sums.ref_max.exp(), 1.0).clamp(max=1.0)
        p_sum = (-sums.ref_max).exp()  # the values are normalised already, over more than is kept
        q_kept = 1.0 - apart.q_sum / q_sum
    log_ratio = p_sum.log() - q_sum.log()
    tv = sums.tv
    kl = sums.p_dot / p_sum - log_ratio * p_kept
    kl_rev = -sums.q_dot / q_sum + log_ratio * q_kept
    if apart is not None:
        kl = kl + bucket(1.0 - p_kept, 1.0 - q_kept)
        kl_rev = kl_rev + bucket(1.0 - q_kept, 1.0 - p_kept)
        tv = tv + (q_kept - p_kept).abs() / 2
    log_p, log_q = sums.gold_a - p_sum.log(), sums.gold_b - q_sum.log()
    bad = ~(p_sum.isfinite() & q_sum.isfinite())

    def clean(values: torch.Tensor) -> torch.Tensor:
        return torch.where(bad, float("nan"), values)

    return RowStatistics(
        nll_ref=clean(-log_p),
        nll_cand=clean(-log_q),
        kl=clean(kl),
        kl_rev=clean(kl_rev),
        top1=sums.same_best & ~bad,
        p_ref=clean(log_p.exp()),
        p_cand=clean(log_q.exp()),
        conf=clean(1.0 / p_sum),
        tv=clean(tv),
        beyond=~sums.same_best & beyond_rounding(sums.ref_max, sums.ref_max + sums.best_a) & ~bad,
    )


def beyond_rounding(largest: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Whether logits lie more than one step of bf16 below the largest of their row, all [n]."""
    size = torch.maximum(largest.abs(), other.abs())
    # frexp gives a fraction between ½ and 1; bf16 has 8 bits of it.
    step = torch.ldexp(torch.ones_like(size), torch.frexp(size).exponent - 8)
    return largest - other > torch.where(size > 0, step, 0.0)


def bucket(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """p log(p / q) of one bucket; 0 where either side has nothing in it, as rounding
    may leave it.
    """
    return torch.where((p > 0) & (q > 0), p * (p / q).log(), 0.0)


def window_statistics(reference: WindowRows, candidate: WindowRows) -> RowStatistics:
    """`batch_statistics` of one window, on the CPU."""
    return RowStatistics(**to_host([vars(batch_statistics([reference], [candidate])[0])])[0])


def batch_statistics(
    references: Sequence[WindowRows],
    candidates: Sequence[WindowRows],
    shard: VocabularyShard | None = None,
) -> list[RowStatistics]:
    """Statistics of all scored tokens of each window, where the candidate's logits come from.

    Both sides must have scored the same tokens of the same windows. Logits past the smaller
    vocabulary (padding rows) are left out on both sides. A GPU may still be at work on them when
    this returns; what follows from the sums over the vocabulary is computed of all windows at once,
    as it is many small steps. With a `shard` the rows of both sides are logits of its ids alone,
    and every rank that calls this gets the statistics of the whole vocabulary.
    """
    sums: list[RowSums] = []
    apart: list[LeftOut] = []
    for reference, candidate in zip(references, candidates, strict=True):
        for one, left_out in _window_sums(reference, candidate, shard):
            sums.append(one)
            if left_out is not None:
                apart.append(left_out)
    if apart and len(apart) != len(sums):
        raise ValueError("whole distributions and parts of them in one batch")
    found = vars(statistics_of(_joined(sums), _joined(apart) if apart else None))
    counts = [len(c.window.tokens) - c.first for c in candidates]
    parts = {name: values.split(counts) for name, values in found.items()}
    return [
        RowStatistics(**{name: split[i] for name, split in parts.items()})
        for i in range(len(counts))
    ]


def _window_sums(
    reference: WindowRows, candidate: WindowRows, shard: VocabularyShard | None
) -> Iterator[tuple[RowSums, LeftOut | None]]:
    """Sums of all scored tokens of one window, by blocks of rows."""
    window = reference.window
    if window.tokens != candidate.window.tokens or reference.first != candidate.first:
        raise ValueError(f"window {window.index}: the two sides scored different tokens")
    width = min(reference.vocab_size, candidate.vocab_size)
    vocab = shard.vocab_size if shard else width
    scored = window.tokens[reference.first :]
    if max(scored) >= vocab or min(scored) < 0:
        raise ValueError(
            f"window {window.index}: it has ids outside of the {vocab:,} that both sides know"
        )
    device = candidate.device
    reference = reference.to(device)
    gold = to_device(torch.tensor(scored), device)
    each = (
        -(-vocab // shard.ranks) if shard else vocab
    )  # the same on every rank, so that their blocks are
    few = _rows_of(CACHE_BYTES, device.type, 4 * each)
    rest = getattr(reference, "rest", False)
    entry = max(side.own_logits(0, 0).element_size() for side in (reference, candidate))
    rows = _rows_of(BLOCK_BYTES, device.type, entry * each)
    for lo in range(0, len(gold), rows):
        hi = min(len(gold), lo + rows)
        ref, cand = reference.own_logits(lo, hi)[:, :width], candidate.own_logits(lo, hi)[:, :width]
        for chunk in zip(ref.split(few), cand.split(few), gold[lo:hi].split(few), strict=True):
            yield (sharded_sums(*chunk, shard), None) if shard else sums_of(*chunk, rest)


def _joined(parts: list[Rows]) -> Rows:
    """One dataclass of tensors of all rows."""
    kind = type(parts[0])
    return kind(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(kind)))


def _rows_of(sizes: dict[str, int], device: str, row_bytes: int) -> int:
    """Rows of logits that take as many bytes as a device of this kind may work on at once."""
    return max(1, sizes.get(device, sizes["cuda"]) // row_bytes)
