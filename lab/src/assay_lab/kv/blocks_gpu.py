"""Stored blocks decoded on a GPU: the entropy coder in Triton, then the products that predict from
lower layers.

One launch decodes the coefficients of all sections of a group of blocks: a thread follows the four
states of a section, as `assay_lab.kv.rans` does, so what a CPU encoded is read and coefficients are
the same bit by bit. Products may be rounded differently in bf16. The last kernel writes into an
engine's pages, where they are given. Groups take turns on two CUDA streams: while one is decoded,
threads copy the next one into pinned memory. They look at checksums meanwhile: what kernels do with
damaged bytes stays inside their buffers, and must not be used before `Decoding.wait`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from assay_lab.kv import rans
from assay_lab.kv.block_errors import BlockDamaged
from assay_lab.kv.block_tables import BlockTables
from assay_lab.kv.blocks import BlockCodec, Header, block_tokens
from assay_lab.kv.codecs.distributions import DISTRIBUTIONS

_LOG = logging.getLogger("assay.kv")

SETTINGS = {"sections": 4, "num_warps": 1}
"""Sections of a program, and its warps: as many threads as sections follow their states."""
_LEAST, GROUP = 512, 8192
"""Columns of the smallest graph; tokens that are decoded together at most: the entropy coder takes
nearly as long for 512.
"""
_ESCAPE = tl.constexpr(0x7FC0)
"""The mark of an escape among coefficients in bf16 until it is filled in."""
_LOWEST = tl.constexpr(65536)


@triton.jit
def _word(words, at, there):
    """16 bits as uint32, 0 where there are none."""
    return (tl.load(words + at, mask=there, other=0).to(tl.int32) & 0xFFFF).to(
        tl.uint32, bitcast=True
    )


@triton.jit
def _two_words(words, at, there):
    return _word(words, at, there) | (_word(words, at + 1, there) << 16)


@triton.jit
def _refill(x, at, end, words):
    short = x < _LOWEST
    x = tl.where(short, (x << 16) | _word(words, at, short & (at < end)), x)
    return x, at + short.to(tl.int32)


@triton.jit
def _take(x, at, end, live, law, words, slots, codes):
    """The next name of each state under its law, the state after it, and where the next word
    stands.
    """
    name, x = _named(x, law, live, slots, codes)
    x, at = _refill(x, at, end, words)
    return name, x, at


@triton.jit
def _after(x, name, law, codes):
    """States behind their names, which may lack a word yet."""
    code = tl.load(codes + law * 256 + name).to(tl.uint32, bitcast=True)
    return (code & 0xFFFF) * (x >> 12) + ((x & 4095) - (code >> 16))


@triton.jit
def _rounded(x):
    """float32 as the bits of the nearest bf16, in int32."""
    b = x.to(tl.uint32, bitcast=True)
    return ((b + 0x7FFF + ((b >> 16) & 1)) >> 16).to(tl.int32)


@triton.jit
def _value(k, escaped, one, more, times):
    """The value of a number, scaled, as bf16 bits; whether it is an escape."""
    size = tl.abs(k)
    gap = tl.where(size == 1, one, more)
    value = k.to(tl.float32) - tl.where(k < 0, -gap, gap)
    return tl.where(
        escaped, _ESCAPE, _rounded(tl.where(size == 0, 0.0, value * times))
    ), escaped.to(tl.int32)


@triton.jit
def _named(x, law, live, slots, codes):
    """Next symbol of a state under its distribution, and the state behind it, which may lack a
    word.
    """
    name = tl.load(slots + law * 4096 + (x & 4095).to(tl.int32)).to(tl.int32)
    return name, tl.where(live, _after(x, name, law, codes), x)


@triton.jit
def _lows(y, short, live, m):
    """Whether a state lacks another word when its m low bits are taken: the first word, if it lacks
    one, does not decide that.
    """
    return live & tl.where(short, y < (1 << m).to(tl.uint32), (y >> m.to(tl.uint32)) < _LOWEST)


@triton.jit
def _both(y, name, live, m, at, short, again, end, words):
    """A number with its low bits, and the state with the words from `at` on that it lacks."""
    z = tl.where(short, (y << 16) | _word(words, at, short & (at < end)), y)
    behind = at + short.to(tl.int32)
    low = (z & ((1 << m) - 1).to(tl.uint32)).to(tl.int32)
    u = tl.where(live, z >> m.to(tl.uint32), z)
    return ((name - 128) << m) | low, tl.where(
        again, (u << 16) | _word(words, behind, again & (behind < end)), u
    )


@triton.jit
def _pair(a, b):
    return (a & 0xFFFF) | (b << 16)


@triton.jit
def _four(
    t, x0, x1, x2, x3, at, end, tokens, found, own, words, slots, codes, shifts, laws, one, more, times, kinds, to,  # noqa: E501
    CLASSES: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Four tokens of one channel in each section, one of each state; WIDE where a law has low bits.

    Look-ups of all four states come before what hangs on them, so that they overlap.
    """
    packed = tl.load(kinds + t // 4, mask=t < tokens, other=0)
    law0, law1 = (
        tl.load(laws + own * CLASSES + (packed & 255)),
        tl.load(laws + own * CLASSES + ((packed >> 8) & 255)),
    )
    law2 = tl.load(laws + own * CLASSES + ((packed >> 16) & 255))
    law3 = tl.load(laws + own * CLASSES + ((packed >> 24) & 255))
    l0, l1, l2, l3 = t < tokens, t + 1 < tokens, t + 2 < tokens, t + 3 < tokens
    n0, y0 = _named(x0, law0, l0, slots, codes)
    n1, y1 = _named(x1, law1, l1, slots, codes)
    n2, y2 = _named(x2, law2, l2, slots, codes)
    n3, y3 = _named(x3, law3, l3, slots, codes)
    s0, s1, s2, s3 = y0 < _LOWEST, y1 < _LOWEST, y2 < _LOWEST, y3 < _LOWEST
    if WIDE:
        m0, m1, m2, m3 = (
            tl.load(shifts + law0),
            tl.load(shifts + law1),
            tl.load(shifts + law2),
            tl.load(shifts + law3),
        )
        r0, r1, r2, r3 = (
            _lows(y0, s0, l0, m0),
            _lows(y1, s1, l1, m1),
            _lows(y2, s2, l2, m2),
            _lows(y3, s3, l3, m3),
        )
        at1 = at + s0.to(tl.int32) + r0.to(tl.int32)
        at2 = at1 + s1.to(tl.int32) + r1.to(tl.int32)
        at3 = at2 + s2.to(tl.int32) + r2.to(tl.int32)
        k0, x0 = _both(y0, n0, l0, m0, at, s0, r0, end, words)
        k1, x1 = _both(y1, n1, l1, m1, at1, s1, r1, end, words)
        k2, x2 = _both(y2, n2, l2, m2, at2, s2, r2, end, words)
        k3, x3 = _both(y3, n3, l3, m3, at3, s3, r3, end, words)
        at = at3 + s3.to(tl.int32) + r3.to(tl.int32)
    else:  # the four words that may be needed, whoever takes them, do not wait for that
        next0, next1 = _word(words, at, at < end), _word(words, at + 1, at + 1 < end)
        next2, next3 = _word(words, at + 2, at + 2 < end), _word(words, at + 3, at + 3 < end)
        used2 = s0.to(tl.int32) + s1.to(tl.int32)
        used3 = used2 + s2.to(tl.int32)
        w1, w2 = (
            tl.where(s0, next1, next0),
            tl.where(used2 == 0, next0, tl.where(used2 == 1, next1, next2)),
        )
        w3 = tl.where(
            used3 < 2, tl.where(used3 == 0, next0, next1), tl.where(used3 == 2, next2, next3)
        )
        x0, x1 = tl.where(s0, (y0 << 16) | next0, y0), tl.where(s1, (y1 << 16) | w1, y1)
        x2, x3 = tl.where(s2, (y2 << 16) | w2, y2), tl.where(s3, (y3 << 16) | w3, y3)
        k0, k1, k2, k3 = n0 - 128, n1 - 128, n2 - 128, n3 - 128
        at += used3 + s3.to(tl.int32)
    b0, e0 = _value(k0, l0 & (n0 == 255), one, more, times)
    b1, e1 = _value(k1, l1 & (n1 == 255), one, more, times)
    b2, e2 = _value(k2, l2 & (n2 == 255), one, more, times)
    b3, e3 = _value(k3, l3 & (n3 == 255), one, more, times)
    tl.store(to + t // 2, _pair(b0, b1), mask=l0)
    tl.store(to + t // 2 + 1, _pair(b2, b3), mask=l0)
    return x0, x1, x2, x3, at, found + e0 + e1 + e2 + e3


@triton.jit(do_not_specialize=["blocks", "out_row", "kinds_row"])
def decode_kernel(
    words, starts, ends, tokens_ptr, columns_ptr, blocks, ranks, firsts, rows, classes_ptr, laws, wide_ptr, numbers,  # noqa: E501
    slots, codes, shifts, kinds_ptr, kinds_row, out, out_row, good,
    LAW_COUNT: tl.constexpr, CLASSES: tl.constexpr, SECTIONS: tl.constexpr,
):  # fmt: skip
    """Coefficients of SECTIONS blocks of one stream. Grid (groups of blocks, streams).

    `words` are blocks as int16; `starts`, `ends` [streams, blocks] of sections in it. Of each
    stream: its coefficients (`ranks`), the first of them among all (`firsts`), its first row of
    `out`, its classes. Of each coefficient: laws [.., CLASSES], whether they have low bits, and
    `numbers` [.., 3]: what |k| = 1 and larger are nearer to 0 by, and the scale. Law LAW_COUNT +
    stream is that of its classes. `out` [rows, out_row] are two bf16 at a time, `kinds` [streams,
    kinds_row] four classes.
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
            k0, x0, at = _take(x0, at, end, t < tokens, law, words, slots, codes)
            k1, x1, at = _take(x1, at, end, t + 1 < tokens, law, words, slots, codes)
            k2, x2, at = _take(x2, at, end, t + 2 < tokens, law, words, slots, codes)
            k3, x3, at = _take(x3, at, end, t + 3 < tokens, law, words, slots, codes)
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
        one, more, times = (
            tl.load(numbers + own * 3),
            tl.load(numbers + own * 3 + 1),
            tl.load(numbers + own * 3 + 2),
        )
        to = out + (row + c) * out_row + column // 2
        if tl.load(wide_ptr + own) > 0:
            for t in range(0, most, 4):
                x0, x1, x2, x3, at, found = _four(
                    t,
                    x0,
                    x1,
                    x2,
                    x3,
                    at,
                    end,
                    tokens,
                    found,
                    own,
                    words,
                    slots,
                    codes,
                    shifts,
                    laws,
                    one,
                    more,
                    times,
                    kinds,
                    to,
                    CLASSES,
                    True,
                )
        else:
            for t in range(0, most, 4):
                x0, x1, x2, x3, at, found = _four(
                    t,
                    x0,
                    x1,
                    x2,
                    x3,
                    at,
                    end,
                    tokens,
                    found,
                    own,
                    words,
                    slots,
                    codes,
                    shifts,
                    laws,
                    one,
                    more,
                    times,
                    kinds,
                    to,
                    CLASSES,
                    False,
                )
    whole = (x0 == _LOWEST) & (x1 == _LOWEST) & (x2 == _LOWEST) & (x3 == _LOWEST)
    whole = whole & fits & (at == end) & (found == escapes)
    tl.store(good + stream * blocks + i, whole.to(tl.int32), mask=there)


@triton.jit(do_not_specialize=["blocks", "out_row"])
def escape_kernel(
    words, starts, tokens_ptr, columns_ptr, blocks, ranks, firsts, rows, numbers, out, out_row, good, TOKENS: tl.constexpr  # noqa: E501
):  # fmt: skip
    """Fill in the escapes of one section in their order; `out` as int16. Grid
    (blocks, streams).
    """
    block, stream = tl.program_id(0), tl.program_id(1)
    begin = tl.load(starts + stream * blocks + block)
    fine = tl.load(good + stream * blocks + block)
    lo, hi = (
        tl.load(words + begin, mask=fine > 0, other=0),
        tl.load(words + begin + 1, mask=fine > 0, other=0),
    )
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
            tl.store(
                to,
                _rounded(value * tl.load(numbers + (first + c) * 3 + 2)).to(tl.int16),
                mask=escaped,
            )
            used += tl.sum(number, axis=0)


@triton.jit(do_not_specialize=["columns", "size", "stride"])
def place_kernel(
    x, starts_ptr, x_channel, x_token, slots_ptr, cos_ptr, sin_ptr, out, table_ptr, size, stride, columns,  # noqa: E501
    HEADS: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, TURN: tl.constexpr, TILE: tl.constexpr,  # noqa: E501
):  # fmt: skip
    """Tokens of all streams to where a `Target` has them, RoPE put on keys where TURN. Grid (tiles
    of columns, streams · heads).

    Channel c of column j of a stream is element `starts[stream]` + c · x_channel + j · x_token of
    x; column j goes to slot `slots[j]`, or nowhere if that is below 0.
    """
    stream, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    j = tl.program_id(0) * TILE + tl.arange(0, TILE)
    slot = tl.load(slots_ptr + j, mask=j < columns, other=-1)
    c = tl.arange(0, PADDED)
    live = (slot >= 0)[:, None] & (c < HALF)[None, :]
    at = (
        x
        + tl.load(starts_ptr + stream)
        + (head * 2 * HALF + c)[None, :].to(tl.int64) * x_channel
        + j[:, None] * x_token
    )
    a = tl.load(at, mask=live, other=0.0).to(tl.float32)
    b = tl.load(at + HALF * x_channel, mask=live, other=0.0).to(tl.float32)
    if TURN:
        turn = live & ((c + stream) % 2 == c % 2)[None, :]
        cos = tl.load(cos_ptr + j[:, None] * HALF + c[None, :], mask=turn, other=1.0)
        sin = tl.load(sin_ptr + j[:, None] * HALF + c[None, :], mask=turn, other=0.0)
        a, b = a * cos - b * sin, b * cos + a * sin
    slot = tl.maximum(slot, 0)
    row = (slot // size).to(tl.int64) * stride + tl.load(
        table_ptr + (stream * size + slot % size) * HEADS + head
    )
    here = out + row[:, None] + c[None, :]
    tl.store(here, a.to(out.dtype.element_ty), mask=live)
    tl.store(here + HALF, b.to(out.dtype.element_ty), mask=live)


@dataclass(frozen=True)
class Target:
    """Where decoded tokens are written: an engine's pages, or a tensor.

    Channel c of head h of a stream of the token in slot n is element n // size · `stride` +
    `table[stream, n % size, h]` + c behind the first of `out`; `table` is int64 [streams, size,
    heads], and a stream 2 · layer, + 1 for values.
    """

    out: torch.Tensor
    table: torch.Tensor
    stride: int


class Decoding:
    """Groups that a device still decodes, and checksums that threads still look at."""

    def __init__(self) -> None:
        self._goods: list[torch.Tensor] = []
        self._damaged: list[int] = []
        self._checks: list[Future[None]] = []
        self._begin: Any = None
        self._ends: list[Any] = []

    def add(self, good: torch.Tensor, begin: Any) -> None:
        """`good` [streams, blocks] of a group, on the stream that decodes it and which was at
        `begin` when that started.
        """
        least = good.amin(dim=0)
        if begin is not None:
            host = torch.empty(least.shape, dtype=least.dtype, pin_memory=True)
            least = host.copy_(least, non_blocking=True)
            self._begin = self._begin or begin
            self._ends.append(torch.cuda.Event(enable_timing=True))
            self._ends[-1].record()
        self._goods.append(least)

    def check(
        self,
        blocks: Sequence[bytes],
        sound: Callable[[bytes], bool],
        pool: ThreadPoolExecutor,
        threads: int,
    ) -> None:
        """Look at the checksums of all blocks."""
        todo = iter(range(len(blocks)))

        def some() -> None:
            for i in todo:
                if not sound(blocks[i]):
                    self._damaged.append(i)

        self._checks = [pool.submit(some) for _ in range(min(threads, len(blocks)))]

    def wait(self) -> tuple[int, float]:
        """How many blocks in front are what was stored and codes of their tables, and the seconds
        that the device took, when all has ended.
        """
        seconds = 0.0
        for end in self._ends:
            end.synchronize()
            seconds = max(seconds, self._begin.elapsed_time(end) / 1e3)
        for check in self._checks:
            check.result()
        goods = torch.cat(self._goods).cpu().numpy() > 0
        goods[self._damaged] = False
        return int(np.argmin(goods)) if not goods.all() else len(goods), seconds


@dataclass
class _Slot:
    """What one group needs while another is under way; memory is kept from call to call."""

    stream: Any
    sent: Any
    pinned: torch.Tensor
    notes: torch.Tensor
    inputs: torch.Tensor
    kinds: torch.Tensor
    graphs: dict[int, Any] = field(default_factory=dict)


class GpuBlockCodec(BlockCodec):
    """A codec whose blocks are decoded on `device`; it encodes on the CPU. `group` tokens are
    decoded together.
    """

    def __init__(
        self, tables: BlockTables, device: torch.device | str, threads: int = 8, group: int = GROUP
    ) -> None:
        super().__init__(tables, threads)
        self.device, self.group = torch.device(device), group
        self.settings = dict(SETTINGS)
        self._copies = ThreadPoolExecutor(self.threads, "assay-kv-copy")
        self._slots: list[_Slot] = []

    @cached_property
    def _on_device(self) -> dict[str, torch.Tensor]:
        """Tables of all streams, one after the other."""
        streams = list(self._streams.values())
        slots, codes, shifts = rans.tables()
        for stream in streams:
            own = (
                stream.classes
                if stream.classes[0].size
                else (np.zeros(rans.TOTAL, np.uint8), np.zeros(256, np.uint32))
            )
            slots, codes = (
                np.concatenate([slots, own[0][None]]),
                np.concatenate([codes, own[1][None]]),
            )
        classes = max(len(stream.laws) for stream in streams)
        laws = [
            np.pad(s.laws, ((0, classes - len(s.laws)), (0, 0)), mode="edge").T for s in streams
        ]
        self._lay_out(streams)
        numbers = [np.stack([*s.gaps, s.scale], axis=1) for s in streams]
        found = {
            "slots": slots,
            "codes": codes.view(np.int32),
            "shifts": shifts.astype(np.int32),
            "ranks": np.array([s.rank for s in streams], np.int32),
            "firsts": np.cumsum([0, *(s.rank for s in streams)])[:-1].astype(np.int32),
            "rows": np.array(self._rows, np.int32),
            "classes": np.array([s.classes[1].size and len(s.laws) for s in streams], np.int32),
            "laws": np.concatenate(laws).astype(np.int32),
            "wide": np.concatenate([shifts[law].max(axis=1) for law in laws]).astype(np.int32),
            "numbers": np.concatenate(numbers).astype(np.float32),
            "inv_freq": self.tables.tensors["inv_freq"],
            "outs": np.array(self._outs, np.int64),
            "order": np.arange(len(streams)),
        }
        self._class_count = classes
        return {
            name: torch.from_numpy(np.ascontiguousarray(table)).to(self.device)
            for name, table in found.items()
        }

    def _lay_out(self, streams: Sequence[Any]) -> None:
        """Rows of `inputs`, and weights to match: of each stream its coefficients with two ones,
        then what they are decoded to.

        So the predictors of a stream are in rows before its own, and one product takes them
        as they are; rows between have weight 0. Rows begin at multiples of eight, as tensor
        cores like it.
        """
        width, at = self.facts.width, 0
        self._ranks, self._rows, self._outs = [s.rank for s in streams], list[int](), list[int]()
        for rank in self._ranks:
            self._rows.append(at)
            self._outs.append(at + -(-(rank + 2) // 8) * 8)
            at = self._outs[-1] + -(-width // 8) * 8
        self._depth = at
        self._products_of: list[tuple[int, torch.Tensor]] = []
        for stream, first, out in zip(streams, self._rows, self._outs, strict=True):
            inputs = [
                self._outs[2 * number + "kv".index(source)]
                for number, source in stream.predictor_keys
            ]
            low = min([first, *inputs])
            weight, own = torch.zeros(width, out - low, dtype=torch.bfloat16), stream.rank + 2
            weight[:, first - low : first - low + own] = stream.weight[:, :own]
            for n, begin in enumerate(inputs):
                weight[:, begin - low : begin - low + width] = stream.weight[
                    :, own + n * width : own + (n + 1) * width
                ]
            self._products_of.append((low, weight.to(self.device)))

    def warm(self, tokens: int) -> None:
        """Compile the kernels for blocks of so many tokens, which takes seconds, take memory, and
        record products as CUDA graphs.

        Groups are smaller where there is not enough memory for both of them.
        """
        shape = self.facts.layers, 2, tokens, self.facts.width
        block = self.encode(torch.zeros(shape, dtype=torch.bfloat16), first=0, key=bytes(32))
        while True:
            try:
                many = [block] * (2 * self.group // tokens)
                nowhere = np.full(len(many) * tokens, -1)
                self.decode_into(self._tensor(1, torch.bfloat16), nowhere, many, None).wait()
                break
            except torch.OutOfMemoryError:
                if self.group < 2 * tokens:
                    raise
                self.group //= 2
                self._slots.clear()
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
        """Products are many small launches: a graph of them for 512 columns, and for twice as many
        up to a group.
        """
        columns = min(_LEAST, slot.inputs.shape[1])
        while columns:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(slot.stream):
                self._product(slot, columns)
            slot.stream.synchronize()
            with torch.cuda.graph(graph, stream=slot.stream, capture_error_mode="thread_local"):
                self._product(slot, columns)
            slot.graphs[columns] = graph
            columns = (
                min(2 * columns, slot.inputs.shape[1]) if columns < slot.inputs.shape[1] else 0
            )

    def decode(self, blocks: Sequence[bytes], keys: Sequence[bytes] | None = None) -> torch.Tensor:
        """As `BlockCodec.decode`, on the device."""
        groups = list(self.decode_groups(blocks, keys))
        return torch.cat(groups, dim=2) if len(groups) != 1 else groups[0]

    def decode_groups(
        self, blocks: Sequence[bytes], keys: Sequence[bytes] | None = None
    ) -> Iterator[torch.Tensor]:
        """Tokens of some blocks after the other [layers, 2, tokens, width], in the order of the
        current CUDA stream.

        BlockRefused comes before a group that holds a block that is not believed, or at the end for
        one that was no code of its tables although its checksum holds: then nothing that came
        before counts.
        """
        if not blocks:
            yield super().decode([]).to(self.device)
            return
        decoding = Decoding()
        for turn, (some, own) in enumerate(self._grouped(blocks, keys)):
            yield self._group(turn % 2, some, own, decoding)
        if decoding.wait()[0] < len(blocks):
            raise BlockDamaged("a section of a block is no code of its tables")

    def decode_into(
        self,
        target: Target,
        slots: NDArray[np.int64],
        blocks: Sequence[bytes],
        keys: Sequence[bytes] | None,
    ) -> Decoding:
        """Launch what decodes blocks into `target`, each token into its slot, or nowhere if that is
        below 0.

        What is launched later on the current CUDA stream finds it there. None of it may be believed
        before `wait` of what comes back has said how many blocks were good: threads look at their
        checksums meanwhile. BlockRefused for a block whose header is not that of a block of these
        tables and keys, behind which nothing was launched.
        """
        decoding, at = Decoding(), 0
        for turn, (some, own) in enumerate(self._grouped(blocks, keys)):
            tokens = sum(map(block_tokens, some))
            self._group(turn % 2, some, own, decoding, target, slots[at : at + tokens])
            at += tokens
        decoding.check(blocks, self.sound, self._copies, self.threads)
        return decoding

    def _grouped(
        self, blocks: Sequence[bytes], keys: Sequence[bytes] | None
    ) -> Iterator[tuple[Sequence[bytes], Sequence[bytes] | None]]:
        at = 0
        while at < len(blocks):
            tokens = [block_tokens(data) for data in blocks[at : at + self.group]]
            # A group takes one block at least.
            fit = at + max(1, int((np.cumsum(tokens) <= self.group).sum()))
            yield blocks[at:fit], None if keys is None else keys[at:fit]
            at = fit

    def _stage(
        self,
        pinned: NDArray[np.uint8],
        blocks: Sequence[bytes],
        keys: Sequence[bytes] | None,
        *,
        checksum: bool = True,
    ) -> tuple[list[Header], NDArray[np.int64]]:
        """Copy blocks into pinned memory and check them; their headers, and where they begin."""
        sizes = np.array([len(data) for data in blocks])
        places = np.cumsum([0, *((sizes + 15) // 16 * 16)])[:-1]

        todo, heads = iter(range(len(blocks))), dict[int, Header]()

        def some() -> None:
            for i in todo:
                here = pinned[places[i] : places[i] + sizes[i]]
                here[:] = np.frombuffer(blocks[i], np.uint8)
                heads[i] = self.check(
                    blocks[i], keys[i] if keys is not None else None, checksum=checksum
                )

        # A thread that comes too late, on a busy machine, is not waited for: others take its
        # blocks. For copies alone four suffice.
        more = min(self.threads if checksum else 4, len(blocks)) - 1
        others = [self._copies.submit(some) for _ in range(more)]
        try:
            some()
        finally:
            begun = [other for other in others if not other.cancel()]
            wait(begun)  # none of them writes into this memory any more
        for other in begun:
            other.result()
        return [heads[i] for i in range(len(blocks))], places

    # Threads of an engine may be in inference mode, tests are not.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _group(
        self,
        number: int,
        blocks: Sequence[bytes],
        keys: Sequence[bytes] | None,
        decoding: Decoding,
        target: Target | None = None,
        slots: NDArray[np.int64] | None = None,
    ) -> torch.Tensor:
        """Launch a group into `target`, or into a tensor of its own [layers, 2, tokens, width];
        what was written into.
        """
        tables, facts, cuda = self._on_device, self.facts, self.device.type == "cuda"
        slot = self._slot(number)
        room = sum(len(data) + 16 for data in blocks)
        if cuda:
            slot.sent.synchronize()
        if slot.pinned.numel() < room:
            slot.pinned = torch.empty(room * 5 // 4, dtype=torch.uint8, pin_memory=cuda)
        heads, places = self._stage(slot.pinned.numpy(), blocks, keys, checksum=target is None)
        streams, width = 2 * facts.layers, facts.width
        tokens, kept = np.array([h.tokens for h in heads]), np.array([h.exact for h in heads])
        coded, total, firsts = tokens - kept, int(tokens.sum()), np.cumsum(tokens) - tokens
        exact_bytes = np.array([streams * h.exact * width * h.kind.itemsize for h in heads])
        exact_at = places + [head.exact_at for head in heads]
        sizes = np.array([head.sizes for head in heads]).T  # [streams, blocks]
        ends = exact_at + exact_bytes + np.cumsum(sizes, axis=0)
        if (ends % 2).any():
            raise BlockDamaged("a section of a block is no whole number of words")
        # A column is a coded token; each block begins at a multiple of four of them.
        padded = (coded + 3) // 4 * 4
        column = np.cumsum([0, *padded])
        columns, place = int(column[-1]), np.arange(column[-1]) - np.repeat(column[:-1], padded)
        slots = np.arange(total) if target is None or slots is None else slots
        token = np.minimum(np.repeat(firsts + kept, padded) + place, total - 1)
        to = np.where(place < np.repeat(coded, padded), slots[token], -1)
        positions = np.repeat(np.array([h.first for h in heads]) + kept, padded) + place
        raw_to = np.concatenate(
            [slots[first : first + n] for first, n in zip(firsts, kept, strict=True)]
        )
        parts = ((ends - sizes) // 2, ends // 2, coded, column[:-1], to, positions, raw_to)
        # Each at a multiple of 16 bytes: Triton compiles a kernel for every alignment of its
        # arguments.
        filled = [np.pad(part.ravel(), (0, -part.size % 4)) for part in parts]
        notes = np.concatenate(filled).astype(np.int32)
        current = torch.cuda.current_stream(self.device) if cuda else None
        # All memory is the slot's own stream's: groups do not wait for what an engine does with the
        # ones before.
        with torch.cuda.stream(slot.stream) if cuda else nullcontext():
            begin = torch.cuda.Event(enable_timing=True) if cuda else None
            if begin is not None:
                begin.record()
            self._make_room(slot, columns, notes.size)
            slot.notes[: notes.size] = torch.from_numpy(notes)
            used = int(places[-1]) + len(blocks[-1])
            raw = slot.pinned[: used + used % 2].to(self.device, non_blocking=True)
            sent = slot.notes[: notes.size].to(self.device, non_blocking=True)
            if cuda:
                slot.sent.record()
            halves = zip(sent.split([part.size for part in filled]), parts, strict=True)
            starts, stops, counts, where, to_, at, raw_to_ = (
                half[: part.size] for half, part in halves
            )
            good = torch.zeros(streams, len(blocks), dtype=torch.int32, device=self.device)
            self._coefficients(
                slot, raw.view(torch.int16), starts, stops, counts, where, int(coded.max()), good
            )
            self._products(slot, columns)
            cos = sin = tables["numbers"]  # not read where nothing is turned
            if facts.before_rope:
                angles = at.double()[:, None] * tables["inv_freq"]
                cos, sin = ((f(angles) * facts.scaling).float() for f in (torch.cos, torch.sin))
            own = target is None
            if target is None:
                target = self._tensor(total, heads[0].kind)
            elif current is not None:
                slot.stream.wait_stream(
                    current
                )  # which may still read what those pages held before
            row = slot.inputs.shape[1]
            self._place(
                slot.inputs,
                tables["outs"] * row,
                (row, 1),
                to_,
                cos,
                sin,
                target,
                facts.before_rope,
            )
            done = 0
            for n, size, first in zip(kept, exact_bytes, exact_at, strict=True):
                if n:
                    here = raw[first : first + size].view(heads[0].kind)
                    there = raw_to_[done : done + n].clone()  # from a multiple of 16 bytes on
                    self._place(
                        here,
                        tables["order"] * (int(n) * width),
                        (1, width),
                        there,
                        cos,
                        sin,
                        target,
                        False,
                    )
                    done += n
            decoding.add(good, begin)
        if current is not None:
            current.wait_stream(slot.stream)
            if own:
                target.out.record_stream(current)
        return target.out

    def _tensor(self, tokens: int, kind: torch.dtype) -> Target:
        """A tensor [layers, 2, tokens, width] as a target."""
        facts = self.facts
        out = torch.empty(facts.layers, 2, tokens, facts.width, dtype=kind, device=self.device)
        heads = torch.arange(facts.kv_heads, device=self.device) * facts.head_dim
        return Target(
            out,
            (self._on_device["order"] * (tokens * facts.width))[:, None, None] + heads,
            facts.width,
        )

    def _place(
        self,
        x: torch.Tensor,
        starts: torch.Tensor,
        steps: tuple[int, int],
        slots: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        target: Target,
        turn: bool,
    ) -> None:
        half, heads = self.facts.head_dim // 2, self.facts.kv_heads
        if slots.numel():
            place_kernel[(triton.cdiv(slots.numel(), 32), 2 * self.facts.layers * heads)](
                x,
                starts,
                *steps,
                slots,
                cos,
                sin,
                target.out,
                target.table,
                target.table.shape[1],
                target.stride,
                slots.numel(),
                HEADS=heads,
                HALF=half,
                PADDED=triton.next_power_of_2(half),
                TURN=turn,
                TILE=32,
                enable_fp_fusion=False,
            )

    def _coefficients(
        self,
        slot: _Slot,
        words: torch.Tensor,
        begin: torch.Tensor,
        end: torch.Tensor,
        counts: torch.Tensor,
        where: torch.Tensor,
        longest: int,
        good: torch.Tensor,
    ) -> None:
        """Decode all sections into the coefficients' rows of `inputs`."""
        tables, blocks = self._on_device, counts.numel()
        streams, sections, row = (
            len(self._streams),
            int(self.settings["sections"]),
            slot.inputs.shape[1],
        )
        decode_kernel[(triton.cdiv(blocks, sections), streams)](
            words,
            begin,
            end,
            counts,
            where,
            blocks,
            tables["ranks"],
            tables["firsts"],
            tables["rows"],
            tables["classes"],
            tables["laws"],
            tables["wide"],
            tables["numbers"],
            tables["slots"],
            tables["codes"],
            tables["shifts"],
            slot.kinds,
            slot.kinds.shape[1],
            slot.inputs.view(torch.int32),
            row // 2,
            good,
            LAW_COUNT=DISTRIBUTIONS,
            CLASSES=self._class_count,
            SECTIONS=sections,
            num_warps=int(self.settings["num_warps"]),
        )
        escape_kernel[(blocks, streams)](
            words,
            begin,
            counts,
            where,
            blocks,
            tables["ranks"],
            tables["firsts"],
            tables["rows"],
            tables["numbers"],
            slot.inputs.view(torch.int16),
            row,
            good,
            TOKENS=triton.next_power_of_2(max(16, longest)),
            num_warps=4,
        )

    def _products(self, slot: _Slot, columns: int) -> None:
        """By the smallest graph that was recorded for as many: columns behind those that are wanted
        do no harm.
        """
        if recorded := min((n for n in slot.graphs if n >= columns), default=0):
            slot.graphs[recorded].replay()
        else:
            self._product(slot, columns)

    def _product(self, slot: _Slot, columns: int) -> None:
        """What the streams are decoded to, one after the other, from their coefficients and what
        was decoded before.
        """
        for (low, weight), out in zip(self._products_of, self._outs, strict=True):
            x = slot.inputs[:, :columns]
            torch.mm(weight, x[low : low + weight.shape[1]], out=x[out : out + self.facts.width])

    def _slot(self, number: int) -> _Slot:
        while len(self._slots) <= number:
            cuda, none = self.device.type == "cuda", torch.empty(0, dtype=torch.uint8)
            stream, sent = (
                (torch.cuda.Stream(self.device), torch.cuda.Event()) if cuda else (None, None)
            )
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self.device))  # it copied the tables
            # What is stored takes a fifth of bf16 at most, for most codecs.
            room = self.group * self.facts.token_bytes // 5 if cuda else 0
            pinned = torch.empty(room, dtype=torch.uint8, pin_memory=cuda)
            self._slots.append(_Slot(stream, sent, pinned, none, none[None], none[None]))
        return self._slots[number]

    def _make_room(self, slot: _Slot, columns: int, notes: int) -> None:
        """More memory for a group where there is less than it needs."""
        if slot.notes.numel() < notes:
            slot.notes = torch.empty(
                notes * 5 // 4, dtype=torch.int32, pin_memory=self.device.type == "cuda"
            )
        if slot.inputs.shape[1] < columns:
            slot.graphs.clear()
            columns = -(-max(columns, self.group) // 64) * 64
            slot.inputs = torch.zeros(
                self._depth, columns, dtype=torch.bfloat16, device=self.device
            )
            for first, rank in zip(self._rows, self._ranks, strict=True):
                slot.inputs[first + rank : first + rank + 2] = 1
            slot.kinds = torch.empty(
                len(self._streams), columns // 4, dtype=torch.int32, device=self.device
            )
