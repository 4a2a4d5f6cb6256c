"""The plain rotation codec's round trip as one kernel on a GPU: what torch needs about eighty for.

All steps are rounded as torch rounds them, in the same order (sums in whole numbers; a multiply-add is fused only where its
product is exact), so that what comes back is the same bit for bit. Import it only where Triton is.

A vector lies in chunks, spread over the registers of two threads (more where it is wider than 128 values), so that few
stages of the transforms need an exchange between threads. Chunks are elements of tuples, and loops over them are unrolled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from assay.lab.quant.hadamard import squares_unit

if TYPE_CHECKING:
    import torch

# Triton puts tuples together by + alone, and their types are not those of Python.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,no-untyped-call,misc"


_PER_WARP = 256
"""Values of a chunk that a warp has: 16 bytes a thread in bf16."""


@triton.jit  # type: ignore[untyped-decorator]
def _stages_within(x, rows: tl.constexpr, lanes: tl.constexpr, stages: tl.constexpr):  # type: ignore[no-untyped-def]
    """Walsh-Hadamard stages inside a chunk. Neighbours meet, and the halves are put one after the other:

    each stage moves the lowest bit of the place to the top, so that after all of them the order is the old one."""
    for _ in tl.static_range(stages):
        even, odd = tl.split(tl.reshape(x, (rows, lanes // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (rows, lanes))
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _transformed(  # type: ignore[no-untyped-def]
    x,
    rows: tl.constexpr,
    lanes: tl.constexpr,
    chunks: tl.constexpr,
    within: tl.constexpr,
    across: tl.constexpr,
):
    """Walsh-Hadamard transform of each row, not scaled: stages inside chunks, then those between them."""
    y = ()
    for i in tl.static_range(chunks):
        y = y + (_stages_within(x[i], rows, lanes, within),)
    for stage in tl.static_range(across):
        z = ()
        for i in tl.static_range(chunks):
            if (i >> stage) & 1 == 0:
                z = z + (y[i] + y[i + (1 << stage)],)
            else:
                z = z + (y[i - (1 << stage)] - y[i],)
        y = z
    return y


@triton.jit  # type: ignore[untyped-decorator]
def _squares(x, chunks: tl.constexpr, unit: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum of squares of each row in whole numbers, as `assay.lab.quant.hadamard.sum_of_squares`."""
    total = tl.sum(tl.fma(x[0] * x[0], 1 / unit, 0.5).to(tl.int32), axis=1)
    for i in tl.static_range(1, chunks):
        total += tl.sum(tl.fma(x[i] * x[i], 1 / unit, 0.5).to(tl.int32), axis=1)
    return total.to(tl.float32) * unit


@triton.jit  # type: ignore[untyped-decorator]
def _nearest(z, levels, edges, half: tl.constexpr):  # type: ignore[no-untyped-def]
    """The nearest level of each value, of which there are as many below zero as above; these are given, as bits.

    A value on an edge, zero among them, has the lower level: below zero the outer one, as if it were farther out."""
    bits = z.to(tl.int32, bitcast=True)
    sign = (bits | (bits - 1)) & -2147483648
    magnitude = (bits & 0x7FFFFFFF) + ((bits >> 31) & 1)
    shape = tl.zeros_like(bits) + levels[0]
    for i in tl.static_range(half - 1):
        shape = tl.where(magnitude > edges[i], levels[i + 1], shape)
    return (shape | sign).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["vectors"])  # type: ignore[untyped-decorator]
def _round_trip(  # type: ignore[no-untyped-def]
    x_at,
    out_at,
    signs_at,
    levels_at,
    edges_at,
    vectors,
    stream_stride,
    token_stride,
    head_stride,
    heads: tl.constexpr,
    rows: tl.constexpr,
    lanes: tl.constexpr,
    chunks: tl.constexpr,
    within: tl.constexpr,
    across: tl.constexpr,
    scale: tl.constexpr,
    root: tl.constexpr,
    half: tl.constexpr,
    unit_of_values: tl.constexpr,
    unit_of_levels: tl.constexpr,
):
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    stream = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, lanes)[None, :]
    inside = (row < vectors)[:, None]
    source = stream * stream_stride + (row // heads).to(tl.int64) * token_stride + (row % heads) * head_stride
    place = (stream * vectors + row) * (chunks * lanes)
    # Small tables first: compared with while they are still under way, they cost registers.
    levels, edges = (), ()
    for i in tl.static_range(half):
        levels = levels + (tl.load(levels_at + half + i).to(tl.int32, bitcast=True),)
    for i in tl.static_range(half - 1):
        edges = edges + (tl.load(edges_at + half + i).to(tl.int32, bitcast=True),)
    x = ()
    for i in tl.static_range(chunks):
        at = x_at + source[:, None] + (column + i * lanes)
        x = x + (tl.load(at, mask=inside, other=0.0).to(tl.float32),)
    # As bits: a NaN is larger than all numbers then, and a vector with one must stay one.
    bits = x[0].to(tl.int32, bitcast=True) & 0x7FFFFFFF
    for i in tl.static_range(1, chunks):
        bits = tl.maximum(bits, x[i].to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    top = tl.max(bits, axis=1).to(tl.float32, bitcast=True)
    top = tl.where(top < 1e-30, 1e-30, top)
    unit, signed = (), ()
    for i in tl.static_range(chunks):
        unit = unit + (tl.div_rn(x[i], tl.broadcast_to(top[:, None], (rows, lanes))),)
        signed = signed + (unit[i] * tl.load(signs_at + column + i * lanes),)
    length = tl.maximum(tl.sqrt_rn(_squares(unit, chunks, unit_of_values)), 1e-30)
    # torch divides a number by a tensor so: the reciprocal first.
    to_variance_1 = tl.div_rn(tl.full((rows,), 1.0, tl.float32), length) * root
    z = _transformed(signed, rows, lanes, chunks, within, across)
    shape = ()
    for i in tl.static_range(chunks):
        shape = shape + (_nearest(z[i] * scale * to_variance_1[:, None], levels, edges, half),)
    factor = tl.div_rn(length, tl.sqrt_rn(_squares(shape, chunks, unit_of_levels))) * top
    # As fp16, with a power of two taken out where it would not fit; each vector its own, others are no matter here.
    power = ((factor.to(tl.int32, bitcast=True) >> 23) & 255) - 141
    power = tl.minimum(tl.maximum(power, 0), 112)
    up = ((power + 127) << 23).to(tl.float32, bitcast=True)
    down = ((127 - power) << 23).to(tl.float32, bitcast=True)
    stored = (factor * down).to(tl.float16).to(tl.float32) * up
    back = _transformed(shape, rows, lanes, chunks, within, across)
    for i in tl.static_range(chunks):
        value = back[i] * scale * tl.load(signs_at + column + i * lanes) * stored[:, None]
        at = out_at + place[:, None] + (column + i * lanes)
        tl.store(at, value.to(out_at.dtype.element_ty), mask=inside)


class RoundTrip:
    """The kernel with the tables of one codec on one device; `lanes` values of a chunk and `warps` change speed alone.

    `signs` [d] of the rotation, `levels` [2^b], those below zero as those above, and the `edges` [2^b − 1] between them,
    all float32; no level's square is larger than `largest`. d is a power of two.
    """

    def __init__(
        self,
        signs: torch.Tensor,
        levels: torch.Tensor,
        edges: torch.Tensor,
        *,
        largest: float,
        lanes: int | None = None,
        warps: int = 1,
    ) -> None:
        width = signs.shape[0]
        lanes = min(lanes or max(16, width // 8), width)
        chunks = width // lanes
        self._tables = signs, levels, edges
        self._rows = max(1, _PER_WARP * warps // lanes)
        self._constants = {
            "rows": self._rows,
            "lanes": lanes,
            "chunks": chunks,
            "within": lanes.bit_length() - 1,
            "across": chunks.bit_length() - 1,
            "scale": width**-0.5,
            "root": width**0.5,
            "half": levels.shape[0] // 2,
            "unit_of_values": squares_unit(width, 1.0),
            "unit_of_levels": squares_unit(width, largest),
            "num_warps": warps,
            "enable_fp_fusion": False,
        }

    def __call__(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`x` [streams, tokens, heads, d] as the codec gives it back, contiguous and rounded to `dtype`.

        Any strides but the last, which is 1.
        """
        streams, tokens, heads, _ = x.shape
        result = x.new_empty(x.shape, dtype=dtype)
        vectors = tokens * heads
        if streams * vectors:
            _round_trip[(-(-vectors // self._rows), streams)](
                x, result, *self._tables, vectors, *x.stride()[:3], heads=heads, **self._constants
            )
        return result
