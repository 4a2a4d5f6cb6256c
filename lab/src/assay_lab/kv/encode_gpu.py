"""Stored blocks encoded on a GPU, in the format and with the choices of the CPU's encoder
(`assay_lab.kv.blocks`).

Streams are predicted, quantised and decoded again one after the other, as torch operations on all
blocks at once; then one kernel codes all sections backwards, as rANS must, each thread the four
states of one section. Import this only where triton is.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from assay.errors import AssayError
from assay_lab.kv.blocks import _Stream
from assay_lab.kv.blocks_gpu import GpuBlockCodec
from assay_lab.kv.codecs.distributions import DISTRIBUTIONS, ESCAPE, lengths_on

_ESCAPE = tl.constexpr(ESCAPE)
_SECTIONS = 8


@triton.jit
def _push(x, at, there, out):
    """Write the low word of states `there` before place `at`, and drop it."""
    tl.store(out + at - 1, (x & 0xFFFF).to(tl.int32).to(tl.int16), mask=there)
    return tl.where(there, x >> 16, x), at - there.to(tl.int32)


@triton.jit
def _put(x, at, live, law, name, codes, out):
    entry = tl.load(codes + law * 256 + name, mask=live, other=1).to(tl.uint32, bitcast=True)
    count, first = entry & 0xFFFF, entry >> 16
    x, at = _push(x, at, live & ((x >> 20) >= count), out)
    return tl.where(live, ((x // count) << 12) + x % count + first, x), at


@triton.jit
def _code(
    x, at, live, t, row, own, numbers, kinds, laws, shifts, codes, out, CLASSES: tl.constexpr
):
    """One number of each section, its low bits first."""
    k = tl.load(numbers + row + t, mask=live, other=0).to(tl.int32)
    law = tl.load(laws + own * CLASSES + tl.load(kinds + t, mask=live, other=0).to(tl.int32))
    m = tl.load(shifts + law)
    wide = live & (m > 0)
    x, at = _push(x, at, wide & ((x >> (32 - tl.maximum(m, 1)).to(tl.uint32)) != 0), out)
    x = tl.where(wide, (x << m.to(tl.uint32)) | (k & ((1 << m) - 1)).to(tl.uint32), x)
    return _put(x, at, live, law, tl.where(k == _ESCAPE, 127, k >> m) + 128, codes, out)


@triton.jit(do_not_specialize=["blocks", "row_size", "room", "tokens"])
def encode_kernel(
    numbers, row_size, kinds_ptr, columns_ptr, counts_ptr, blocks, tokens, ranks, firsts, classes, laws, shifts, codes, out, room,  # noqa: E501
    states_ptr, places_ptr, LAW_COUNT: tl.constexpr, CLASSES: tl.constexpr, SECTIONS: tl.constexpr,
):  # fmt: skip
    """Words of SECTIONS blocks of one stream, from the end of their `room` on. Grid (groups of
    blocks, streams).

    `numbers` [coefficients, row_size], `kinds` [streams, row_size]; a block has `counts` (at most
    `tokens`) from `columns` on.
    """
    stream = tl.program_id(1)
    i = tl.program_id(0) * SECTIONS + tl.arange(0, SECTIONS)
    there = i < blocks
    column = tl.load(columns_ptr + i, mask=there, other=0)
    count = tl.load(counts_ptr + i, mask=there, other=0)
    section = stream * blocks + i
    out += section.to(tl.int64) * room
    at = tl.zeros([SECTIONS], tl.int32) + room
    x0 = (tl.zeros([SECTIONS], tl.int32) + 65536).to(tl.uint32)
    x1, x2, x3 = x0, x0, x0
    kinds = kinds_ptr + stream * row_size + column
    first, rank = tl.load(firsts + stream), tl.load(ranks + stream)
    groups = (tokens + 3) // 4
    for c in range(rank):
        own = first + rank - 1 - c
        row = own.to(tl.int64) * row_size + column
        for g in range(groups):
            t = 4 * (groups - 1 - g)
            x3, at = _code(
                x3,
                at,
                t + 3 < count,
                t + 3,
                row,
                own,
                numbers,
                kinds,
                laws,
                shifts,
                codes,
                out,
                CLASSES,
            )
            x2, at = _code(
                x2,
                at,
                t + 2 < count,
                t + 2,
                row,
                own,
                numbers,
                kinds,
                laws,
                shifts,
                codes,
                out,
                CLASSES,
            )
            x1, at = _code(
                x1,
                at,
                t + 1 < count,
                t + 1,
                row,
                own,
                numbers,
                kinds,
                laws,
                shifts,
                codes,
                out,
                CLASSES,
            )
            x0, at = _code(
                x0, at, t < count, t, row, own, numbers, kinds, laws, shifts, codes, out, CLASSES
            )
    if tl.load(classes + stream) > 1:
        law = LAW_COUNT + stream
        for g in range(groups):
            t = 4 * (groups - 1 - g)
            k3 = tl.load(kinds + t + 3, mask=t + 3 < count, other=0).to(tl.int32) + 128
            k2 = tl.load(kinds + t + 2, mask=t + 2 < count, other=0).to(tl.int32) + 128
            k1 = tl.load(kinds + t + 1, mask=t + 1 < count, other=0).to(tl.int32) + 128
            k0 = tl.load(kinds + t, mask=t < count, other=0).to(tl.int32) + 128
            x3, at = _put(x3, at, t + 3 < count, law, k3, codes, out)
            x2, at = _put(x2, at, t + 2 < count, law, k2, codes, out)
            x1, at = _put(x1, at, t + 1 < count, law, k1, codes, out)
            x0, at = _put(x0, at, t < count, law, k0, codes, out)
    tl.store(places_ptr + section, at, mask=there)
    states = states_ptr + 4 * section
    tl.store(states, x0.to(tl.int32, bitcast=True), mask=there)
    tl.store(states + 1, x1.to(tl.int32, bitcast=True), mask=there)
    tl.store(states + 2, x2.to(tl.int32, bitcast=True), mask=there)
    tl.store(states + 3, x3.to(tl.int32, bitcast=True), mask=there)


class GpuEncoder:
    """Encodes blocks where their keys and values are; `codec` has the tables."""

    def __init__(self, codec: GpuBlockCodec) -> None:
        self.codec, self.facts, self.device = codec, codec.facts, codec.device

    @cached_property
    def _on_device(self) -> list[dict[str, torch.Tensor]]:
        """What choosing numbers needs, of each stream."""

        def of(stream: _Stream) -> dict[str, torch.Tensor]:
            found = {
                "zero": stream.zero,
                "radius": stream.radius,
                "gaps": stream.gaps,
                "scale": stream.scale,
            }
            tensors = {
                name: torch.from_numpy(np.ascontiguousarray(table)) for name, table in found.items()
            }
            more = {"mean": stream.mean, "analysis": stream.analysis, "weight": stream.weight}
            more["kind_bits"] = torch.from_numpy(stream.kind_bits)
            return {name: x.to(self.device) for name, x in (tensors | more).items()}

        return [of(stream) for stream in self.codec._streams.values()]

    @cached_property
    def _stream(self) -> Any:
        """Beside what an engine does, and behind it where both want the device."""
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def warm(self, tokens: int) -> None:
        """Compile what encodes blocks of so many tokens, which takes seconds."""
        shape = self.facts.layers, 2, 2 * tokens, self.facts.width
        self.encode(
            torch.zeros(shape, dtype=torch.bfloat16, device=self.device),
            [0, tokens],
            [bytes(32)] * 2,
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def encode(
        self, x: torch.Tensor, firsts: Sequence[int], keys: Sequence[bytes], ready: Any = None
    ) -> list[bytes]:
        """Blocks of the same length, one after the other in `x` [layers, 2, tokens, width], each
        from position `firsts` on.

        `ready` is the CUDA event behind which `x` is there. AssayError for NaN or infinity in any
        of the blocks.
        """
        if self._stream is None:
            return self._encode(x, firsts, keys)
        with torch.cuda.stream(self._stream):
            (
                self._stream.wait_event(ready)
                if ready is not None
                else self._stream.wait_stream(torch.cuda.default_stream())
            )
            x.record_stream(self._stream)
            return self._encode(x, firsts, keys)

    def _encode(self, x: torch.Tensor, firsts: Sequence[int], keys: Sequence[bytes]) -> list[bytes]:
        codec, facts, blocks = self.codec, self.facts, len(keys)
        total, tables = x.shape[2], codec._on_device
        tokens = total // blocks
        if not bool(torch.isfinite(x).all()):
            raise AssayError("a block holds NaN or infinity", finding_id="kv.not_finite")
        exact = [max(0, min(facts.exact_first - first, tokens)) for first in firsts]
        streams = len(codec._streams)
        numbers = torch.empty(sum(codec._ranks), total, dtype=torch.int16, device=self.device)
        kinds = torch.empty(streams, total, dtype=torch.uint8, device=self.device)
        escaped = self._chosen(x, firsts, tokens, numbers, kinds, exact)
        columns = [i * tokens + n for i, n in enumerate(exact)]
        counts = [tokens - n for n in exact]
        most = max(codec._ranks)
        room = 2 * (most + 1) * tokens + 8
        where = torch.tensor([columns, counts], dtype=torch.int32, device=self.device)
        words = torch.empty(streams * blocks, room, dtype=torch.int16, device=self.device)
        states = torch.empty(streams * blocks, 4, dtype=torch.int32, device=self.device)
        places = torch.empty(streams * blocks, dtype=torch.int32, device=self.device)
        encode_kernel[(triton.cdiv(blocks, _SECTIONS), streams)](
            numbers,
            total,
            kinds,
            where[0],
            where[1].clone(),
            blocks,
            tokens,
            tables["ranks"],
            tables["firsts"],
            tables["classes"],
            tables["laws"],
            tables["shifts"],
            tables["codes"],
            words,
            room,
            states,
            places,
            LAW_COUNT=DISTRIBUTIONS,
            CLASSES=codec._class_count,
            SECTIONS=_SECTIONS,
            num_warps=1,
        )
        used = words[torch.arange(room, device=self.device) >= places[:, None]].cpu().numpy()
        ends = np.cumsum(room - places.cpu().numpy())
        held, starts = states.cpu().numpy(), np.concatenate([[0], ends[:-1]])
        raw, found = (
            x[
                :, :, [c for i, n in enumerate(exact) for c in range(i * tokens, i * tokens + n)]
            ].cpu(),
            [],
        )
        done = 0
        for i, (key, first) in enumerate(zip(keys, firsts, strict=True)):
            sections = []
            for stream in range(streams):
                s, beyond = stream * blocks + i, escaped.get((stream, i), b"")
                sections.append(
                    b"".join(
                        [
                            struct.pack("<I", len(beyond) // 4),
                            beyond,
                            held[s].tobytes(),
                            used[starts[s] : ends[s]].tobytes(),
                        ]
                    )
                )
            own = raw[:, :, done : done + exact[i]]
            done += exact[i]
            found.append(codec.assembled(own, sections, key=key, first=first, tokens=tokens))
        return found

    def _chosen(
        self,
        x: torch.Tensor,
        firsts: Sequence[int],
        tokens: int,
        numbers: torch.Tensor,
        kinds: torch.Tensor,
        exact: Sequence[int],
    ) -> dict[tuple[int, int], bytes]:
        """Fill in numbers and classes, each stream predicted from those before it as decoded;
        escapes by (stream, block).
        """
        codec, facts, total = self.codec, self.facts, x.shape[2]
        width, half = facts.width, facts.head_dim // 2
        places = torch.cat([torch.arange(f, f + tokens, dtype=torch.float64) for f in firsts]).to(
            self.device
        )
        angles = places[:, None] * codec._on_device["inv_freq"]
        cos, sin = ((f(angles) * facts.scaling).float()[:, None] for f in (torch.cos, torch.sin))
        decoded = torch.empty(
            len(codec._streams) * width, total, dtype=torch.bfloat16, device=self.device
        )
        beyond: list[torch.Tensor] = []
        first = 0
        for i, ((layer, name), stream) in enumerate(codec._streams.items()):
            own, rank = self._on_device[i], stream.rank
            weight = own["weight"]
            rows = x[layer, "kv".index(name)].float()
            if name == "k" and facts.before_rope:
                low, high = rows.view(total, facts.kv_heads, 2, half).unbind(2)
                size = cos * cos + sin * sin
                rows = torch.stack(
                    [(low * cos + high * sin) / size, (high * cos - low * sin) / size], 2
                ).view(total, width)
            inputs = torch.ones(weight.shape[1], total, dtype=torch.bfloat16, device=self.device)
            rest = rows.T - own["mean"][:, None]
            if stream.predictor_keys:
                inputs_from = [
                    2 * number + "kv".index(source) for number, source in stream.predictor_keys
                ]
                torch.cat(
                    [decoded[s * width : (s + 1) * width] for s in inputs_from],
                    out=inputs[rank + 2 :],
                )
                rest = rest - weight[:, rank + 2 :] @ inputs[rank + 2 :]
            c = (own["analysis"] @ rest).T
            k, kind = self._choose(c, own, stream.rdo)
            out = k == ESCAPE
            beyond.append(torch.where(out, c, 0.0).T)
            size, gaps = k.abs(), own["gaps"]
            value = (k - torch.where(size == 1, gaps[0], gaps[1]) * k.sign()) * (size > 0)
            inputs[:rank] = (torch.where(out, c, value) * own["scale"]).T
            numbers[first : first + rank] = k.T.to(torch.int16)
            kinds[i] = kind.to(torch.uint8)
            torch.mm(weight, inputs, out=decoded[i * width : (i + 1) * width])
            first += rank
        found: dict[tuple[int, int], bytes] = {}
        row, column = (
            part.cpu().numpy() for part in torch.nonzero(numbers == ESCAPE, as_tuple=True)
        )
        if row.size:
            values = (
                torch.cat(beyond)[
                    torch.from_numpy(row).to(self.device), torch.from_numpy(column).to(self.device)
                ]
                .cpu()
                .numpy()
            )
            stream_of = np.repeat(np.arange(len(codec._ranks)), codec._ranks)[row]
            block = column // tokens
            kept = column % tokens >= np.array(exact)[block]
            for s, b in sorted(
                set(zip(stream_of[kept].tolist(), block[kept].tolist(), strict=True))
            ):
                found[s, b] = values[kept & (stream_of == s) & (block == b)].astype("<f4").tobytes()
        return found

    def _choose(
        self, c: torch.Tensor, own: dict[str, torch.Tensor], rdo: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers and classes of coefficients [tokens, rank], as `rans.choose`."""
        lengths = lengths_on(str(self.device))

        def bits(k: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
            places = zero + k
            return lengths.index_select(0, places.flatten()).view(places.shape)

        def kinds(k: torch.Tensor) -> torch.Tensor:
            return (bits(k[:, None], own["zero"]).sum(-1) + own["kind_bits"]).argmin(-1)

        k = c.clamp(-ESCAPE, ESCAPE).round().long()
        k = torch.where(k == -ESCAPE, ESCAPE, k)
        kind = kinds(k)
        if rdo > 0:
            zero, nearer = own["zero"][kind], k - k.sign()
            worse = (c - nearer).square() - (c - k).square()
            take = ((bits(k, zero) - bits(nearer, zero)) * rdo > worse) & (k != ESCAPE) & (k != 0)
            k = torch.where(take, nearer, k)
            kind = kinds(k)
        return torch.where(k.abs() > own["radius"][kind], ESCAPE, k), kind
