"""The search of `assay_lab.trellis` on a CPU: sixteen rows side by side, from the first number to
the last and back.

Additions and comparisons are those of torch in the same order, so that the paths are the same, NaN
and ties included. LLVM makes no vectors of a step written as a loop, where it would have to know
that old and new sums are apart: a pair of states is written in its vectors, two to four times as
fast. Import it only where numba is.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

LANES = 16
"""Rows of a tile."""
_LEAST = 256
"""Rows for which a second thread is worth waking."""

_ONE, _TWO = np.uint32(1), np.uint32(2)

_compiled = njit(nogil=True, cache=True, error_model="numpy")

_SUMS = ir.VectorType(ir.FloatType(), LANES)
_BITS = ir.VectorType(ir.IntType(32), LANES)


@intrinsic
def _butterfly(typing, sums, costs, words, low, high, x, y, even, word, bit):  # type: ignore[no-untyped-def]
    """From the states at `low` and `high` of `sums` to the two that both lead to, at `even` and
    behind it.

    A tile is LANES values at a place of a flat array: `sums` and `costs` float32, `words` uint32.
    The even one takes cost `x` from the low and `y` from the high state, the odd one the other way
    round. Where the high way is cheaper, bit `bit` (even) or `bit` + 1 (odd) of `word` is set.
    """
    signature = types.void(sums, costs, words, *[types.int64] * 7)

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        arrays = [
            context.make_array(kind)(context, builder, array).data
            for kind, array in zip(signature.args[:3], args[:3], strict=True)
        ]
        low, high, x, y, even, word, bit = args[3:]

        def tile(array: Any, place: Any, kind: Any) -> Any:
            return builder.bitcast(builder.gep(array, [place]), kind.as_pointer())

        def load(at: Any) -> Any:
            loaded = builder.load(at)
            loaded.align = 4
            return loaded

        from_low, from_high = (load(tile(arrays[0], place, _SUMS)) for place in (low, high))
        cost, other = (load(tile(arrays[1], place, _SUMS)) for place in (x, y))
        word_at = tile(arrays[2], word, _BITS)
        bits = load(word_at)
        none = ir.Constant(_BITS, [0] * LANES)
        first = builder.trunc(bit, ir.IntType(32))
        odd = builder.add(even, ir.Constant(even.type, LANES))
        for place, one, two, value in ((even, cost, other, 1), (odd, other, cost, 2)):
            by_low, by_high = builder.fadd(from_low, one), builder.fadd(from_high, two)
            is_high = builder.fcmp_ordered("<", by_high, by_low)  # not where one is a NaN
            builder.store(
                builder.select(is_high, by_high, by_low), tile(arrays[0], place, _SUMS)
            ).align = 4
            shifted = builder.shl(ir.Constant(first.type, value), first)
            single = builder.insert_element(none, shifted, ir.Constant(ir.IntType(32), 0))
            bits = builder.or_(
                bits, builder.select(is_high, builder.shuffle_vector(single, none, none), none)
            )
        builder.store(bits, word_at).align = 4
        return context.get_dummy_value()

    return signature, generate


@_compiled
def _last(sums, states, lane):  # type: ignore[no-untyped-def]
    """The lowest of the cheapest states of a row, as `argmin` finds it: a NaN is below all
    numbers.
    """
    found, least = 0, sums[lane]
    for s in range(1, states):
        value = sums[s * LANES + lane]
        if value < least or (value != value and least == least):
            found, least = s, value
    return np.uint32(found)


@_compiled
def _search(costs, quantisers, parities, far, lo, hi, out):  # type: ignore[no-untyped-def]
    """Rows lo … hi − 1 of `costs` [rows, 4 n], float32: the choice 2 · quantiser + parity of each
    number into `out`.

    `quantisers` and `parities` [states] of the number that leaves a state by input 0, uint8; `far`
    the sum of a state that no path has reached; `out` uint8 [rows, n].
    """
    count, states = out.shape[1], quantisers.shape[0]
    half, size = states // 2, states * LANES
    quantiser_bits, parity_bits, top = np.uint32(0), np.uint32(0), np.uint32(0)
    while 2 << top < states:  # a shift: LLVM makes vectors of it, not of a product
        top += _ONE
    for s in range(states):
        quantiser_bits |= np.uint32(quantisers[s]) << np.uint32(s)
        parity_bits |= np.uint32(parities[s]) << np.uint32(s)
    sums = np.empty(2 * size, np.float32)
    words = np.empty(count * LANES, np.uint32)
    turned = np.zeros(4 * LANES, np.float32)
    state = np.empty(LANES, np.uint32)
    for start in range(lo, hi, LANES):
        rows = min(LANES, hi - start)
        sums[:LANES] = 0
        sums[LANES:size] = far
        words[:] = 0
        old, new = 0, size
        for j in range(count):
            for r in range(rows):
                for k in range(4):
                    turned[k * LANES + r] = costs[start + r, 4 * j + k]
            for s in range(half):
                choice = 2 * np.int64(quantisers[s]) + np.int64(parities[s])
                _butterfly(
                    sums,
                    turned,
                    words,
                    old + s * LANES,
                    old + (s + half) * LANES,
                    choice * LANES,
                    (choice ^ 1) * LANES,
                    new + 2 * s * LANES,
                    j * LANES,
                    2 * s,
                )
            old, new = new, old
        for r in range(rows):
            state[r] = _last(sums[old : old + size], states, r)
        for j in range(count - 1, -1, -1):
            for r in range(rows):
                way = (words[j * LANES + r] >> state[r]) & _ONE
                source = (state[r] >> _ONE) | (way << top)
                parity = ((parity_bits >> source) ^ state[r]) & _ONE
                out[start + r, j] = np.uint8(_TWO * ((quantiser_bits >> source) & _ONE) + parity)
                state[r] = source


def search(costs: torch.Tensor, code: Any, *, far: float) -> torch.Tensor:
    """Of costs [rows, n, 2, 2], float32: what the cheapest path of each row takes, uint8 [rows, n].

    `far` is the sum of a state that no path has reached. Rows are shared out among as many threads
    as torch has; numba's own are not used, as they die in a forked process.
    """
    rows, count = costs.shape[:2]
    out = torch.empty(rows, count, dtype=torch.uint8)
    source, into = costs.detach().reshape(rows, 4 * count).contiguous().numpy(), out.numpy()
    fixed = (code.quantiser, np.ascontiguousarray(code.parity[:, 0]), np.float32(far))
    parts = max(1, min(torch.get_num_threads(), rows // _LEAST))
    ends = [rows * i // parts for i in range(parts + 1)]

    def part(lo: int, hi: int) -> None:
        _search(source, *fixed, lo, hi, into)

    others = [_pool(os.getpid(), parts - 1).submit(part, lo, hi) for lo, hi in pairwise(ends[1:])]
    part(0, ends[1])
    for other in others:
        other.result()
    return out


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads of this process: those of a parent are gone after a fork."""
    return ThreadPoolExecutor(threads, thread_name_prefix="assay-trellis")
