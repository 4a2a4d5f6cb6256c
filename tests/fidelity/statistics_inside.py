"""Runs in a Python that has Triton, whose interpreter stands in for a GPU: the kernel's statistics
against float64.
"""

from __future__ import annotations

import math
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from assay.fidelity.metrics.fused_gpu import alike, fused_row_sums
from assay.fidelity.metrics.row_sums import RowSums, _stacked_sums
from assay.fidelity.metrics.token_statistics import RowStatistics, row_statistics, statistics_of

INF, NAN = float("inf"), float("nan")


def by_kernel(ref: torch.Tensor, cand: torch.Tensor, gold: torch.Tensor) -> RowStatistics:
    *sides, same_best = fused_row_sums(ref, cand, gold)
    return statistics_of(RowSums(*sides, same_best > 0), None)


def same_by_both(*rows: torch.Tensor) -> bool:
    return alike(fused_row_sums(*rows), _stacked_sums(*rows))


def brute_force(
    ref: torch.Tensor, cand: torch.Tensor, gold: torch.Tensor
) -> dict[str, torch.Tensor]:
    log_p, log_q = ref.double().log_softmax(-1), cand.double().log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    own = gold[:, None]

    def mean(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.where(weights > 0, weights * values, 0.0).sum(-1)

    return {
        "nll_ref": -log_p.gather(1, own)[:, 0],
        "nll_cand": -log_q.gather(1, own)[:, 0],
        "kl": mean(p, log_p - log_q),
        "kl_rev": mean(q, log_q - log_p),
        "p_ref": p.gather(1, own)[:, 0],
        "p_cand": q.gather(1, own)[:, 0],
        "conf": p.amax(-1),
        "tv": (p - q).abs().sum(-1) / 2,
    }


def first(x: torch.Tensor) -> list[int]:
    """The lowest index of the largest, spelt out."""
    return [row.index(max(row)) for row in x.float().tolist()]


def bf16_steps(row: list[float], a: int, b: int) -> float:
    """How many steps of bf16 lie between two logits of a row, spelt out."""
    size = max(abs(row[a]), abs(row[b]))
    return (row[a] - row[b]) / 2.0 ** (math.floor(math.log2(size)) - 7) if size else 0.0


def check(
    ref: torch.Tensor, cand: torch.Tensor, gold: torch.Tensor, *, top1: bool = True
) -> RowStatistics:
    found = by_kernel(ref, cand, gold)
    for name, wanted in brute_force(ref, cand, gold).items():
        torch.testing.assert_close(getattr(found, name), wanted, rtol=1e-5, atol=1e-5)
    if top1:
        same = [a == b for a, b in zip(first(ref), first(cand), strict=True)]
        assert found.top1.tolist() == same
        flips = [
            a != b and bf16_steps(row, a, b) > 1
            for row, a, b in zip(ref.tolist(), first(ref), first(cand), strict=True)
        ]
        assert found.beyond.tolist() == flips
    return found


generator = torch.Generator().manual_seed(1)
KINDS = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.bfloat16),
)
SIZES = ((4.0, 0.05, 0.0), (12.0, 2.0, 100.0), (0.1, 1e-4, -30.0))
for i, vocab in enumerate((1, 2, 700, 2048, 2049, 5000)):
    for k, (own, other) in enumerate(KINDS):
        scale, noise, offset = SIZES[(i + k) % 3]
        ref = torch.randn(2, vocab, generator=generator) * scale
        cand = ref + torch.randn(2, vocab, generator=generator) * noise + offset
        check(ref.to(own), cand.to(other), torch.randint(0, vocab, (2,), generator=generator))

# Equal logits differ by exactly nothing.
same = torch.randn(2, 5000, generator=generator).bfloat16() * 5
found = check(same, same.clone(), torch.tensor([3, 4999]))
assert (
    (found.kl == 0).all() and (found.kl_rev == 0).all() and (found.nll_ref == found.nll_cand).all()
)
assert found.top1.all()

# Ties: across lanes, across blocks of the kernel, and within rounding of bf16; the lowest id wins.
ties = torch.zeros(4, 5000)
ties[0, [17, 40]] = 3.0
ties[1, [2100, 52]] = 3.0
ties[2, [4999, 2047]] = 3.0
other = torch.zeros(4, 5000)
other[[0, 1, 2], [17, 52, 4999]] = 3.0
found = check(ties, other, torch.arange(4))
assert found.top1.tolist() == [True, True, False, True]
grid = torch.randint(0, 3, (2, 6, 4500), generator=generator).bfloat16()
check(*grid, torch.arange(6))
assert same_by_both(*grid, torch.arange(6))

# Softcapped and huge logits; slices of wider rows, as where one side has padding.
capped = torch.tanh(torch.randn(2, 3, 3000, generator=generator) * 10) * 30
check(*capped, torch.arange(3))
huge = torch.randn(2, 3, 3000, generator=generator) * 1e30
found = by_kernel(*huge, torch.arange(3))
assert found.nll_ref.isfinite().all() and same_by_both(*huge, torch.arange(3))
wide = torch.cat([capped[1], torch.full((3, 40), 50.0)], 1)[:, :3000]
check(capped[0], wide, torch.arange(3))

# What a side rules out, and rows that are no numbers.
ref, cand = (torch.randn(6, 2500, generator=generator) for _ in range(2))
ref[0, 9], cand[1, 2400], ref[2, 5], cand[2, 5] = -INF, -INF, -INF, -INF
check(ref[:3], cand[:3], torch.arange(3))
ref[3, 2300], cand[4, 0], ref[5] = NAN, INF, -INF
found, wanted = by_kernel(ref, cand, torch.arange(6)), row_statistics(ref, cand, torch.arange(6))
for name in ("kl", "kl_rev", "nll_ref", "nll_cand", "conf", "tv"):
    torch.testing.assert_close(
        getattr(found, name), getattr(wanted, name), rtol=1e-5, atol=1e-5, equal_nan=True
    )
assert (
    found.kl[0].isfinite()
    and found.kl[1] == INF
    and found.kl_rev[0] == INF
    and found.kl[2].isfinite()
)
assert found.kl[3:].isnan().all() and not found.top1[3:].any()
assert same_by_both(ref, cand, torch.arange(6))
assert not alike(
    fused_row_sums(ref, cand, torch.arange(6)), _stacked_sums(ref.roll(1, 0), cand, torch.arange(6))
)
sys.stdout.write("equal\n")
