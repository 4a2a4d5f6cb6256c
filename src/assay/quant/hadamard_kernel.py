"""The plain rotation codec's round trip as one kernel on a GPU: what torch needs about eighty for.

All steps are rounded as torch rounds them, in the same order (no fused multiply-add; sums in whole numbers), so that what
comes back is the same bit for bit. Import it only where Triton is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from assay.quant.hadamard import squares_unit

if TYPE_CHECKING:
    import torch

_ROWS = 32


@triton.jit  # type: ignore[untyped-decorator]
def _transformed(x, rows: tl.constexpr, width: tl.constexpr, stages: tl.constexpr, scale: tl.constexpr):  # type: ignore[no-untyped-def]
    """Walsh-Hadamard transform of each row. Neighbours meet, and the halves are put one after the other:

    each stage moves the lowest bit of the place to the top, so that after all of them the order is the old one."""
    for _ in tl.static_range(stages):
        even, odd = tl.split(tl.reshape(x, (rows, width // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (rows, width))
    return x * scale


@triton.jit  # type: ignore[untyped-decorator]
def _squares(x, unit: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum of squares of each row in whole numbers, as `assay.quant.hadamard.sum_of_squares`."""
    return tl.sum((x * x * (1 / unit) + 0.5).to(tl.int32), axis=1).to(tl.float32) * unit


@triton.jit  # type: ignore[untyped-decorator]
def _round_trip(  # type: ignore[no-untyped-def]
    x_at,
    out_at,
    signs_at,
    levels_at,
    edges_at,
    vectors,
    heads,
    token_stride,
    head_stride,
    rows: tl.constexpr,
    width: tl.constexpr,
    stages: tl.constexpr,
    scale: tl.constexpr,
    root: tl.constexpr,
    levels: tl.constexpr,
    unit_of_values: tl.constexpr,
    unit_of_levels: tl.constexpr,
):
    row = (tl.program_id(0) * rows + tl.arange(0, rows)).to(tl.int64)
    column = tl.arange(0, width)
    inside = (row < vectors)[:, None]
    source = (row // heads) * token_stride + (row % heads) * head_stride
    x = tl.load(x_at + source[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    signs = tl.load(signs_at + column)[None, :]
    top = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-30)
    # The largest value is one that is a number; a vector with a NaN must stay one.
    top = tl.where(tl.max((x != x).to(tl.int32), axis=1) > 0, float("nan"), top)
    unit = tl.div_rn(x, tl.broadcast_to(top[:, None], (rows, width)))
    length = tl.maximum(tl.sqrt_rn(_squares(unit, unit_of_values)), 1e-30)
    # torch divides a number by a tensor so: the reciprocal first.
    to_variance_1 = tl.div_rn(tl.full((rows,), 1.0, tl.float32), length) * root
    z = _transformed(unit * signs, rows, width, stages, scale) * to_variance_1[:, None]
    shape = tl.zeros((rows, width), tl.float32) + tl.load(levels_at)
    for i in tl.static_range(levels - 1):
        shape = tl.where(z > tl.load(edges_at + i), tl.load(levels_at + i + 1), shape)
    factor = tl.div_rn(length, tl.sqrt_rn(_squares(shape, unit_of_levels))) * top
    # As fp16, with a power of two taken out where it would not fit; each vector its own, others are no matter here.
    power = ((factor.to(tl.int32, bitcast=True) >> 23) & 255) - 141
    power = tl.minimum(tl.maximum(power, 0), 112)
    up = ((power + 127) << 23).to(tl.float32, bitcast=True)
    down = ((127 - power) << 23).to(tl.float32, bitcast=True)
    stored = (factor * down).to(tl.float16).to(tl.float32) * up
    back = _transformed(shape, rows, width, stages, scale) * signs * stored[:, None]
    tl.store(out_at + row[:, None] * width + column[None, :], back, mask=inside)


def round_trip(
    x: torch.Tensor, signs: torch.Tensor, levels: torch.Tensor, edges: torch.Tensor, *, largest: float
) -> torch.Tensor:
    """`x` [tokens, heads, d] as the codec gives it back, float32 contiguous; d a power of two, values next to each other.

    `signs` [d] of the rotation, `levels` [2^b] and the `edges` [2^b − 1] between them, all float32 on x's device; no
    level's square is larger than `largest`.
    """
    tokens, heads, width = x.shape
    result = x.new_empty((tokens, heads, width), dtype=signs.dtype)
    vectors = tokens * heads
    if vectors:
        _round_trip[(triton.cdiv(vectors, _ROWS),)](
            x,
            result,
            signs,
            levels,
            edges,
            vectors,
            heads,
            x.stride(0),
            x.stride(1),
            rows=_ROWS,
            width=width,
            stages=width.bit_length() - 1,
            scale=width**-0.5,
            root=width**0.5,
            levels=levels.shape[0],
            unit_of_values=squares_unit(width, 1.0),
            unit_of_levels=squares_unit(width, largest),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return result
