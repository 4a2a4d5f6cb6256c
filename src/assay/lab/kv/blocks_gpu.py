"""Stored blocks decoded on a GPU: the entropy coder in Triton, then the products that predict from lower layers.

One launch decodes the coefficients of all sections of a group of blocks: a thread follows the four states of a section, as
`assay.lab.kv.rans` does, so what a CPU encoded is read and coefficients are the same bit by bit. Products may be rounded
differently in bf16. Groups take turns on two CUDA streams: while one is decoded, threads copy the next one into pinned
memory, check its blocks there, and send it. Nothing is launched for a block whose checksum does not hold.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from assay.lab.kv import rans
from assay.lab.kv.blocks import BlockCodec, BlockDamaged, BlockTables, Header, block_tokens
from assay.lab.kv.codecs.pca_entropy import LAWS

_LOG = logging.getLogger("assay.kv")

SETTINGS = {"sections": 4, "merged": False, "num_warps": 1}
"""Sections of a program (as many threads follow their states), one look-up of four bytes or two of one and four, warps."""
_STEP = 512
GROUP = 4096
"""Tokens that are decoded together."""
_ESCAPE = tl.constexpr(0x7FC0)
"""What stands for an escape among coefficients in bf16 until it is filled in."""
_LOWEST = tl.constexpr(65536)


@triton.jit
def _word(words, at, there):
    """16 bits as uint32, 0 where there are none."""
    return (tl.load(words + at, mask=there, other=0).to(tl.int32) & 0xFFFF).to(tl.uint32, bitcast=True)


@triton.jit
def _two_words(words, at, there):
    return _word(words, at, there) | (_word(words, at + 1, there) << 16)


@triton.jit
def _refill(x, at, end, words):
    short = x < _LOWEST
    x = tl.where(short, (x << 16) | _word(words, at, short & (at < end)), x)
    return x, at + short.to(tl.int32)


@triton.jit
def _take(x, at, end, live, law, words, slots, codes, MERGED: tl.constexpr):
    """The next name of each state under its law, the state after it, and where the next word stands."""
    slot = x & 4095
    if MERGED:
        entry = tl.load(slots + law * 4096 + slot.to(tl.int32)).to(tl.uint32, bitcast=True)
        name = entry & 255
        y = (((entry >> 8) & 4095) + 1) * (x >> 12) + (entry >> 20)
    else:
        name = tl.load(slots + law * 4096 + slot.to(tl.int32)).to(tl.uint32)
        entry = tl.load(codes + law * 256 + name.to(tl.int32)).to(tl.uint32, bitcast=True)
        y = (entry & 0xFFFF) * (x >> 12) + (slot - (entry >> 16))
    x, at = _refill(tl.where(live, y, x), at, end, words)
    return name.to(tl.int32), x, at


@triton.jit
def _rounded(x):
    """float32 as the bits of the nearest bf16, in int32."""
    b = x.to(tl.uint32, bitcast=True)
    return ((b + 0x7FFF + ((b >> 16) & 1)) >> 16).to(tl.int32)


@triton.jit
def _number(
    x, at, end, live, kind, own, words, slots, codes, shifts, laws, one, more, times,
    CLASSES: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """One number of each section, under a law that may have low bits: its coefficient as bf16 bits, whether it is an escape, state and place."""
    law = tl.load(laws + own * CLASSES + kind)
    name, x, at = _take(x, at, end, live, law, words, slots, codes, MERGED)
    m = tl.load(shifts + law)
    low = (x & ((1 << m) - 1).to(tl.uint32)).to(tl.int32)
    x, at = _refill(tl.where(live, x >> m.to(tl.uint32), x), at, end, words)
    k = ((name - 128) << m) | low
    size = tl.abs(k)
    gap = tl.where(size == 1, one, more)
    value = k.to(tl.float32) - tl.where(k < 0, -gap, gap)
    bits = _rounded(tl.where(size == 0, 0.0, value * times))
    escaped = live & (name == 255)
    return tl.where(escaped, _ESCAPE, bits), escaped.to(tl.int32), x, at


@triton.jit
def _looked_up(x, law, slots, MERGED: tl.constexpr):
    """The names that states stand for under their laws, and what `_after` needs beside them."""
    slot = x & 4095
    if MERGED:
        entry = tl.load(slots + law * 4096 + slot.to(tl.int32)).to(tl.uint32, bitcast=True)
        return (entry & 255).to(tl.int32), entry
    else:  # noqa: RET505 (a constant: one of the two is compiled)
        name = tl.load(slots + law * 4096 + slot.to(tl.int32)).to(tl.int32)
        return name, slot


@triton.jit
def _after(x, name, entry, law, codes, MERGED: tl.constexpr):
    """States behind their names, which may lack a word yet."""
    if MERGED:
        return (((entry >> 8) & 4095) + 1) * (x >> 12) + (entry >> 20)
    else:  # noqa: RET505
        code = tl.load(codes + law * 256 + name).to(tl.uint32, bitcast=True)
        return (code & 0xFFFF) * (x >> 12) + (entry - (code >> 16))


@triton.jit
def _value(name, live, one, more, times):
    """What a number stands for, scaled, as bf16 bits; whether it is an escape."""
    k = name - 128
    size = tl.abs(k)
    gap = tl.where(size == 1, one, more)
    value = k.to(tl.float32) - tl.where(k < 0, -gap, gap)
    escaped = live & (name == 255)
    return tl.where(escaped, _ESCAPE, _rounded(tl.where(size == 0, 0.0, value * times))), escaped.to(tl.int32)


@triton.jit
def _narrow_four(
    t, x0, x1, x2, x3, at, end, tokens, found, own, words, slots, codes, laws, one, more, times, kinds, to,
    CLASSES: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """As `_four` where no law has low bits: every look-up of all four states before what hangs on it, so that they overlap."""
    packed = tl.load(kinds + t // 4, mask=t < tokens, other=0)
    law0, law1 = tl.load(laws + own * CLASSES + (packed & 255)), tl.load(laws + own * CLASSES + ((packed >> 8) & 255))
    law2 = tl.load(laws + own * CLASSES + ((packed >> 16) & 255))
    law3 = tl.load(laws + own * CLASSES + ((packed >> 24) & 255))
    n0, f0 = _looked_up(x0, law0, slots, MERGED)
    n1, f1 = _looked_up(x1, law1, slots, MERGED)
    n2, f2 = _looked_up(x2, law2, slots, MERGED)
    n3, f3 = _looked_up(x3, law3, slots, MERGED)
    y0, y1 = _after(x0, n0, f0, law0, codes, MERGED), _after(x1, n1, f1, law1, codes, MERGED)
    y2, y3 = _after(x2, n2, f2, law2, codes, MERGED), _after(x3, n3, f3, law3, codes, MERGED)
    l0, l1, l2, l3 = t < tokens, t + 1 < tokens, t + 2 < tokens, t + 3 < tokens
    y0, y1, y2, y3 = tl.where(l0, y0, x0), tl.where(l1, y1, x1), tl.where(l2, y2, x2), tl.where(l3, y3, x3)
    s0, s1, s2, s3 = y0 < _LOWEST, y1 < _LOWEST, y2 < _LOWEST, y3 < _LOWEST
    at1 = at + s0.to(tl.int32)
    at2 = at1 + s1.to(tl.int32)
    at3 = at2 + s2.to(tl.int32)
    w0, w1 = _word(words, at, s0 & (at < end)), _word(words, at1, s1 & (at1 < end))
    w2, w3 = _word(words, at2, s2 & (at2 < end)), _word(words, at3, s3 & (at3 < end))
    x0, x1 = tl.where(s0, (y0 << 16) | w0, y0), tl.where(s1, (y1 << 16) | w1, y1)
    x2, x3 = tl.where(s2, (y2 << 16) | w2, y2), tl.where(s3, (y3 << 16) | w3, y3)
    b0, e0 = _value(n0, l0, one, more, times)
    b1, e1 = _value(n1, l1, one, more, times)
    b2, e2 = _value(n2, l2, one, more, times)
    b3, e3 = _value(n3, l3, one, more, times)
    tl.store(to + t // 2, _pair(b0, b1), mask=l0)
    tl.store(to + t // 2 + 1, _pair(b2, b3), mask=l0)
    return x0, x1, x2, x3, at3 + s3.to(tl.int32), found + e0 + e1 + e2 + e3


@triton.jit
def _pair(a, b):
    return (a & 0xFFFF) | (b << 16)


@triton.jit
def _four(
    t, x0, x1, x2, x3, at, end, tokens, found, own, words, slots, codes, shifts, laws, one, more, times, kinds, to,
    CLASSES: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Four tokens of one channel in each section, one of each state."""
    packed = tl.load(kinds + t // 4, mask=t < tokens, other=0)
    b0, e0, x0, at = _number(x0, at, end, t < tokens, packed & 255, own, words, slots, codes, shifts, laws, one, more, times,
                             CLASSES, MERGED)  # fmt: skip
    b1, e1, x1, at = _number(x1, at, end, t + 1 < tokens, (packed >> 8) & 255, own, words, slots, codes, shifts, laws, one, more,
                             times, CLASSES, MERGED)  # fmt: skip
    b2, e2, x2, at = _number(x2, at, end, t + 2 < tokens, (packed >> 16) & 255, own, words, slots, codes, shifts, laws, one,
                             more, times, CLASSES, MERGED)  # fmt: skip
    b3, e3, x3, at = _number(x3, at, end, t + 3 < tokens, (packed >> 24) & 255, own, words, slots, codes, shifts, laws, one,
                             more, times, CLASSES, MERGED)  # fmt: skip
    tl.store(to + t // 2, _pair(b0, b1), mask=t < tokens)
    tl.store(to + t // 2 + 1, _pair(b2, b3), mask=t < tokens)
    return x0, x1, x2, x3, at, found + e0 + e1 + e2 + e3


@triton.jit(do_not_specialize=["blocks", "out_row", "kinds_row"])
def decode_kernel(
    words, starts, ends, tokens_ptr, columns_ptr, blocks, ranks, firsts, rows, classes_ptr, laws, wide_ptr, numbers,
    slots, codes, shifts, kinds_ptr, kinds_row, out, out_row, good,
    LAW_COUNT: tl.constexpr, CLASSES: tl.constexpr, SECTIONS: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Coefficients of SECTIONS blocks of one stream. Grid (groups of blocks, streams).

    `words` are blocks as int16; `starts`, `ends` [streams, blocks] of sections in it. Of each stream: its coefficients
    (`ranks`), the first of them among all (`firsts`), its first row of `out`, its classes. Of each coefficient: laws [.., CLASSES],
    whether they have low bits, and `numbers` [.., 3]: what |k| = 1 and larger lie nearer to 0 by, and the scale. Law
    LAW_COUNT + stream is that of its classes. `out` [rows, out_row] are two bf16 at a time, `kinds` [streams, kinds_row] four classes.
    """
    stream = tl.program_id(1)
    i = tl.program_id(0) * SECTIONS + tl.arange(0, SECTIONS)
    there = i < blocks
    begin = tl.load(starts + stream * blocks + i, mask=there, other=0)
    end = tl.load(ends + stream * blocks + i, mask=there, other=0)
    column = tl.load(columns_ptr + i, mask=there, other=0)
    count = _two_words(words, begin, there & (begin + 2 <= end))
    fits = there & (count < 1 << 24)
    escapes = tl.where(fits, count, 0).to(tl.int32)
    at = begin + 2 + 2 * escapes
    fits = fits & (at + 8 <= end)
    tokens = tl.where(fits, tl.load(tokens_ptr + i, mask=there, other=0), 0)
    most = tl.max(tokens, axis=0)
    x0, x1 = _two_words(words, at, fits), _two_words(words, at + 2, fits)
    x2, x3 = _two_words(words, at + 4, fits), _two_words(words, at + 6, fits)
    at = at + 8
    kinds = kinds_ptr + stream * kinds_row + column // 4
    if tl.load(classes_ptr + stream) > 1:
        law = LAW_COUNT + stream
        for t in range(0, most, 4):
            k0, x0, at = _take(x0, at, end, t < tokens, law, words, slots, codes, MERGED)
            k1, x1, at = _take(x1, at, end, t + 1 < tokens, law, words, slots, codes, MERGED)
            k2, x2, at = _take(x2, at, end, t + 2 < tokens, law, words, slots, codes, MERGED)
            k3, x3, at = _take(x3, at, end, t + 3 < tokens, law, words, slots, codes, MERGED)
            packed = (k0 - 128) | ((k1 - 128) << 8) | ((k2 - 128) << 16) | ((k3 - 128) << 24)
            tl.store(kinds + t // 4, packed, mask=t < tokens)
    else:
        for t in range(0, most, 4):
            tl.store(kinds + t // 4, tl.zeros([SECTIONS], tl.int32), mask=t < tokens)
    tl.debug_barrier()
    first, row = tl.load(firsts + stream), tl.load(rows + stream).to(tl.int64)
    found = tl.zeros([SECTIONS], tl.int32)
    for c in range(tl.load(ranks + stream)):
        own = first + c
        one, more, times = tl.load(numbers + own * 3), tl.load(numbers + own * 3 + 1), tl.load(numbers + own * 3 + 2)
        to = out + (row + c) * out_row + column // 2
        if tl.load(wide_ptr + own) > 0:
            for t in range(0, most, 4):
                x0, x1, x2, x3, at, found = _four(
                    t, x0, x1, x2, x3, at, end, tokens, found, own, words, slots, codes, shifts, laws, one, more, times, kinds, to,
                    CLASSES, MERGED)  # fmt: skip
        else:
            for t in range(0, most, 4):
                x0, x1, x2, x3, at, found = _narrow_four(
                    t, x0, x1, x2, x3, at, end, tokens, found, own, words, slots, codes, laws, one, more, times, kinds, to,
                    CLASSES, MERGED)  # fmt: skip
    whole = (x0 == _LOWEST) & (x1 == _LOWEST) & (x2 == _LOWEST) & (x3 == _LOWEST)
    whole = whole & fits & (at == end) & (found == escapes)
    tl.store(good + stream * blocks + i, whole.to(tl.int32), mask=there)


@triton.jit(do_not_specialize=["blocks", "out_row"])
def escape_kernel(
    words, starts, tokens_ptr, columns_ptr, blocks, ranks, firsts, rows, numbers, out, out_row, good, TOKENS: tl.constexpr
):  # fmt: skip
    """Fill in the escapes of one section in the order in which they stand; `out` as int16. Grid (blocks, streams)."""
    block, stream = tl.program_id(0), tl.program_id(1)
    begin = tl.load(starts + stream * blocks + block)
    fine = tl.load(good + stream * blocks + block)
    lo, hi = tl.load(words + begin, mask=fine > 0, other=0), tl.load(words + begin + 1, mask=fine > 0, other=0)
    if (lo != 0) | (hi != 0):
        t = tl.arange(0, TOKENS)
        live = t < tl.load(tokens_ptr + block)
        first, row = tl.load(firsts + stream), tl.load(rows + stream).to(tl.int64)
        column, used = tl.load(columns_ptr + block), 0
        for c in range(tl.load(ranks + stream)):
            to = out + (row + c) * out_row + column + t
            escaped = live & (tl.load(to, mask=live, other=0) == _ESCAPE)
            number = escaped.to(tl.int32)
            place = begin + 2 + 2 * (used + tl.cumsum(number, axis=0) - number)
            value = _two_words(words, place, escaped).to(tl.float32, bitcast=True)
            tl.store(to, _rounded(value * tl.load(numbers + (first + c) * 3 + 2)).to(tl.int16), mask=escaped)
            used += tl.sum(number, axis=0)


@triton.jit(do_not_specialize=["columns", "x_row", "out_tokens"])
def place_kernel(
    x, x_row, to_ptr, cos_ptr, sin_ptr, out, out_tokens, columns,
    HEADS: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, TURN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """x [streams · width, columns] into out [streams, tokens, width], RoPE put on keys where TURN.

    Grid (tiles of columns, streams · heads). Column j is token `to[j]`, none where that is below 0.
    """
    stream, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    j = tl.program_id(0) * TILE + tl.arange(0, TILE)
    to = tl.load(to_ptr + j, mask=j < columns, other=-1)
    c = tl.arange(0, PADDED)
    live = (to >= 0)[:, None] & (c < HALF)[None, :]
    start = (tl.program_id(1) * (2 * HALF)).to(tl.int64)
    at = x + (start + c)[None, :] * x_row + j[:, None]
    a = tl.load(at, mask=live, other=0.0).to(tl.float32)
    b = tl.load(at + HALF * x_row, mask=live, other=0.0).to(tl.float32)
    if TURN:
        turn = live & ((c + stream) % 2 == c % 2)[None, :]
        cos = tl.load(cos_ptr + j[:, None] * HALF + c[None, :], mask=turn, other=1.0)
        sin = tl.load(sin_ptr + j[:, None] * HALF + c[None, :], mask=turn, other=0.0)
        a, b = a * cos - b * sin, b * cos + a * sin
    here = out + (stream.to(tl.int64) * out_tokens + to)[:, None] * (HEADS * 2 * HALF) + head * 2 * HALF + c[None, :]
    tl.store(here, a.to(out.dtype.element_ty), mask=live)
    tl.store(here + HALF, b.to(out.dtype.element_ty), mask=live)


@dataclass
class _Slot:
    """What one group needs while another is under way; memory is kept from call to call."""

    stream: Any
    sent: Any
    pinned: torch.Tensor
    notes: torch.Tensor
    inputs: torch.Tensor
    decoded: torch.Tensor
    kinds: torch.Tensor
    graphs: dict[int, Any] = field(default_factory=dict)


class GpuBlockCodec(BlockCodec):
    """A codec whose blocks are decoded on `device`; it encodes on the CPU. `group` tokens are decoded together."""

    def __init__(self, tables: BlockTables, device: torch.device | str, threads: int = 8, group: int = GROUP) -> None:
        super().__init__(tables, threads)
        self.device, self.group = torch.device(device), group
        self.settings = dict(SETTINGS)
        self._copies = ThreadPoolExecutor(self.threads, "assay-kv-copy")
        self._slots: list[_Slot] = []
        self._weights: dict[int, torch.Tensor] = {}

    @cached_property
    def _on_device(self) -> dict[str, torch.Tensor]:
        """Tables of all streams, one after the other."""
        streams = list(self._streams.values())
        slots, codes, shifts = rans.tables()
        for stream in streams:
            own = (
                stream.classes if stream.classes[0].size else (np.zeros(rans.TOTAL, np.uint8), np.zeros(256, np.uint32))
            )
            slots, codes = np.concatenate([slots, own[0][None]]), np.concatenate([codes, own[1][None]])
        named = np.take_along_axis(codes, slots.astype(np.int64), axis=1)
        rest = np.arange(rans.TOTAL, dtype=np.uint32) - (named >> 16)
        merged = slots | (((named & 0xFFFF) - 1) & 4095) << 8 | rest << 20
        classes = max(len(stream.laws) for stream in streams)
        laws = [np.pad(s.laws, ((0, classes - len(s.laws)), (0, 0)), mode="edge").T for s in streams]
        depth = [stream.weight.shape[1] for stream in streams]
        numbers = [np.stack([*s.gaps, s.scale], axis=1) for s in streams]
        found = {
            "slots": slots,
            "merged": merged.astype(np.uint32).view(np.int32),
            "codes": codes.view(np.int32),
            "shifts": shifts.astype(np.int32),
            "ranks": np.array([s.rank for s in streams], np.int32),
            "firsts": np.cumsum([0, *(s.rank for s in streams)])[:-1].astype(np.int32),
            "rows": np.cumsum([0, *depth])[:-1].astype(np.int32),
            "classes": np.array([s.classes[1].size and len(s.laws) for s in streams], np.int32),
            "laws": np.concatenate(laws).astype(np.int32),
            "wide": np.concatenate([shifts[law].max(axis=1) for law in laws]).astype(np.int32),
            "numbers": np.concatenate(numbers).astype(np.float32),
            "inv_freq": self.tables.tensors["inv_freq"],
        }
        self._class_count, self._depth = classes, sum(depth)
        on = {name: torch.from_numpy(np.ascontiguousarray(table)).to(self.device) for name, table in found.items()}
        for i, stream in enumerate(streams):
            self._weights[i] = stream.weight.to(self.device)
        self._ranks, self._rows = [s.rank for s in streams], np.cumsum([0, *depth])[:-1].tolist()
        return on

    def warm(self, tokens: int) -> None:
        """Compile the kernels for blocks of so many tokens, which takes seconds, and record products as CUDA graphs."""
        shape = self.facts.layers, 2, tokens, self.facts.width
        block = self.encode(torch.zeros(shape, dtype=torch.bfloat16), first=0, key=bytes(32))
        self.decode([block] * (2 * self.group // tokens + 1))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            for slot in self._slots:
                try:
                    self._record(slot)
                except RuntimeError as error:  # they are launched one by one then
                    slot.graphs.clear()
                    _LOG.warning("products of stored blocks run without a CUDA graph: %s", error)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _record(self, slot: _Slot) -> None:
        """Products are a hundred small launches: a graph of them for every multiple of 512 columns."""
        for columns in range(_STEP, slot.inputs.shape[1] + 1, _STEP):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(slot.stream):
                self._product(slot, columns)
            slot.stream.synchronize()
            with torch.cuda.graph(graph, stream=slot.stream, capture_error_mode="thread_local"):
                self._product(slot, columns)
            slot.graphs[columns] = graph

    def decode(self, blocks: Sequence[bytes], keys: Sequence[bytes] | None = None) -> torch.Tensor:
        """As `BlockCodec.decode`, on the device."""
        groups = list(self.decode_groups(blocks, keys))
        return torch.cat(groups, dim=2) if len(groups) != 1 else groups[0]

    def decode_groups(self, blocks: Sequence[bytes], keys: Sequence[bytes] | None = None) -> Iterator[torch.Tensor]:
        """Tokens of some blocks after the other [layers, 2, tokens, width], in the order of the current CUDA stream.

        BlockRefused comes before a group that holds a block that is not believed, or at the end for one that was no code of its tables
        although its checksum holds: then nothing that came before counts.
        """
        if not blocks:
            yield super().decode([]).to(self.device)
            return
        goods, at, turn = [], 0, 0
        while at < len(blocks):
            tokens = [block_tokens(data) for data in blocks[at : at + self.group]]
            # A group takes one block at least.
            fit = max(1, int((np.cumsum(tokens) <= self.group).sum()))
            x, good = self._group(turn % 2, blocks[at : at + fit], None if keys is None else keys[at : at + fit])
            goods.append(good)
            yield x
            at, turn = at + fit, turn + 1
        if not bool(torch.cat(goods).all()):
            raise BlockDamaged("a section of a block is no code of its tables")

    def _stage(
        self, pinned: NDArray[np.uint8], blocks: Sequence[bytes], keys: Sequence[bytes] | None
    ) -> tuple[list[Header], NDArray[np.int64]]:
        """Copy blocks into pinned memory and check them there; their headers, and where they begin."""
        sizes = np.array([len(data) for data in blocks])
        places = np.cumsum([0, *((sizes + 15) // 16 * 16)])[:-1]

        def one(i: int) -> Header:
            here = pinned[places[i] : places[i] + sizes[i]]
            here[:] = np.frombuffer(blocks[i], np.uint8)
            return self.check(here.data, keys[i] if keys is not None else None)

        return list(self._copies.map(one, range(len(blocks)))), places

    # Threads of an engine may be in inference mode, tests are not.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _group(
        self, number: int, blocks: Sequence[bytes], keys: Sequence[bytes] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tables, facts, cuda = self._on_device, self.facts, self.device.type == "cuda"
        slot = self._slot(number)
        room = sum(len(data) + 16 for data in blocks)
        if cuda:
            slot.sent.synchronize()
        if slot.pinned.numel() < room:
            slot.pinned = torch.empty(room * 5 // 4, dtype=torch.uint8, pin_memory=cuda)
        heads, places = self._stage(slot.pinned.numpy(), blocks, keys)
        streams, width = 2 * facts.layers, facts.width
        coded = np.array([head.tokens - head.exact for head in heads])
        total = sum(head.tokens for head in heads)
        exact = np.array([2 * facts.layers * h.exact * width * h.kind.itemsize for h in heads])
        begins = places + [head.exact_at for head in heads] + exact
        ends = begins + np.cumsum([head.sizes for head in heads], axis=1).T  # [streams, blocks]
        starts = ends - np.array([head.sizes for head in heads]).T
        if (ends % 2).any():
            raise BlockDamaged("a section of a block is no whole number of words")
        column = np.cumsum([0, *((coded + 3) // 4 * 4)])
        columns = int(column[-1])
        to, positions = np.full(columns, -1), np.zeros(columns, np.int64)
        first = 0
        for head, n, c in zip(heads, coded, column[:-1], strict=True):
            to[c : c + n] = first + head.exact + np.arange(n)
            positions[c : c + n] = head.first + head.exact + np.arange(n)
            first += head.tokens
        parts = (starts // 2, ends // 2, coded, column[:-1], to, positions)
        # Each at a multiple of 16 bytes: Triton compiles a kernel for every alignment of its arguments.
        padded = [np.pad(part.ravel(), (0, -part.size % 4)) for part in parts]
        notes = np.concatenate(padded).astype(np.int32)
        # All memory is the slot's own stream's: groups do not wait for what an engine does with the ones before.
        with torch.cuda.stream(slot.stream) if cuda else nullcontext():
            self._make_room(slot, columns, notes.size)
            slot.notes[: notes.size] = torch.from_numpy(notes)
            out = torch.empty(facts.layers, 2, total, width, dtype=heads[0].kind, device=self.device)
            used = int(places[-1]) + len(blocks[-1])
            raw = slot.pinned[: used + used % 2].to(self.device, non_blocking=True)
            sent = slot.notes[: notes.size].to(self.device, non_blocking=True)
            if cuda:
                slot.sent.record()
            halves = zip(sent.split([part.size for part in padded]), parts, strict=True)
            begin, end, counts, where, to_, place = (half[: part.size] for half, part in halves)
            good = torch.zeros(streams * len(blocks), dtype=torch.int32, device=self.device)
            self._coefficients(slot, raw.view(torch.int16), begin, end, counts, where, int(coded.max()), good)
            self._products(slot, columns)
            turn = facts.before_rope
            angles = place.double()[:, None] * tables["inv_freq"] if turn else place.double()[:0, None]
            cos, sin = ((f(angles) * facts.scaling).float() for f in (torch.cos, torch.sin))
            half = facts.head_dim // 2
            if columns:
                place_kernel[(triton.cdiv(columns, 32), streams * facts.kv_heads)](
                    slot.decoded, slot.decoded.shape[1], to_, cos, sin, out, total, columns, HEADS=facts.kv_heads, HALF=half,
                    PADDED=triton.next_power_of_2(half), TURN=turn, TILE=32, enable_fp_fusion=False,
                )  # fmt: skip
            first = 0
            for head, at, size in zip(heads, places, exact, strict=True):
                if head.exact:
                    here = raw[at + head.exact_at : at + head.exact_at + size].view(head.kind)
                    out[:, :, first : first + head.exact] = here.view(facts.layers, 2, head.exact, width)
                first += head.tokens
        if cuda:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(slot.stream)
            for x in (out, good):
                x.record_stream(current)
        return out, good

    def _coefficients(
        self, slot: _Slot, words: torch.Tensor, begin: torch.Tensor, end: torch.Tensor, counts: torch.Tensor,
        where: torch.Tensor, longest: int, good: torch.Tensor,
    ) -> None:  # fmt: skip
        """Decode all sections into the coefficients' rows of `inputs`."""
        tables, blocks = self._on_device, counts.numel()
        streams, sections, merged = len(self._streams), int(self.settings["sections"]), bool(self.settings["merged"])
        row = slot.inputs.shape[1]
        decode_kernel[(triton.cdiv(blocks, sections), streams)](
            words, begin, end, counts, where, blocks, tables["ranks"], tables["firsts"], tables["rows"], tables["classes"],
            tables["laws"], tables["wide"], tables["numbers"], tables["merged" if merged else "slots"], tables["codes"],
            tables["shifts"], slot.kinds, slot.kinds.shape[1], slot.inputs.view(torch.int32), row // 2, good,
            LAW_COUNT=LAWS, CLASSES=self._class_count, SECTIONS=sections, MERGED=merged,
            num_warps=int(self.settings["num_warps"]),
        )  # fmt: skip
        escape_kernel[(blocks, streams)](
            words, begin, counts, where, blocks, tables["ranks"], tables["firsts"], tables["rows"], tables["numbers"],
            slot.inputs.view(torch.int16), row, good, TOKENS=triton.next_power_of_2(max(16, longest)), num_warps=4,
        )  # fmt: skip

    def _products(self, slot: _Slot, columns: int) -> None:
        """By their graph where one was recorded: columns behind those that are wanted do no harm."""
        graph = slot.graphs.get(-(-columns // _STEP) * _STEP)
        if graph is not None:
            graph.replay()
        else:
            self._product(slot, columns)

    def _product(self, slot: _Slot, columns: int) -> None:
        """What the streams are decoded to, layer by layer, from their coefficients and what was decoded before."""
        width = self.facts.width
        for i, stream in enumerate(self._streams.values()):
            first, rank, depth = self._rows[i], self._ranks[i], self._weights[i].shape[1]
            if stream.sides:
                sides = [2 * number + "kv".index(side) for number, side in stream.sides]
                below = [slot.decoded[s * width : (s + 1) * width, :columns] for s in sides]
                torch.cat(below, out=slot.inputs[first + rank + 2 : first + depth, :columns])
            found = slot.decoded[i * width : (i + 1) * width, :columns]
            torch.mm(self._weights[i], slot.inputs[first : first + depth, :columns], out=found)

    def _slot(self, number: int) -> _Slot:
        while len(self._slots) <= number:
            cuda, none = self.device.type == "cuda", torch.empty(0, dtype=torch.uint8)
            stream, sent = (torch.cuda.Stream(self.device), torch.cuda.Event()) if cuda else (None, None)
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self.device))  # it copied the tables
            self._slots.append(_Slot(stream, sent, none, none, none[None], none[None], none[None]))
        return self._slots[number]

    def _make_room(self, slot: _Slot, columns: int, notes: int) -> None:
        """More memory for a group where there is less than it needs."""
        streams = len(self._streams)
        if slot.notes.numel() < notes:
            slot.notes = torch.empty(notes * 5 // 4, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        if slot.inputs.shape[1] < columns:
            slot.graphs.clear()
            columns = -(-max(columns, self.group) // 64) * 64
            slot.inputs = torch.zeros(self._depth, columns, dtype=torch.bfloat16, device=self.device)
            for first, rank in zip(self._rows, self._ranks, strict=True):
                slot.inputs[first + rank : first + rank + 2] = 1
            slot.decoded = torch.empty(streams * self.facts.width, columns, dtype=torch.bfloat16, device=self.device)
            slot.kinds = torch.empty(streams, columns // 4, dtype=torch.int32, device=self.device)
