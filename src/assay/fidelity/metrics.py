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
a logit between 2^e and 2^(e + 1), taken at the larger of the two. It is that of bf16 whatever
either side computes in: the figure then does not depend on the type of the logits, in which alone
two likely tokens may tie or not.

Where ranks hold a vocabulary shard each (tensor parallelism), every sum above is taken over a
rank's own ids and the ranks' sums are added in float64, in the order of the ranks: twelve numbers a
token and rank, never a row of logits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from assay.engines.scoring import VocabularyShard, WindowRows, to_device, to_host

if TYPE_CHECKING:
    from assay.engines.server.scoring import TopkLogprobs


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
    return _statistics(*_sums(ref_logits, cand_logits, gold, rest))


def _statistics(sums: RowSums, apart: LeftOut | None) -> RowStatistics:
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
        kl = kl + _bucket(1.0 - p_kept, 1.0 - q_kept)
        kl_rev = kl_rev + _bucket(1.0 - q_kept, 1.0 - p_kept)
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


def _bucket(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """p log(p / q) of one bucket; 0 where either side has nothing in it, as rounding may leave it."""
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
    found = vars(_statistics(_joined(sums), _joined(apart) if apart else None))
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
            yield (sharded_sums(*chunk, shard), None) if shard else _sums(*chunk, rest)


def _joined(parts: list[_Rows]) -> _Rows:
    """One dataclass of tensors of all rows."""
    kind = type(parts[0])
    return kind(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(kind)))


def _rows_of(sizes: dict[str, int], device: str, row_bytes: int) -> int:
    """Rows of logits that take as many bytes as a device of this kind may work on at once."""
    return max(1, sizes.get(device, sizes["cuda"]) // row_bytes)


# The sums over the vocabulary from which the statistics of a row follow. Both sides are shifted by
# their largest logit: a = logits_ref − max, b = logits_cand − max. Two likely tokens' logits are
# then near 0 on both sides, and no large terms cancel in a − b.

_SPAN = 256
"""Entries of a row whose largest is found first."""


@dataclass(frozen=True)
class RowSums:
    """Sums of n rows, each [n] and float64 but for `same_best`.

    `p_sum` Σ e^a, `q_sum` Σ e^b, `p_dot` Σ e^a (a − b), `q_dot` Σ e^b (a − b), where a weight of 0
    makes its term 0 whatever it is multiplied with; `ref_max` the reference's largest logit,
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

    Float32 inside, whatever the logits are. On a GPU nothing here waits for its results.
    """
    (ref_max, ref_best), (cand_max, cand_best) = first_max(ref), first_max(cand)
    a, b = _shifted(ref, ref_max), _shifted(cand, cand_max)
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
    tv = _half_distance(p, whole, q, q_sum)
    p_dot, q_dot = _dot(p, difference), _dot(q, difference)
    same = ref_best == cand_best
    return (
        RowSums(ref_max.double(), p_sum, q_sum, p_dot, q_dot, gold_a, gold_b, best_a, tv, same),
        apart,
    )


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
    ref_max, ref_best, cand_max, cand_best = _best_of(
        shard.gather(torch.stack([*ref_top, *cand_top]))
    )
    a, b = _shifted(ref, ref_max), _shifted(cand, cand_max)
    own = [_at(a, gold - shard.first), _at(b, gold - shard.first), _at(a, cand_best - shard.first)]
    difference = a - b
    p, q = a.exp_(), b.exp_()
    sums = torch.stack([p.sum(-1).double(), q.sum(-1).double(), *own])
    p_sum, q_sum, gold_a, gold_b, best_a = shard.gather(sums).sum(0)
    tv = _half_distance(p, p_sum, q, q_sum)
    rest = torch.stack([_dot(p, difference), _dot(q, difference), tv])
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


def _best_of(tops: torch.Tensor) -> list[torch.Tensor]:
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


def _half_distance(
    p: torch.Tensor, p_sum: torch.Tensor, q: torch.Tensor, q_sum: torch.Tensor
) -> torch.Tensor:
    """½ Σ |p / p_sum − q / q_sum| of each row [n, V], in float64 [n]."""
    scale, other = ((0.5 / total).to(p.dtype).unsqueeze(-1) for total in (p_sum, q_sum))
    apart = (p * scale).addcmul_(q, other, value=-1)
    return torch.linalg.vector_norm(apart, 1, -1).double()


def _shifted(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """x − largest of each row [n, V], float32 and new."""
    largest = largest.float().unsqueeze(-1)
    if x.device.type != "cpu" or x.dtype is torch.float32:
        return x - largest  # one pass: the kernel widens what it reads
    return x.float().sub_(largest)


def _dot(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
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


_Rows = TypeVar("_Rows", RowSums, LeftOut)


def _sums(
    ref: torch.Tensor, cand: torch.Tensor, gold: torch.Tensor, rest: bool
) -> tuple[RowSums, LeftOut | None]:
    cand, gold = cand.to(ref.device), gold.to(ref.device).long()
    kernel = _kernel() if ref.is_cuda and not rest else None
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
def _kernel() -> Any:
    """`assay.fidelity.metrics_gpu`, imported where logits are on a GPU; None, with a warning, where
    it cannot be.
    """
    try:
        from assay.fidelity import metrics_gpu
    except ImportError as error:
        warnings.warn(f"statistics are taken by torch: {error}", RuntimeWarning, stacklevel=2)
        return None
    return metrics_gpu


# What log-probabilities of a few ids say about KL: an interval, never a point.
#
# Let p be the reference's distribution, known as a whole, and q the candidate's, known at the ids
# of a set S. Lumping all other ids into one bucket on both sides never increases KL (data
# processing; Cover and Thomas, Elements of Information Theory, section 2.8), so with P = 1 − Σ_S p
# and Q = 1 − Σ_S q
#
#     KL(p‖q) ≥ Σ_S p (log p − log q) + P (log P − log Q),
#
# for any S, with equality where S leaves at most one id over. Above, nothing bounds it as soon as
# two ids are left over: q may be as small as it likes at one of them. What is bounded on both sides
# is the total variation,
#
#     ½ (Σ_S |p − q| + |P − Q|)  ≤  TV  ≤  ½ (Σ_S |p − q| + P + Q).


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
    for lo, hi in _blocks(reference, 4):
        top = reference.logits(lo, hi).topk(min(count, reference.vocab_size), -1).indices
        came = gold[lo:hi].unsqueeze(-1)
        absent = ~(top == came).any(-1)
        top[absent, -1] = came[absent, 0]
        found += top.tolist()
    return found


def window_bounds(reference: WindowRows, scores: TopkLogprobs) -> BoundedStatistics:
    """Statistics of all scored tokens of one window, by blocks of rows, on the CPU."""
    import torch

    ids, logq = _padded(scores.rows)
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
        for lo, hi in _blocks(reference, 32)
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
    inside = _terms(p, lp, logq).sum(-1)
    bucket = _terms(tail_ref, tail_ref.log(), (tail_cand + SLACK).clamp_max(1.0).log())
    inside_rev = _terms(q, logq, lp).sum(-1)
    # Q log(Q / P) is least at Q = P / e; within what rounding allows, that is what a lower bound
    # may count on.
    least = (tail_ref / torch.e).clamp(
        min=(tail_cand - SLACK).clamp_min(0.0), max=tail_cand + SLACK
    )
    bucket_rev = _terms(least, least.log(), tail_ref.log())
    single = inside + _terms(tail_ref, tail_ref.log(), (tail_cand - SLACK).clamp_min(0.0).log())
    upper = torch.where(open_ids == 0, inside, torch.where(open_ids == 1, single, torch.inf))
    apart, apart_tail = (p - q).abs().sum(-1), (tail_ref - tail_cand).abs()

    ref_best = ref.argmax(-1)
    best = logq.masked_fill(~given, -torch.inf).max(-1, keepdim=True).values
    is_best = given & (logq == best)
    cand_best = (
        torch.where(is_best, ids, torch.iinfo(ids.dtype).max).min(-1).values
    )  # the lower id wins a tie
    sure = (best.squeeze(-1).exp() > tail_cand + SLACK) | lists_best
    same = cand_best == ref_best
    chosen = ref.gather(-1, cand_best.clamp(0, vocab - 1).unsqueeze(-1)).squeeze(-1)
    beyond = ~same & sure & beyond_rounding(ref.max(-1).values, chosen)
    beaten = ((ids == ref_best.unsqueeze(-1)) & ~is_best).any(-1)

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
        top1_possible=(same | (~sure & ~beaten)) & ~bad,
        tail_ref=clean(tail_ref),
        tail_cand=clean(tail_cand),
        kl_upper=clean(upper.clamp_min(0.0)),
        tv_lo=clean((apart + apart_tail) / 2),
        tv_hi=clean(((apart + tail_ref + tail_cand) / 2).clamp_max(1.0)),
    )


def _terms(weight: torch.Tensor, log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
    """weight · (log a − log b), 0 where there is no weight."""
    import torch

    return torch.where(weight > 0, weight * (log_a - log_b), 0.0)


def _padded(rows: Sequence[Mapping[int, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [n, K] and log-probabilities [n, K] of rows of unequal length, padded with −1 and −inf."""
    import torch

    width = max(map(len, rows))
    ids = [[*row, *[-1] * (width - len(row))] for row in rows]
    values = [[*row.values(), *[-torch.inf] * (width - len(row))] for row in rows]
    return torch.tensor(ids, dtype=torch.long), torch.tensor(values, dtype=torch.float64)


def _blocks(rows: WindowRows, bytes_per_logit: int) -> list[tuple[int, int]]:
    """Blocks of rows whose working memory is bounded."""
    count = len(rows.window.tokens) - rows.first
    size = max(
        1, BLOCK_BYTES.get(rows.device.type, 32 << 20) // (bytes_per_logit * rows.vocab_size)
    )
    return [(lo, min(count, lo + size)) for lo in range(0, count, size)]
