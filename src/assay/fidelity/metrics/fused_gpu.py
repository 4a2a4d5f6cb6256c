"""The sums of `row_sums` by one Triton kernel on a GPU, once it gave what torch gives of real rows.

A program takes a row and reads each side's logits three times in the type that the engine gave
them. The first reading finds the largest logit of both sides and its lowest index, the second adds
up what is relative to it, and the third, which finds the row in the cache, takes the total
variation of what is divided by those sums. So nothing is rescaled on the way and the rounding is
that of `row_sums`. Exponentials below the smallest normal float32 (a or b < −87) count as 0. Import
it only where Triton is.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from assay.environment import gives_the_same

Sums = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of logits of both sides [n, V] and ids [n]: float64 [10, n], the fields of
`assay.fidelity.metrics.row_sums.RowSums` in order.
"""

_COMPARED_ROWS = 64
_SAME: dict[tuple[object, ...], bool] = {}


def sums(
    ref: torch.Tensor, cand: torch.Tensor, gold: torch.Tensor, by_torch: Sums
) -> torch.Tensor | None:
    """As `by_torch` of whole distributions; None where the kernel does not take such rows, or gave
    other values.
    """
    if not (_is_plain(ref) and _is_plain(cand)):
        return None
    key = (ref.device, ref.dtype, cand.dtype, ref.shape[-1])
    if key not in _SAME:
        some = slice(_COMPARED_ROWS)
        _SAME[key] = same_by_both(ref[some], cand[some], gold[some], by_torch)
    return _on_gpu(ref, cand, gold) if _SAME[key] else None


def fused_statistics() -> bool | None:
    """Whether the kernel is in use; None where no logits were on a GPU yet."""
    return all(_SAME.values()) if _SAME else None


def same_by_both(ref: torch.Tensor, cand: torch.Tensor, gold: torch.Tensor, by_torch: Sums) -> bool:
    """Compare kernel and torch on these rows; a warning says why the kernel is not used."""
    if os.environ.get("ASSAY_NO_TRITON"):
        return False
    return gives_the_same(
        "the fused kernel of statistics",
        lambda: alike(_on_gpu(ref, cand, gold), by_torch(ref, cand, gold)),
    )


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the sums [10, n] are those of the same logits but for rounding; rows that are not
    finite must be the same.
    """
    usable = [x[1:3].isfinite().all(0) for x in (one, other)]
    if not torch.equal(*usable):
        return False
    one, other = one[:, usable[1]], other[:, usable[1]]
    # A sum over V terms of size up to p_sum · |a − b| is as exact as those terms, however small it
    # is itself.
    scale = torch.maximum(other[1], other[2])
    near = (one == other) | ((one - other).abs() <= 1e-5 * (scale + other.abs()))
    return bool(near[:-1].all()) and torch.equal(one[-1], other[-1])


def _is_plain(logits: torch.Tensor) -> bool:
    return logits.stride(-1) == 1 and logits.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _on_gpu(ref: torch.Tensor, cand: torch.Tensor, gold: torch.Tensor) -> torch.Tensor:
    with torch.cuda.device_of(ref):  # Triton launches on the current GPU
        return fused_row_sums(ref, cand, gold)


def fused_row_sums(ref: torch.Tensor, cand: torch.Tensor, gold: torch.Tensor) -> torch.Tensor:
    """Sums [10, n] of logits [n, V] (bfloat16, float16 or float32; entries of a row next to each
    other), ids below V.
    """
    rows, vocab = ref.shape
    out = torch.empty(10, rows, dtype=torch.float32, device=ref.device)
    if rows:
        _row_sums[(rows,)](
            ref,
            cand,
            gold,
            out,
            rows,
            vocab,
            ref.stride(0),
            cand.stride(0),
            block=_BLOCK,
            num_warps=8,
            enable_fp_fusion=False,
        )
    return out.double()


_BLOCK = 2048


@triton.jit
def _first_max(best, index, none):  # type: ignore[no-untyped-def]
    """Largest of the lanes' values and the lowest index that has it, `none` where no
    lane has it.
    """
    top = tl.max(best, axis=0)
    return top, tl.min(tl.where(best == top, index, none), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _row_sums(  # type: ignore[no-untyped-def]
    ref_at, cand_at, gold_at, out_at, rows, vocab, ref_stride, cand_stride, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    ref_row, cand_row = ref_at + row * ref_stride, cand_at + row * cand_stride
    lane = tl.arange(0, block)
    ref_best = tl.full((block,), float("-inf"), tl.float32)
    cand_best = tl.full((block,), float("-inf"), tl.float32)
    ref_index = tl.zeros((block,), tl.int32)
    cand_index = tl.zeros((block,), tl.int32)
    for start in range(0, vocab, block):
        at = start + lane
        x = tl.load(ref_row + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        y = tl.load(cand_row + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        # A lane keeps the first of equal values.
        ref_index = tl.where(x > ref_best, at, ref_index)
        cand_index = tl.where(y > cand_best, at, cand_index)
        ref_best = tl.where(x > ref_best, x, ref_best)
        cand_best = tl.where(y > cand_best, y, cand_best)
    ref_max, ref_first = _first_max(ref_best, ref_index, vocab)
    cand_max, cand_first = _first_max(cand_best, cand_index, vocab)

    p_sum = tl.zeros((block,), tl.float32)
    q_sum = tl.zeros((block,), tl.float32)
    p_dot = tl.zeros((block,), tl.float32)
    q_dot = tl.zeros((block,), tl.float32)
    for start in range(0, vocab, block):
        at = start + lane
        inside = at < vocab
        a = tl.load(ref_row + at, mask=inside, other=float("-inf")).to(tl.float32) - ref_max
        b = tl.load(cand_row + at, mask=inside, other=float("-inf")).to(tl.float32) - cand_max
        # Past the end nothing is added, not even to a row that is nothing but −inf or not a number.
        p = tl.where(inside, tl.exp(a), 0.0)
        q = tl.where(inside, tl.exp(b), 0.0)
        difference = a - b
        p_sum += p
        q_sum += q
        p_dot += tl.where(p > 0, p * difference, 0.0)
        q_dot += tl.where(q > 0, q * difference, 0.0)

    p_all, q_all = tl.sum(p_sum, axis=0), tl.sum(q_sum, axis=0)
    apart = tl.zeros((block,), tl.float32)
    for start in range(0, vocab, block):
        at = start + lane
        inside = at < vocab
        a = tl.load(ref_row + at, mask=inside, other=float("-inf")).to(tl.float32) - ref_max
        b = tl.load(cand_row + at, mask=inside, other=float("-inf")).to(tl.float32) - cand_max
        apart += tl.where(
            inside, tl.abs(tl.exp(a) * (0.5 / p_all) - tl.exp(b) * (0.5 / q_all)), 0.0
        )

    gold = tl.load(gold_at + row)
    best = tl.load(ref_row + cand_first, mask=cand_first < vocab, other=0.0).to(tl.float32)
    tl.store(out_at + row, ref_max)
    tl.store(out_at + rows + row, p_all)
    tl.store(out_at + 2 * rows + row, q_all)
    tl.store(out_at + 3 * rows + row, tl.sum(p_dot, axis=0))
    tl.store(out_at + 4 * rows + row, tl.sum(q_dot, axis=0))
    tl.store(out_at + 5 * rows + row, tl.load(ref_row + gold).to(tl.float32) - ref_max)
    tl.store(out_at + 6 * rows + row, tl.load(cand_row + gold).to(tl.float32) - cand_max)
    tl.store(out_at + 7 * rows + row, best - ref_max)
    tl.store(out_at + 8 * rows + row, tl.sum(apart, axis=0))
    tl.store(out_at + 9 * rows + row, (ref_first == cand_first).to(tl.float32))
