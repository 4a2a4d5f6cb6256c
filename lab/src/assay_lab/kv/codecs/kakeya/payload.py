"""Bytes of a `kakeya` block: its heads one after the other.

    u16 rank
    mean, basis, centres (of a shared basis: centres alone)
    segments, packed
    t, norm as fp16 with an exponent byte each
    levels, packed
    where outliers are on: counts per token u16, channels packed, values fp16

Means and centres in fp16 have an exponent byte of their own; a basis needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from assay_lab.kv.codecs.base import Parts
from assay_lab.kv.codecs.fields import from_halves, to_halves
from assay_lab.kv.codecs.samples import LayerStream
from assay_lab.kv.codecs.stream import damaged
from assay_lab.quantisation.packing import pack, packed_bytes, unpack

if TYPE_CHECKING:
    from assay_lab.kv.codecs.kakeya.codec import Kakeya


def pack_set(parts: Sequence[torch.Tensor], codec: Kakeya) -> bytes:
    """One head of one block."""
    rank_, mean, basis, centres, segment, t, t_exponent, norm, norm_exponent, codes, apart, kept = (
        parts
    )
    rank = int(rank_)
    length = _payload_length(rank)
    out = [rank.to_bytes(2, "little")]
    if codec.basis == "block":
        out += [_floats(mean, codec), _floats(basis[:rank], codec)]
    out.append(_floats(centres[:, :rank], codec))
    out.append(_raw(pack(segment, _segment_bits(codec, centres.shape[0]))))
    for half, exponent in ((t, t_exponent), (norm, norm_exponent)):
        out += [_raw(half), int(exponent).to_bytes(1, "little", signed=True)]
    out.append(_raw(pack(codes[:, :length].flatten(), codec.bits)))
    if codec.outlier:
        where = apart[:, :length]
        out.append(_raw(where.sum(dim=1).to(torch.int16)))
        out.append(_raw(pack(where.nonzero()[:, 1], _channel_bits(length))))
        out.append(_raw(kept[:, :length][where]))
    return b"".join(out)


def unpack_blocks(
    payloads: Sequence[bytes],
    tokens: int,
    site: LayerStream,
    codec: Kakeya,
    shared: tuple[torch.Tensor, torch.Tensor] | None,
) -> Parts:
    """The codes of all blocks; AssayError where a payload is too short, too long or contradicts
    itself.
    """
    sets = []
    for payload in payloads:
        reader = _Reader(payload)
        sets += [_unpack_set(reader, tokens, site, codec, shared) for _ in range(site.heads)]
        reader.end()
    wide = max(int(s[0]) for s in sets)
    long = _payload_length(wide)
    columns = []
    for i, column in enumerate(zip(*sets, strict=True)):
        # Sets of a smaller rank are filled up with zeros.
        pad = {2: (0, 0, 0, wide), 3: (0, wide), 9: (0, long), 10: (0, long), 11: (0, long)}.get(i)
        if pad:
            axis = -2 if i == 2 else -1
            column = tuple(
                torch.nn.functional.pad(t, (*pad[:-1], pad[-1] - t.shape[axis])) for t in column
            )
        columns.append(torch.stack(column).unflatten(0, (len(payloads), site.heads)))
    return tuple(columns)


def _unpack_set(
    reader: _Reader,
    tokens: int,
    site: LayerStream,
    codec: Kakeya,
    shared: tuple[torch.Tensor, torch.Tensor] | None,
) -> Parts:
    rank = int.from_bytes(reader.take(2), "little")
    if not 1 <= rank <= site.head_dim or (shared is not None and rank != shared[1].shape[0]):
        raise damaged(f"a block claims the rank {rank} for vectors of {site.head_dim}")
    length, k = _payload_length(rank), min(codec.k, tokens)
    if shared is None:
        mean = reader.floats((site.head_dim,), codec)
        basis = reader.floats((rank, site.head_dim), codec)
    else:
        mean, basis = shared
    centres = reader.floats((k, rank), codec)
    segment = reader.packed(tokens, _segment_bits(codec, k)).clamp_max(k - 1)
    halves = []
    for _ in range(2):
        halves += [reader.halves(tokens), torch.tensor(reader.exponent(), dtype=torch.int8)]
    codes = reader.packed(tokens * length, codec.bits).reshape(tokens, length).to(torch.uint8)
    apart = torch.zeros(tokens, length, dtype=torch.bool)
    kept = torch.zeros(tokens, length, dtype=torch.float16)
    if codec.outlier:
        counts = reader.values(tokens, torch.int16).long()
        if bool((counts < 0).any()) or bool((counts > length).any()):
            raise damaged("a block counts more outliers than it has channels")
        total = int(counts.sum())
        rows = torch.arange(tokens).repeat_interleave(counts)
        channels = reader.packed(total, _channel_bits(length)).long().clamp_max(length - 1)
        apart[rows, channels] = True
        kept[rows, channels] = reader.halves(total)
    return torch.tensor(rank), mean, basis, centres, segment, *halves, codes, apart, kept


class _Reader:
    """Takes a payload apart from its front."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        if self._at + size > len(self._data):
            raise damaged(f"a block ends after {len(self._data)} bytes, {size} more were due")
        self._at += size
        return self._data[self._at - size : self._at]

    def end(self) -> None:
        if self._at != len(self._data):
            raise damaged(f"a block has {len(self._data) - self._at} bytes too many")

    def values(self, count: int, kind: torch.dtype) -> torch.Tensor:
        raw = self.take(count * kind.itemsize)
        return torch.frombuffer(bytearray(raw), dtype=kind) if raw else torch.empty(0, dtype=kind)

    def halves(self, count: int) -> torch.Tensor:
        return self.values(count, torch.float16)

    def exponent(self) -> int:
        return int.from_bytes(self.take(1), "little", signed=True)

    def packed(self, count: int, width: int) -> torch.Tensor:
        return unpack(self.values(packed_bytes(count, width), torch.uint8), width, count)

    def floats(self, shape: tuple[int, ...], codec: Kakeya) -> torch.Tensor:
        count = 1
        for size in shape:
            count *= size
        if codec.skeleton == "fp32":
            return self.values(count, torch.float32).reshape(shape)
        exponent = torch.tensor([self.exponent()])
        return from_halves(self.halves(count)[None], exponent)[0].reshape(shape)


def _floats(x: torch.Tensor, codec: Kakeya) -> bytes:
    """Values of the skeleton, which are rounded already."""
    if codec.skeleton == "fp32":
        return _raw(x)
    half, exponent = to_halves(x[None])
    return int(exponent).to_bytes(1, "little", signed=True) + _raw(half)


def _raw(x: torch.Tensor) -> bytes:
    return bytes(x.contiguous().numpy().tobytes())


def _payload_length(rank: int) -> int:
    return 1 << (rank - 1).bit_length()


def _segment_bits(codec: Kakeya, k: int) -> int:
    return max(1, (k - 1).bit_length())


def _channel_bits(length: int) -> int:
    return max(1, (length - 1).bit_length())
