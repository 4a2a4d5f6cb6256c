"""The kernels of packed pages in Triton: code into pages, attend to them with one query a request, combine what splits
found, and unpack the pages of requests for attention with many queries.

`assay.lab.kv.pages.layout` says what they compute; tests hold them against its reference in Triton's interpreter.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from assay.errors import AssayError
from assay.lab.kv.pages import layout as reference
from assay.lab.kv.pages.layout import Layout, StreamTables

DECODE: dict[int, dict[str, int]] = {
    64: {"num_warps": 1, "num_stages": 5, "tile": 64, "waves": 16},
    128: {"num_warps": 2, "num_stages": 5, "tile": 64, "waves": 2},
}
"""How decode runs, by head_dim: tokens read at once (a page holds whole tiles), and programs wanted for a multiprocessor.

The best of 24 settings over six cases on an H200 (`benchmarks/pages_speed.py kernel --tune`). Loads of a tile wait for its
number in the table: of 5 stages, 2 are the tiles that are on their way.
"""
ASM = True
"""Unpack codes by PTX's instructions for two numbers at once."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
UNPACK = {"num_warps": 4, "tile": 32}
"""How pages are unpacked: tokens at once."""


@triton.jit
def _code(z, g, ROUND: tl.constexpr, TOP: tl.constexpr):
    """Codes 0 … TOP of coefficients z [n, c] over gains g [n], at ROUND codes a unit."""
    scaled = z / g[:, None] * ROUND + ((TOP + 1) // 2 + 0.5)
    return tl.minimum(tl.maximum(tl.floor(scaled), 0.0), TOP * 1.0)


@triton.jit
def _error(z, codes, g, weight, ROUND: tl.constexpr, TOP: tl.constexpr):
    off = (codes - (TOP + 1) // 2) / ROUND * g[:, None] - z
    return tl.sum(off * off * weight[None, :], axis=1)


@triton.jit(do_not_specialize=["tokens"])
def store_kernel(
    k_ptr, k_token, v_ptr, v_token, pages_ptr, page_bytes, slots_ptr, positions_ptr, trig_ptr,
    mean_k_ptr, analysis_k_ptr, weight_k_ptr, mean_v_ptr, analysis_v_ptr, weight_v_ptr, tokens,
    OFF_NK: tl.constexpr, OFF_NV: tl.constexpr, OFF_TK: tl.constexpr, OFF_TV: tl.constexpr,
    OFF_GK: tl.constexpr, OFF_GV: tl.constexpr,
    SLOT: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Code keys and values [tokens, heads, D]; tables [heads, D(, D)], pages as bytes. Grid (ROWS tokens, heads, keys or values)."""
    if tl.program_id(2) == 0:
        _store(k_ptr, k_token, pages_ptr, page_bytes, slots_ptr, positions_ptr, trig_ptr, mean_k_ptr, analysis_k_ptr,
               weight_k_ptr, tokens, OFF_NK, OFF_TK, OFF_GK, SLOT, BLOCK, D, WIDE, True, ROWS)  # fmt: skip
    else:
        _store(v_ptr, v_token, pages_ptr, page_bytes, slots_ptr, positions_ptr, trig_ptr, mean_v_ptr, analysis_v_ptr,
               weight_v_ptr, tokens, OFF_NV, OFF_TV, OFF_GV, SLOT, BLOCK, D, WIDE, False, ROWS)  # fmt: skip


@triton.jit
def _store(
    x_ptr, x_token, pages_ptr, page_bytes, slots_ptr, positions_ptr, trig_ptr, mean_ptr, analysis_ptr, weight_ptr,
    tokens, OFF_N: tl.constexpr, OFF_T: tl.constexpr, OFF_G: tl.constexpr,
    SLOT: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ROTATE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Code ROWS tokens of one head of keys or values."""
    head = tl.program_id(1)
    HALF: tl.constexpr = D // 2
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < tokens
    slot = tl.load(slots_ptr + rows, mask=live, other=-1).to(tl.int64)
    live = live & (slot >= 0)
    c = tl.arange(0, HALF)
    at = x_ptr + rows.to(tl.int64)[:, None] * x_token + head * D + c[None, :]
    first = tl.load(at, mask=live[:, None], other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=live[:, None], other=0.0).to(tl.float32)
    mean1 = tl.load(mean_ptr + head * D + c)[None, :]
    mean2 = tl.load(mean_ptr + head * D + HALF + c)[None, :]
    if ROTATE:
        position = tl.load(positions_ptr + rows, mask=live, other=0).to(tl.int64)
        turn = trig_ptr + position[:, None] * D + c[None, :]
        cos, sin = tl.load(turn), tl.load(turn + HALF)
        first -= mean1 * cos - mean2 * sin
        second -= mean2 * cos + mean1 * sin
    else:
        first -= mean1
        second -= mean2
    table = analysis_ptr + head * D * D + c[:, None] * D + c[None, :]
    low = tl.dot(first, tl.load(table), input_precision="tf32x3")
    low += tl.dot(second, tl.load(table + HALF * D), input_precision="tf32x3")
    high = tl.dot(first, tl.load(table + HALF), input_precision="tf32x3")
    high += tl.dot(second, tl.load(table + HALF * D + HALF), input_precision="tf32x3")
    weight1 = tl.load(weight_ptr + head * D + c)
    weight2 = tl.load(weight_ptr + head * D + HALF + c)

    top = tl.maximum(tl.max(tl.abs(low), axis=1), tl.max(tl.abs(high), axis=1))
    top = tl.maximum(top, 1e-6) / 7.0
    wide = (c < WIDE)[None, :]
    best = tl.full([ROWS], float("inf"), tl.float32)
    gain = tl.full([ROWS], 1.0, tl.float32)
    for i in tl.static_range(4):
        # In parts of 20: 1, 0.85, 0.7 and 0.6, as the reference tries them.
        g = tl.maximum((top * ((20 - 3 * i + i // 3) / 20)).to(tl.float16).to(tl.float32), 5.9604644775390625e-08)
        near = _error(low, _code(low, g, 4.0, 63), g, tl.where(c < WIDE, weight1, 0.0), 4.0, 63)
        near += _error(low, _code(low, g, 1.0, 15), g, tl.where(c < WIDE, 0.0, weight1), 1.0, 15)
        near += _error(high, _code(high, g, 1.0, 15), g, weight2, 1.0, 15)
        gain = tl.where(near < best, g, gain)
        best = tl.minimum(near, best)

    fine = _code(low, gain, 4.0, 63).to(tl.int32)
    lows = tl.where(wide, fine >> 2, _code(low, gain, 1.0, 15).to(tl.int32))
    highs = _code(high, gain, 1.0, 15).to(tl.int32)
    page = pages_ptr + (slot // BLOCK) * page_bytes + head * (BLOCK * SLOT)
    place = slot % BLOCK
    tl.store((page + OFF_N + place * HALF)[:, None] + c[None, :], (lows | highs << 4).to(tl.uint8), mask=live[:, None])
    # Four codes of two bits to a byte: the others of a byte are added as 0.
    rest = tl.where(wide, (fine & 3) << (2 * (c % 4))[None, :], 0)
    packed = tl.sum(tl.reshape(rest, (ROWS, HALF // 4, 4)), axis=2)
    b = tl.arange(0, HALF // 4)
    tl.store((page + OFF_T + place * (WIDE // 4))[:, None] + b[None, :], packed.to(tl.uint8),
             mask=live[:, None] & (b < WIDE // 4)[None, :])  # fmt: skip
    gains = (page + OFF_G).to(tl.pointer_type(tl.float16)) + place
    tl.store(gains, gain.to(tl.float16), mask=live)


NIBBLES = """{ .reg .b32 a, b, c, d, e;
    prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;
    lop3.b32 $0, a, 0x000f000f, 0x64006400, 0xea; lop3.b32 $1, b, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $2, a, 0x00f000f0, 0x64006400, 0xea; lop3.b32 $3, b, 0x00f000f0, 0x64006400, 0xea;
    mov.b32 c, 0x64086408; mov.b32 d, 0x2c002c00; mov.b32 e, 0xd480d480;
    sub.f16x2 $0, $0, c; sub.f16x2 $1, $1, c; fma.rn.f16x2 $2, $2, d, e; fma.rn.f16x2 $3, $3, d, e; }"""
"""Of four bytes: 1024 + n has n in the last bits of its mantissa, less 1032; 1024 + 16 n over 16, less 72."""
FINE = """{ .reg .b32 a, b, c;
    prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342; mov.b32 c, 0x64006400;
    lop3.b32 $0, a, $3, c, 0xea; lop3.b32 $1, b, $4, c, 0xea; sub.f16x2 $0, $0, c; sub.f16x2 $1, $1, c; }"""
"""Of four bytes and their masks, 16 bits each: 1024 + n less 1024."""
NIBBLES, FINE = tl.constexpr(NIBBLES), tl.constexpr(FINE)


@triton.jit
def _whole(codes, ASM: tl.constexpr):
    """Numbers −8 … 7 in fp16 of the 4 low bits and of the 4 high bits of bytes."""
    if ASM:
        low, high = tl.inline_asm_elementwise(
            NIBBLES, "=&r,=&r,=&r,=&r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        low, high = (codes & 15).to(tl.float16) - 8.0, (codes >> 4).to(tl.float16) - 8.0
    return low.to(tl.float16), high.to(tl.float16)


@triton.jit
def _fine(packed, WIDE: tl.constexpr, ASM: tl.constexpr):
    """[n, WIDE] in fp16 of [n, WIDE / 4] bytes: two bits a channel where they stand, over which is `_place`."""
    same = tl.broadcast_to(packed[:, :, None], (packed.shape[0], WIDE // 4, 4)).reshape(packed.shape[0], WIDE)
    mask = (3 << (2 * (tl.arange(0, WIDE) % 4)))[None, :].to(tl.int16)
    if ASM:
        # An operation on each element alone: which four are in a register is the compiler's business.
        found = tl.inline_asm_elementwise(
            FINE, "=&r,=&r,r,r,r", [same, tl.broadcast_to(mask, same.shape)], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        found = (same.to(tl.int16) & mask).to(tl.float16)
    return found


@triton.jit
def _place(WIDE: tl.constexpr):
    """[WIDE] float32: a quarter over 1, 4, 16 and 64, for two bits that were left where they stand in their byte."""
    i = tl.arange(0, WIDE) % 4
    return tl.where(i < 2, tl.where(i == 0, 0.25, 0.0625), tl.where(i == 2, 0.015625, 0.00390625))


@triton.jit(do_not_specialize=["first_request", "splits"])
def attend_kernel(
    q_ptr, q_token, part_ptr, sum_ptr, pages_ptr, page_bytes, table_ptr, table_row,
    starts_ptr, lengths_ptr, trig_ptr, near_ptr, mean_k_ptr, synthesis_k_ptr, scale,
    first_request, splits,
    OFF_NK: tl.constexpr, OFF_NV: tl.constexpr, OFF_TK: tl.constexpr, OFF_TV: tl.constexpr,
    OFF_GK: tl.constexpr, OFF_GV: tl.constexpr,
    SLOT: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The one query token of a request, the GROUP ≤ ROWS heads of a KV head at once, over a part of its pages.

    Grid (requests, KV heads, splits).
    """
    HALF: tl.constexpr = D // 2
    head = tl.program_id(1)
    request = first_request + tl.program_id(0)
    begin = tl.load(starts_ptr + request)
    length = tl.load(lengths_ptr + request)
    share = tl.cdiv(tl.cdiv(length, splits), TILE) * TILE
    lo = tl.program_id(2) * share
    hi = tl.minimum(lo + share, length)
    if (tl.load(starts_ptr + request + 1) == begin) | (lo >= length):
        return
    row = tl.arange(0, ROWS)
    live = row < GROUP
    c = tl.arange(0, HALF)
    e = tl.arange(0, WIDE)

    # What depends on the query alone: q Sᵀ, and its products with cosines and sines.
    at = q_ptr + begin.to(tl.int64) * q_token + (head * GROUP + row)[:, None] * D + c[None, :]
    q1 = (tl.load(at, mask=live[:, None], other=0.0).to(tl.float32) * scale).to(tl.float16)
    q2 = (tl.load(at + HALF, mask=live[:, None], other=0.0).to(tl.float32) * scale).to(tl.float16)
    s_k = synthesis_k_ptr + head * D * D + c[:, None] + c[None, :] * D  # Sᵀ: channels of k down, codes across
    low = tl.dot(q1, tl.load(s_k)) + tl.dot(q2, tl.load(s_k + HALF))
    high = tl.dot(q1, tl.load(s_k + HALF * D)) + tl.dot(q2, tl.load(s_k + HALF * D + HALF))
    s_w = synthesis_k_ptr + head * D * D + c[:, None] + e[None, :] * D
    fine = tl.dot(q1, tl.load(s_w)) + tl.dot(q2, tl.load(s_w + HALF))
    low, high, fine = low.to(tl.float16), high.to(tl.float16), (fine * _place(WIDE)[None, :]).to(tl.float16)
    mean1 = tl.load(mean_k_ptr + head * D + c)[None, :]
    mean2 = tl.load(mean_k_ptr + head * D + HALF + c)[None, :]
    on_cos = q1.to(tl.float32) * mean1 + q2.to(tl.float32) * mean2
    on_sin = q2.to(tl.float32) * mean1 - q1.to(tl.float32) * mean2

    biggest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc1 = tl.zeros([ROWS, HALF], tl.float32)
    acc2 = tl.zeros([ROWS, HALF], tl.float32)
    acc3 = tl.zeros([ROWS, WIDE], tl.float32)
    n = tl.arange(0, TILE)
    # A tile's angles are those of its first token and, the same in every tile, those from there on.
    near = near_ptr + n[None, :] * D + c[:, None]
    near_cos, near_sin = tl.load(near), tl.load(near + HALF)
    b = tl.arange(0, WIDE // 4)
    for start in tl.range(lo, hi, TILE, num_stages=STAGES):
        block = tl.load(table_ptr + request.to(tl.int64) * table_row + start // BLOCK).to(tl.int64)
        page = pages_ptr + block * page_bytes + head * (BLOCK * SLOT)
        place = start % BLOCK + n
        token = start + n
        cos = tl.load(trig_ptr + start * D + c)[None, :]
        sin = tl.load(trig_ptr + start * D + HALF + c)[None, :]
        codes = tl.load(page + OFF_NK + place[:, None] * HALF + c[None, :])
        packed = tl.load(page + OFF_TK + place[:, None] * (WIDE // 4) + b[None, :])
        lows, highs = _whole(codes, ASM)
        s = tl.dot(low, tl.trans(lows))
        s = tl.dot(high, tl.trans(highs), s)
        s = tl.dot(fine, tl.trans(_fine(packed, WIDE, ASM)), s)
        gain = tl.load((page + OFF_GK).to(tl.pointer_type(tl.float16)) + place).to(tl.float32)
        fixed = tl.dot((on_cos * cos + on_sin * sin).to(tl.float16), near_cos)
        fixed = tl.dot((on_sin * cos - on_cos * sin).to(tl.float16), near_sin, fixed)
        s = s * gain[None, :] + fixed
        s = tl.where((token < length)[None, :], s, -float("inf"))  # every tile has a token
        new = tl.maximum(biggest, tl.max(s, axis=1))
        p = tl.exp2(s - new[:, None])
        fade = tl.exp2(biggest - new)
        total = total * fade + tl.sum(p, axis=1)
        biggest = new
        gain = tl.load((page + OFF_GV).to(tl.pointer_type(tl.float16)) + place).to(tl.float32)
        gain = tl.where(token < length, gain, 0.0)
        w = (p * gain[None, :]).to(tl.float16)
        codes = tl.load(page + OFF_NV + place[:, None] * HALF + c[None, :])
        packed = tl.load(page + OFF_TV + place[:, None] * (WIDE // 4) + b[None, :])
        lows, highs = _whole(codes, ASM)
        acc1 = tl.dot(w, lows, acc1 * fade[:, None])
        acc2 = tl.dot(w, highs, acc2 * fade[:, None])
        acc3 = tl.dot(w, _fine(packed, WIDE, ASM), acc3 * fade[:, None])

    # [requests, HEADS, splits, GROUP, D + WIDE], not yet over the sum.
    line = ((tl.program_id(0) * HEADS + head) * splits + tl.program_id(2)) * GROUP + row
    part = part_ptr + line.to(tl.int64)[:, None] * (D + WIDE)
    tl.store(part + c[None, :], acc1, mask=live[:, None])
    tl.store(part + HALF + c[None, :], acc2, mask=live[:, None])
    tl.store(part + D + e[None, :], acc3 * _place(WIDE)[None, :], mask=live[:, None])
    tl.store(sum_ptr + line * 2, biggest, mask=live)
    tl.store(sum_ptr + line * 2 + 1, total, mask=live)


@triton.jit(do_not_specialize=["first_request", "splits"])
def combine_kernel(
    part_ptr, sum_ptr, out_ptr, out_token, starts_ptr, lengths_ptr, synthesis_ptr, mean_ptr, first_request, splits,
    D: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Add up the splits of one request and query head, and turn the sum back into values."""
    HALF: tl.constexpr = D // 2
    request = first_request + tl.program_id(0)
    begin = tl.load(starts_ptr + request)
    length = tl.load(lengths_ptr + request)
    if (tl.load(starts_ptr + request + 1) == begin) | (length < 1):
        return
    head = tl.program_id(1) // GROUP
    share = tl.cdiv(tl.cdiv(length, splits), TILE) * TILE
    split = tl.arange(0, SPLITS)
    there = split * share < length
    line = ((tl.program_id(0) * HEADS + head) * splits + split) * GROUP + tl.program_id(1) % GROUP
    top = tl.load(sum_ptr + line * 2, mask=there, other=-float("inf"))
    factor = tl.exp2(top - tl.max(top, axis=0))
    total = tl.sum(factor * tl.load(sum_ptr + line * 2 + 1, mask=there, other=0.0), axis=0)
    factor = factor / total
    c = tl.arange(0, HALF)
    e = tl.arange(0, WIDE)
    part = part_ptr + line.to(tl.int64)[:, None] * (D + WIDE)
    some = there[:, None]
    y1 = tl.sum(tl.load(part + c[None, :], mask=some, other=0.0) * factor[:, None], axis=0)
    y2 = tl.sum(tl.load(part + HALF + c[None, :], mask=some, other=0.0) * factor[:, None], axis=0)
    y3 = tl.sum(tl.load(part + D + e[None, :], mask=some, other=0.0) * factor[:, None], axis=0)
    out = out_ptr + begin.to(tl.int64) * out_token + tl.program_id(1) * D
    for side in tl.static_range(2):
        s_v = synthesis_ptr + head * D * D + side * HALF + c[None, :]
        y = tl.sum(tl.load(s_v + c[:, None] * D).to(tl.float32) * y1[:, None], axis=0)
        y += tl.sum(tl.load(s_v + (HALF + c)[:, None] * D).to(tl.float32) * y2[:, None], axis=0)
        y += tl.sum(tl.load(s_v + e[:, None] * D).to(tl.float32) * y3[:, None], axis=0)
        y += tl.load(mean_ptr + head * D + side * HALF + c)
        tl.store(out + side * HALF + c, y.to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["first_request"])
def unpack_kernel(
    k_ptr, v_ptr, pages_ptr, page_bytes, table_ptr, table_row, lengths_ptr, places_ptr, trig_ptr,
    mean_k_ptr, mean_v_ptr, synthesis_k_ptr, synthesis_v_ptr, first_request,
    OFF_NK: tl.constexpr, OFF_NV: tl.constexpr, OFF_TK: tl.constexpr, OFF_TV: tl.constexpr,
    OFF_GK: tl.constexpr, OFF_GV: tl.constexpr,
    SLOT: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Keys after RoPE and values of requests, out of pages into [tokens, HEADS, D]; `places_ptr` says at which row each begins.

    Grid (tiles, KV heads, requests).
    """
    HALF: tl.constexpr = D // 2
    head = tl.program_id(1)
    request = first_request + tl.program_id(2)
    length = tl.load(lengths_ptr + request)
    start = tl.program_id(0) * TILE
    if start >= length:
        return
    n = tl.arange(0, TILE)
    c = tl.arange(0, HALF)
    token = start + n
    block = tl.load(table_ptr + request.to(tl.int64) * table_row + start // BLOCK).to(tl.int64)
    page = pages_ptr + block * page_bytes + head * (BLOCK * SLOT)
    place = start % BLOCK + n
    live = (token < length)[:, None]
    to = (tl.load(places_ptr + tl.program_id(2)) + token).to(tl.int64)[:, None] * (HEADS * D) + head * D + c[None, :]
    turn = trig_ptr + token.to(tl.int64)[:, None] * D + c[None, :]
    cos, sin = tl.load(turn, mask=live, other=0.0), tl.load(turn + HALF, mask=live, other=0.0)
    mean1 = tl.load(mean_k_ptr + head * D + c)[None, :]
    mean2 = tl.load(mean_k_ptr + head * D + HALF + c)[None, :]
    first, second = _unpacked(page, place, synthesis_k_ptr + head * D * D, OFF_NK, OFF_TK, OFF_GK, D, WIDE)
    kind = k_ptr.dtype.element_ty
    tl.store(k_ptr + to, (first + mean1 * cos - mean2 * sin).to(kind), mask=live)
    tl.store(k_ptr + to + HALF, (second + mean2 * cos + mean1 * sin).to(kind), mask=live)
    mean1 = tl.load(mean_v_ptr + head * D + c)[None, :]
    mean2 = tl.load(mean_v_ptr + head * D + HALF + c)[None, :]
    first, second = _unpacked(page, place, synthesis_v_ptr + head * D * D, OFF_NV, OFF_TV, OFF_GV, D, WIDE)
    tl.store(v_ptr + to, (first + mean1).to(kind), mask=live)
    tl.store(v_ptr + to + HALF, (second + mean2).to(kind), mask=live)


@triton.jit
def _unpacked(page, place, synthesis, OFF_N: tl.constexpr, OFF_T: tl.constexpr, OFF_G: tl.constexpr,
              D: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Both halves [n, D / 2] of the residuals at places [n] of a page, float32."""
    HALF: tl.constexpr = D // 2
    c = tl.arange(0, HALF)
    b = tl.arange(0, WIDE // 4)
    low, high = _whole(tl.load(page + OFF_N + place[:, None] * HALF + c[None, :]), False)
    packed = tl.load(page + OFF_T + place[:, None] * (WIDE // 4) + b[None, :])
    fine = (_fine(packed, WIDE, False) * _place(WIDE)[None, :]).to(tl.float16)
    gain = tl.load((page + OFF_G).to(tl.pointer_type(tl.float16)) + place).to(tl.float32)[:, None]
    row = synthesis + c[:, None] * D + c[None, :]
    wide = synthesis + tl.arange(0, WIDE)[:, None] * D + c[None, :]
    first = tl.dot(low, tl.load(row)) + tl.dot(high, tl.load(row + HALF * D)) + tl.dot(fine, tl.load(wide))
    row += HALF
    second = tl.dot(low, tl.load(row)) + tl.dot(high, tl.load(row + HALF * D)) + tl.dot(fine, tl.load(wide + HALF))
    return first * gain, second * gain


@dataclass(frozen=True)
class LayerTables:
    """The tables of a layer as kernels take them; `trig` [positions, d] and `near` [64, d], fp16, are shared by all layers."""

    layout: Layout
    k: StreamTables
    v: StreamTables
    trig: torch.Tensor
    near: torch.Tensor
    halves_k: torch.Tensor
    halves_v: torch.Tensor

    @classmethod
    def of(cls, layout: Layout, k: StreamTables, v: StreamTables, trig: torch.Tensor) -> LayerTables:
        """With S in fp16, as products with queries use it; all tensors on the device of `trig`."""
        k, v = k.to(trig.device), v.to(trig.device)
        scaling = trig[0, 0]  # that of the RoPE; angles are added up with one of both scaled
        return cls(layout, k, v, trig, (trig[:64] / scaling).half(), k.synthesis.half(), v.synthesis.half())


def store(
    k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, t: LayerTables
) -> None:
    """Code keys after RoPE and values [tokens, heads, d] into `slots` [tokens] of `pages` (uint8, contiguous)."""
    layout, tokens, rows = t.layout, slots.shape[0], 16
    store_kernel[(triton.cdiv(tokens, rows), layout.heads, 2)](
        k, k.stride(0), v, v.stride(0), pages, pages.stride(0), slots, positions, t.trig,
        t.k.mean, t.k.analysis, t.k.weight, t.v.mean, t.v.analysis, t.v.weight, tokens, *_places(layout),
        layout.slot, layout.block, layout.head_dim, layout.wide, rows, num_warps=4,
    )  # fmt: skip


def splits_of(requests: int, layout: Layout, longest: int, multiprocessors: int = 132) -> int:
    """Parts of a context, so that all multiprocessors have work."""
    how = DECODE[layout.head_dim]
    wanted = triton.next_power_of_2(triton.cdiv(how["waves"] * multiprocessors, requests * layout.heads))
    return int(max(1, min(64, wanted, triton.next_power_of_2(triton.cdiv(longest, how["tile"])))))


def attend(
    q: torch.Tensor, out: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, starts: torch.Tensor,
    lengths: torch.Tensor, t: LayerTables, scale: float, *, requests: int, longest: int,
) -> None:  # fmt: skip
    """Attention of the first `requests` requests, which have one query each, to their pages, into `out` [tokens, H, d].

    `q` [tokens, H, d]; `table` [requests, pages]; `starts` [requests + 1] the query row of each; `lengths` [requests]
    tokens, at most `longest`, that of the query included, which must be in the pages already.
    """
    layout = t.layout
    group = q.shape[1] // layout.heads
    rows = max(16, triton.next_power_of_2(group))
    how = DECODE[layout.head_dim]
    tile = min(how["tile"], layout.block)
    splits = splits_of(requests, layout, longest)
    lines = requests * layout.heads * splits * group
    part = q.new_empty(lines, layout.head_dim + layout.wide, dtype=torch.float32)
    sums = q.new_empty(lines, 2, dtype=torch.float32)
    attend_kernel[(requests, layout.heads, splits)](
        q, q.stride(0), part, sums, pages, pages.stride(0), table, table.stride(0),
        starts, lengths, t.trig, t.near, t.k.mean, t.halves_k, scale * 1.4426950408889634, 0, splits,
        *_places(layout), layout.slot, layout.block, layout.head_dim, layout.wide, group, layout.heads, rows, tile,
        how["num_stages"], ASM and not INTERPRETED, num_warps=how["num_warps"],
    )  # fmt: skip
    combine_kernel[(requests, q.shape[1])](
        part, sums, out, out.stride(0), starts, lengths, t.halves_v, t.v.mean, 0, splits,
        layout.head_dim, layout.wide, group, layout.heads, tile, splits, num_warps=4,
    )  # fmt: skip


def unpack(
    k: torch.Tensor, v: torch.Tensor, places: torch.Tensor, pages: torch.Tensor, table: torch.Tensor,
    lengths: torch.Tensor, t: LayerTables, *, first: int, requests: int, longest: int,
) -> None:  # fmt: skip
    """Keys after RoPE and values of requests `first` … `first + requests` − 1 into k and v [tokens, heads, d].

    `places` [requests] is the row at which each begins; `lengths` (of all requests), at most `longest`.
    """
    layout = t.layout
    tile = min(UNPACK["tile"], layout.block)
    unpack_kernel[(triton.cdiv(longest, tile), layout.heads, requests)](
        k, v, pages, pages.stride(0), table, table.stride(0), lengths, places, t.trig,
        t.k.mean, t.v.mean, t.halves_k, t.halves_v, first, *_places(layout), layout.slot, layout.block,
        layout.head_dim, layout.wide, layout.heads, tile, num_warps=UNPACK["num_warps"],
    )  # fmt: skip


def check(layout: Layout, group: int, dtype: torch.dtype, device: torch.device) -> None:
    """AssayError where kernels do not give on this device what the reference gives for a page and a half of drawn tokens.

    It is the compiler that is checked: another GPU or another version of Triton may make other code of the same kernels.
    """
    drawn, n, d, heads = torch.Generator().manual_seed(0), layout.block * 3 // 2, layout.head_dim, layout.heads
    sizes, place = torch.logspace(0.7, -0.7, d), torch.arange(n)
    turns = [torch.linalg.qr(torch.randn(heads, d, d, generator=drawn))[0] for _ in "kv"]
    tk, tv = (
        StreamTables(
            torch.randn(heads, d, generator=drawn), turn / sizes, (turn * sizes).mT, sizes.square().expand(heads, d)
        )
        for turn in turns
    )
    angles = reference.trigonometry(10000.0 ** (-torch.arange(0, d, 2) / d), 1.0, max(n, 64))
    t = LayerTables.of(layout, tk, tv, angles.to(device))
    turned = reference.rotated_mean(tk.mean, angles[:n])
    r = [torch.einsum("nhe,hed->nhd", torch.randn(n, layout.heads, d, generator=drawn), x.synthesis) for x in (tk, tv)]
    k, v = (r[0] + turned).to(dtype), (r[1] + tv.mean).to(dtype)
    q = torch.randn(1, layout.heads * group, d, generator=drawn).to(dtype)
    pages = torch.zeros(3, layout.heads * layout.block * layout.slot, dtype=torch.uint8, device=device)
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    slots = table[0, place // layout.block].long() * layout.block + place % layout.block
    starts, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 1], [n]))
    out, on = torch.zeros_like(q, device=device), table.to(device)
    found_k, found_v = (torch.zeros(n, layout.heads, d, dtype=dtype, device=device) for _ in "kv")
    store(k.to(device).contiguous(), v.to(device).contiguous(), place.to(device), pages, slots.to(device), t)
    attend(q.to(device), out, pages, on, starts, lengths, t, d**-0.5, requests=1, longest=n)
    unpack(found_k, found_v, starts, pages, on, lengths, t, first=0, requests=1, longest=n)
    held = [reference.read(pages.cpu(), layout, slots, "k", tk), reference.read(pages.cpu(), layout, slots, "v", tv)]
    coded = [
        reference.reconstruct(x, table_of, layout.wide)
        for x, table_of in ((k.float() - turned, tk), (v.float() - tv.mean, tv))
    ]
    exact = held[0] + turned, held[1] + tv.mean
    # Of the codes a few may fall on the other side of an edge; what is read are those that are in the pages.
    for what, found, wanted, most in (
        ("writes keys into pages", held[0], coded[0], 0.02), ("writes values into pages", held[1], coded[1], 0.02),
        ("attends to pages", out.cpu(), reference.attend(q, *exact, d**-0.5), 0.015),
        ("unpacks keys", found_k.cpu(), exact[0], 0.008), ("unpacks values", found_v.cpu(), exact[1], 0.008),
    ):  # fmt: skip
        off = float((found.float() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())
        if not off < most:
            raise AssayError(
                f"the kernel that {what} is wrong on this GPU with Triton {triton.__version__}: off by {off:.2%}, {most:.1%} at most",
                finding_id="kv.unsupported",
                remedy="serve with vLLM's own cache, and report the GPU and the version of Triton",
            )


def _places(layout: Layout) -> list[int]:
    found = layout.offsets()
    return [found[name][0] for name in ("nk", "nv", "tk", "tv", "gk", "gv")]
