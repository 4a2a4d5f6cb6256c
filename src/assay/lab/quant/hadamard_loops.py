"""The plain rotation codec on a CPU as two loops: what torch needs some forty passes over memory for.

All steps are rounded as torch rounds them, in the same order (no fused multiply-add; sums in whole numbers), so that what
comes out is the same bit for bit. Vectors are taken sixteen at a time, a tile that stays in the first cache. Import it
only where numba is.

A stage of the transform adds and subtracts neighbours and puts the halves one after the other: it moves the lowest bit
of the place to the top. Over a whole tile [vector, place] all stages therefore leave [place, vector], the order in
which sixteen vectors are handled side by side; four more moves of a bit bring [vector, place] back.
"""

from __future__ import annotations

import numpy as np
from numba import njit

LANES = 16
"""Vectors of a tile."""

_SIGNLESS = np.uint32(0x7FFFFFFF)
_HALF = np.float32(0.5)
_ONE = np.float32(1)
_NONE = np.float32(0)
_LEAST = np.float32(1e-30)

# Types are those of the first call. Slices let LLVM see that places do not wrap around.
_compiled = njit(nogil=True, cache=True, error_model="numpy")


@_compiled
def _stage(x, y):  # type: ignore[no-untyped-def]
    """One stage of the transform of x into y."""
    half = x.shape[0] // 2
    low, high = y[:half], y[half:]
    for j in range(half):
        a, b = x[2 * j], x[2 * j + 1]
        low[j] = a + b
        high[j] = a - b


@_compiled
def _three_stages(x, y):  # type: ignore[no-untyped-def]
    """Three stages in one pass: the same additions in the same order."""
    n = x.shape[0] // 8
    y0, y1, y2, y3 = y[:n], y[n : 2 * n], y[2 * n : 3 * n], y[3 * n : 4 * n]
    y4, y5, y6, y7 = y[4 * n : 5 * n], y[5 * n : 6 * n], y[6 * n : 7 * n], y[7 * n :]
    for j in range(n):
        k = 8 * j
        a0, a1, a2, a3 = x[k] + x[k + 1], x[k] - x[k + 1], x[k + 2] + x[k + 3], x[k + 2] - x[k + 3]
        a4, a5, a6, a7 = x[k + 4] + x[k + 5], x[k + 4] - x[k + 5], x[k + 6] + x[k + 7], x[k + 6] - x[k + 7]
        b0, b1, b2, b3 = a0 + a2, a1 + a3, a0 - a2, a1 - a3
        b4, b5, b6, b7 = a4 + a6, a5 + a7, a4 - a6, a5 - a7
        y0[j], y1[j], y2[j], y3[j] = b0 + b4, b1 + b5, b2 + b6, b3 + b7
        y4[j], y5[j], y6[j], y7[j] = b0 - b4, b1 - b5, b2 - b6, b3 - b7


@_compiled
def _transformed(x, y, width):  # type: ignore[no-untyped-def]
    """All stages; the tile that holds the result, and the other."""
    left = width
    while left > 1:
        if left >= 8:
            _three_stages(x, y)
            left //= 8
        else:
            _stage(x, y)
            left //= 2
        x, y = y, x
    return x, y


@_compiled
def _moved(x, y):  # type: ignore[no-untyped-def]
    """The lowest bit of each place moved to the top."""
    half = x.shape[0] // 2
    low, high = y[:half], y[half:]
    for j in range(half):
        low[j] = x[2 * j]
        high[j] = x[2 * j + 1]


@_compiled
def _vectors_first(x, y):  # type: ignore[no-untyped-def]
    """[place, vector] → [vector, place], in x."""
    _moved(x, y)
    _moved(y, x)
    _moved(x, y)
    _moved(y, x)


@_compiled
def _read(source, bits, is_bf16):  # type: ignore[no-untyped-def]
    """A vector of bfloat16 or float32, in words of 16 bits, as the bits of float32; the bits of its largest magnitude."""
    # Magnitudes are ordered as their bits are, and a NaN is above all of them.
    if is_bf16:
        for i in range(bits.shape[0]):
            bits[i] = np.uint32(source[i]) << np.uint32(16)
    else:
        for i in range(bits.shape[0]):
            bits[i] = np.uint32(source[2 * i]) | (np.uint32(source[2 * i + 1]) << np.uint32(16))
    top = np.uint32(0)
    for i in range(bits.shape[0]):
        top = max(top, np.uint32(bits[i] & _SIGNLESS))
    return top


@_compiled
def _to_unit(x, top, signs, unit):  # type: ignore[no-untyped-def]
    """A vector over its largest value, with signs; Σx² in whole units."""
    per = _ONE / unit
    whole = np.int32(0)
    for i in range(x.shape[0]):
        value = x[i] / top
        whole = np.int32(whole + np.int32(value * value * per + _HALF))
        x[i] = value * signs[i]
    return whole


@_compiled
def _repeated(each):  # type: ignore[no-untyped-def]
    """The first LANES values again and again."""
    done = LANES
    while done < each.shape[0]:
        source, target = each[:done], each[done : 2 * done]
        for j in range(done):
            target[j] = source[j]
        done *= 2


@_compiled
def _cells(z, each, scale, first, per, last, cells):  # type: ignore[no-untyped-def]
    """Rotated values brought to variance 1, and the cell of `assay.lab.quant.levels` that each is in."""
    for j in range(z.shape[0]):
        value = z[j] * scale * each[j]
        place = (value - first) * per
        place = place if place > _NONE else _NONE
        place = place if place < last else last
        z[j] = value
        cells[j] = np.uint32(np.int32(place))


@_compiled
def _search(z, cells, below, upper, squares, found, sums):  # type: ignore[no-untyped-def]
    """The nearest level of each value; its square, in whole units, onto the sum of its vector."""
    for start in range(0, z.shape[0], LANES):
        for r in range(LANES):
            j = start + r
            cell = cells[j]
            level = below[cell] + np.uint32(z[j] > upper[cell])
            found[j] = np.uint8(level)
            sums[r] += squares[level]


@_compiled
def _copied(source, target):  # type: ignore[no-untyped-def]
    for i in range(target.shape[0]):
        target[i] = source[i]


@_compiled
def encode(  # type: ignore[no-untyped-def]
    source,
    is_bf16,
    sizes,
    strides,
    lo,
    hi,
    signs,
    root,
    units,
    narrow,
    tables,
    wide_tables,
    low,
    high,
    factors,
):
    """Vectors lo … hi − 1 of `source`, words of values [a, b, c, width]: `sizes` (a, b, c) and their `strides` in words.

    Into `low` and `high`, uint8, the levels of the first `narrow` places and of the others; into `factors` ‖x‖ / ‖ẑ‖.
    `root`: (√width, 1 / √width); `units` of the squares of values and of levels. Tables of narrow and of wide places:
    edges below each cell, the next edge, where cells begin, cells in 1, squares of levels in whole units.
    False where a factor is no number: nothing here is to be used then.
    """
    width = signs.shape[0]
    words = width if is_bf16 else 2 * width
    tile = width * LANES
    edge = narrow * LANES
    first, second = np.zeros(tile, np.float32), np.empty(tile, np.float32)
    each, cells = np.ones(tile, np.float32), np.empty(tile, np.uint32)
    found, spare = np.empty(tile, np.uint8), np.empty(tile, np.uint8)
    tops, lengths = np.ones(LANES, np.float32), np.ones(LANES, np.float32)
    top_bits = tops.view(np.uint32)
    sums = np.empty(LANES, np.int32)
    below, upper, begin, per, squares = tables
    below_wide, upper_wide, begin_wide, per_wide, squares_wide = wide_tables
    last, last_wide = np.float32(below.shape[0] - 1), np.float32(below_wide.shape[0] - 1)
    a, b, c = lo // (sizes[1] * sizes[2]), lo // sizes[2] % sizes[1], lo % sizes[2]
    good = True
    for start in range(lo, hi, LANES):
        rows = min(LANES, hi - start)
        for r in range(rows):
            at = a * strides[0] + b * strides[1] + c * strides[2]
            x = first[r * width : (r + 1) * width]
            top_bits[r] = _read(source[at : at + words], x.view(np.uint32), is_bf16)
            tops[r] = max(tops[r], _LEAST)
            whole = _to_unit(x, tops[r], signs, units[0])
            lengths[r] = max(np.sqrt(np.float32(whole) * units[0]), _LEAST)
            # torch divides a number by a tensor so: the reciprocal first.
            each[r] = _ONE / lengths[r] * root[0]
            c += 1
            if c == sizes[2]:
                b, c = b + 1, 0
                if b == sizes[1]:
                    a, b = a + 1, 0
        _repeated(each)
        z, _ = _transformed(first, second, width)
        sums[:] = 0
        _cells(z[:edge], each[:edge], root[1], begin, per, last, cells[:edge])
        _search(z[:edge], cells[:edge], below, upper, squares, found[:edge], sums)
        _cells(z[edge:], each[edge:], root[1], begin_wide, per_wide, last_wide, cells[edge:])
        _search(z[edge:], cells[edge:], below_wide, upper_wide, squares_wide, found[edge:], sums)
        _vectors_first(found, spare)
        wide = width - narrow
        for r in range(rows):
            v = start + r
            _copied(found[r * width : r * width + narrow], low[v * narrow : (v + 1) * narrow])
            _copied(found[r * width + narrow : (r + 1) * width], high[v * wide : (v + 1) * wide])
            factors[v] = lengths[r] / np.sqrt(np.float32(sums[r]) * units[1]) * tops[r]
            good &= factors[v] < np.inf
    return good


@_compiled
def _looked_up(codes, levels, x):  # type: ignore[no-untyped-def]
    for i in range(codes.shape[0]):
        x[i] = levels[codes[i]]


@_compiled
def _scaled(x, scale, signs, factor, out):  # type: ignore[no-untyped-def]
    for i in range(x.shape[0]):
        out[i] = x[i] * scale * signs[i] * factor


@_compiled
def decode(low, high, levels, wide_levels, signs, scale, factors, sizes, strides, lo, hi, out):  # type: ignore[no-untyped-def]
    """Vectors lo … hi − 1 of what `encode` made, into the flat `out`, at `strides` of [a, b, c] of `sizes`.

    `levels` and `wide_levels` have 256 entries, so that no byte is beyond them; `scale` is 1 / √width.
    """
    width = signs.shape[0]
    narrow = low.shape[0] // factors.shape[0]
    wide = width - narrow
    first, second = np.zeros(width * LANES, np.float32), np.empty(width * LANES, np.float32)
    a, b, c = lo // (sizes[1] * sizes[2]), lo // sizes[2] % sizes[1], lo % sizes[2]
    for start in range(lo, hi, LANES):
        rows = min(LANES, hi - start)
        for r in range(rows):
            v = start + r
            x = first[r * width : (r + 1) * width]
            _looked_up(low[v * narrow : (v + 1) * narrow], levels, x[:narrow])
            _looked_up(high[v * wide : (v + 1) * wide], wide_levels, x[narrow:])
        z, other = _transformed(first, second, width)
        _vectors_first(z, other)
        for r in range(rows):
            at = a * strides[0] + b * strides[1] + c * strides[2]
            x = z[r * width : (r + 1) * width]
            _scaled(x, scale, signs, factors[start + r], out[at : at + width])
            c += 1
            if c == sizes[2]:
                b, c = b + 1, 0
                if b == sizes[1]:
                    a, b = a + 1, 0
