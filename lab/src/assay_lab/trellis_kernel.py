"""The search of `assay_lab.trellis` as one kernel on a GPU: a row a thread, a warp a program.

The sums of all states stay in registers, one vector of rows a state, so that a step needs nothing
of another thread; costs are read a block of numbers ahead. Additions and comparisons are those of
torch in the same order, so that the paths are the same. Import it only where Triton is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

# Triton's tuples grow.
# mypy: disable-error-code="assignment"


_LANES = 32
_SUMS = 64
"""Sums of states in a block at most: more take a compiler long."""


@triton.jit  # type: ignore[untyped-decorator]
def _read(costs_at, start, inside, lanes: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Costs of `block` numbers of each row: 4 · block vectors, by number and then by quantiser and
    parity.
    """
    found = ()
    for k in tl.static_range(block):
        four = tl.load(
            costs_at[:, None] + (4 * (start + k) + tl.arange(0, 4))[None, :],
            mask=inside[:, None],
            other=0.0,
        )
        even, odd = tl.split(tl.reshape(four, (lanes, 2, 2)))
        even_0, even_1 = tl.split(even)
        odd_0, odd_1 = tl.split(odd)
        found = found + (even_0, odd_0, even_1, odd_1)  # noqa: RUF005
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _arrival(sums, costs, t: tl.constexpr, choice: tl.constexpr, half: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of state t, and whether the way from the higher state was the cheaper one.

    `choice`: that of the lower one in `costs`. The higher takes the same quantiser and the other
    parity.
    """
    low = sums[t >> 1] + costs[choice]
    high = sums[(t >> 1) + half] + costs[choice ^ 1]
    is_high = high < low
    return tl.where(is_high, high, low), is_high


@triton.jit  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    sums,
    costs,
    k: tl.constexpr,
    half: tl.constexpr,
    quantisers: tl.constexpr,
    parities: tl.constexpr,
    lanes: tl.constexpr,
):
    """Sums of all states after number k of `costs`; bit t of a word: whether state t came from the
    higher one.
    """
    word = tl.zeros((lanes,), tl.uint32)
    none = tl.zeros((lanes,), tl.uint32)
    found = ()
    for t in tl.static_range(2 * half):
        total, is_high = _arrival(
            sums,
            costs,
            t,
            4 * k + 2 * ((quantisers >> (t >> 1)) & 1) + (((parities >> (t >> 1)) ^ t) & 1),
            half,
        )
        found = found + (total,)  # noqa: RUF005
        word |= tl.where(is_high, tl.full((lanes,), 1 << t, tl.uint32), none)
    return found, word


@triton.jit  # type: ignore[untyped-decorator]
def _words(words_at, start, rows, inside, block: tl.constexpr):  # type: ignore[no-untyped-def]
    found = ()
    for k in tl.static_range(block):
        word = tl.load(words_at + (start + k) * rows, mask=inside, other=0)
        found = found + (word.to(tl.uint32, bitcast=True),)  # noqa: RUF005
    return found


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _search(  # type: ignore[no-untyped-def]
    costs_at,
    words_at,
    out_at,
    rows,
    count,
    far,
    half: tl.constexpr,
    quantisers: tl.constexpr,
    parities: tl.constexpr,
    block: tl.constexpr,
    lanes: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * lanes + tl.arange(0, lanes)
    inside = row < rows
    costs_at += row * (4 * count)
    words_at += row
    blocks = count // block
    stride = rows.to(tl.int64)

    sums = (tl.zeros((lanes,), tl.float32),)
    for _ in tl.static_range(1, 2 * half):
        sums = sums + (tl.zeros((lanes,), tl.float32) + far,)  # noqa: RUF005
    costs = _read(costs_at, 0, inside, lanes, block)
    for b in range(blocks):
        ahead = _read(costs_at, tl.minimum(b + 1, blocks - 1) * block, inside, lanes, block)
        for k in tl.static_range(block):
            sums, word = _step(sums, costs, k, half, quantisers, parities, lanes)
            tl.store(
                words_at + (b * block + k) * stride, word.to(tl.int32, bitcast=True), mask=inside
            )
        costs = ahead
    tl.debug_barrier()

    # The lowest of the cheapest states; a NaN is below all numbers.
    state = tl.zeros((lanes,), tl.uint32)
    least = sums[0]
    for s in tl.static_range(1, 2 * half):
        is_less = (sums[s] < least) | ((sums[s] != sums[s]) & (least == least))
        state = tl.where(is_less, tl.full((lanes,), s, tl.uint32), state)
        least = tl.where(is_less, sums[s], least)
    quantiser_bits = tl.full((lanes,), quantisers, tl.uint32)
    parity_bits = tl.full((lanes,), parities, tl.uint32)
    kind: tl.constexpr = out_at.dtype.element_ty
    words = _words(words_at, (blocks - 1) * block, stride, inside, block)
    for i in range(blocks):
        b = blocks - 1 - i
        ahead = _words(words_at, tl.maximum(b - 1, 0) * block, stride, inside, block)
        choices = tl.zeros((lanes,), kind)
        for k in tl.static_range(block - 1, -1, -1):
            source = (state >> 1) | (((words[k] >> state) & 1) * half)
            choice = 2 * ((quantiser_bits >> source) & 1) + (((parity_bits >> source) ^ state) & 1)
            choices |= choice.to(kind) << (8 * k)
            state = source
        tl.store(out_at + row * blocks + b, choices, mask=inside)
        words = ahead


def block_of(count: int, states: int) -> int:
    """Of `count` numbers, how many are read ahead: their choices are the bytes of one word."""
    return math.gcd(count, 8, _SUMS // states)


def search(costs: torch.Tensor, code: Any, *, far: float) -> torch.Tensor:
    """Of costs [rows, n, 2, 2], float32: what the cheapest path of each row takes, uint8 [rows, n].

    `far` is the sum of a state that no path has reached.
    """
    import torch

    rows, count = costs.shape[:2]
    out = torch.empty(rows, count, dtype=torch.uint8, device=costs.device)
    if rows and count:
        block = block_of(count, code.states)
        word = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[block]
        quantisers, parities = (
            sum(int(bit) << s for s, bit in enumerate(bits))
            for bits in (code.quantiser, code.parity[:, 0])
        )
        _search[(triton.cdiv(rows, _LANES),)](
            costs.contiguous(),
            torch.empty(count, rows, dtype=torch.int32, device=costs.device),
            out.view(word),
            rows,
            count,
            far,
            half=code.states // 2,
            quantisers=quantisers,
            parities=parities,
            block=block,
            lanes=_LANES,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return out
