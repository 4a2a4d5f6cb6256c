"""The bytes of a coded KV stream: header, block index, payloads (docs/methods/kv_stream.md).

All integers are little-endian.

    magic "AKVS" | u16 version | u16 bytes of the spec | u32 heads | u32 head_dim | u32 blocks | u32 CRC of the tables
    spec, UTF-8 | index: per block u32 tokens, u32 bytes, u32 CRC-32 of the payload | u32 CRC-32 of all before it
    payloads

The highest bit of a token count marks a block of exact tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from zlib import crc32

import torch

from assay.errors import AssayError
from assay.lab.quant.scalar import pack, packed_bytes, unpack


def damaged(why: str) -> AssayError:
    """The error of a stream that cannot be what an encoder wrote."""
    return AssayError(
        f"the KV stream is damaged: {why}",
        finding_id="kv.stream_damaged",
        remedy="encode it again, or fetch the whole file again",
    )


MAGIC = b"AKVS"
VERSION = 1
_HEAD = struct.Struct("<4sHHIIII")
_ENTRY = struct.Struct("<III")
_EXACT = 1 << 31


@dataclass(frozen=True)
class Block:
    """Some tokens of a stream: `tokens` of them, exact or coded, as `payload`."""

    tokens: int
    exact: bool
    payload: bytes


@dataclass(frozen=True)
class Stream:
    """A stream taken apart. `tables` is the CRC-32 of the calibration tables that it was coded with."""

    spec: str
    heads: int
    head_dim: int
    tables: int
    blocks: tuple[Block, ...]

    @property
    def tokens(self) -> int:
        """Tokens in all blocks."""
        return sum(block.tokens for block in self.blocks)


def to_bytes(stream: Stream) -> bytes:
    """The serialised stream."""
    spec = stream.spec.encode()
    count = len(stream.blocks)
    head = _HEAD.pack(MAGIC, VERSION, len(spec), stream.heads, stream.head_dim, count, stream.tables)
    index = b"".join(
        _ENTRY.pack(b.tokens | (_EXACT if b.exact else 0), len(b.payload), crc32(b.payload)) for b in stream.blocks
    )
    front = head + spec + index
    return b"".join([front, struct.pack("<I", crc32(front)), *(b.payload for b in stream.blocks)])


def from_bytes(data: bytes) -> Stream:
    """A stream from its bytes; AssayError where it is cut, altered, or no such stream."""
    if len(data) < _HEAD.size or data[:4] != MAGIC:
        if data[: len(MAGIC)] == MAGIC:
            raise damaged(f"it ends after {len(data)} bytes, inside its header")
        raise AssayError("this is no KV stream of assay (it does not begin with AKVS)", finding_id="kv.stream_unknown")
    _, version, spec_bytes, heads, head_dim, count, tables = _HEAD.unpack_from(data)
    if version != VERSION:
        raise AssayError(
            f"the KV stream has version {version}, this assay reads version {VERSION}",
            finding_id="kv.stream_version",
            remedy="use the assay that wrote it, or encode it again",
        )
    index_at = _HEAD.size + spec_bytes
    end = index_at + _ENTRY.size * count
    if len(data) < end + 4:
        raise damaged(f"it ends after {len(data)} bytes, inside its index")
    if struct.unpack_from("<I", data, end)[0] != crc32(data[:end]):
        raise damaged("the checksum of its header does not match")
    blocks, offset = [], end + 4
    for number, (marked, size, crc) in enumerate(_ENTRY.iter_unpack(data[index_at:end])):
        payload = data[offset : offset + size]
        if len(payload) != size:
            raise damaged(f"it ends after {len(data)} bytes, inside block {number} of {count}")
        if crc32(payload) != crc:
            raise damaged(f"the checksum of block {number} does not match")
        blocks.append(Block(marked & ~_EXACT, bool(marked & _EXACT), payload))
        offset += size
    if offset != len(data):
        raise damaged(f"it has {len(data)} bytes and its index says {offset}")
    return Stream(data[_HEAD.size : index_at].decode(), heads, head_dim, tables, tuple(blocks))


# Payloads of fixed layout: fields of bytes that follow one another, the same for every block of a batch.

_TOP = 15
"""Halves are scaled below 2^15, which leaves room for rounding under the largest half, 65,504."""


@dataclass(frozen=True)
class Field:
    """One tensor of codes in the payload of a block: its shape, and its type or the bits of an integer.

    Integers of more than 16 bits are packed in planes of 16 bits and a rest, lowest first.
    """

    shape: tuple[int, ...]
    kind: torch.dtype | int

    @property
    def size(self) -> int:
        """Bytes in a payload."""
        count = prod(self.shape)
        if isinstance(self.kind, torch.dtype):
            return count * int(self.kind.itemsize)
        return sum(packed_bytes(count, width) for width in _planes(self.kind))

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """[blocks, *shape] → uint8 [blocks, size]."""
        flat = codes.reshape(codes.shape[0], -1)
        if isinstance(self.kind, torch.dtype):
            return flat.contiguous().view(torch.uint8)
        if self.kind <= 16:
            return pack(flat, self.kind)
        planes = [pack((flat >> (16 * i)) & 0xFFFF, width) for i, width in enumerate(_planes(self.kind))]
        return torch.cat(planes, dim=1)

    def unpack(self, raw: torch.Tensor) -> torch.Tensor:
        """The other way round; integers are uint8 up to 8 bits, int32 up to 16 and else int64."""
        shape = (raw.shape[0], *self.shape)
        if isinstance(self.kind, torch.dtype):
            # Its bytes need not stand at whole addresses.
            return raw.clone(memory_format=torch.contiguous_format).reshape(-1).view(self.kind).reshape(shape)
        count, widths = prod(self.shape), _planes(self.kind)
        planes = raw.split([packed_bytes(count, width) for width in widths], dim=1)
        codes = [unpack(plane, width, count) for plane, width in zip(planes, widths, strict=True)]
        if len(codes) > 1:
            codes[0] = torch.stack([code.long() << (16 * i) for i, code in enumerate(codes)]).sum(dim=0)
        return codes[0].reshape(shape)


def _planes(bits: int) -> list[int]:
    return [16] * (bits // 16) + [bits % 16] * (bits % 16 > 0)


EXPONENT = Field((), torch.int8)
"""What `to_halves` takes out of a block."""


def join_fields(fields: Sequence[Field], parts: Sequence[torch.Tensor]) -> list[bytes]:
    """Codes [blocks, ...] of fields as the bytes of each block."""
    rows = [field.pack(part) for field, part in zip(fields, parts, strict=True)]
    whole = torch.cat(rows, dim=1).cpu().contiguous().numpy()
    return [row.tobytes() for row in whole]


def split_fields(fields: Sequence[Field], payloads: Sequence[bytes]) -> tuple[torch.Tensor, ...]:
    """The codes of fields; AssayError where a payload has another length."""
    sizes = [field.size for field in fields]
    total = sum(sizes)
    for payload in payloads:
        if len(payload) != total:
            raise damaged(f"a block has {len(payload)} bytes instead of {total}")
    joined = bytearray(b"".join(payloads))
    raw = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
    columns = raw.reshape(len(payloads), total).split(sizes, dim=1)
    return tuple(field.unpack(column) for field, column in zip(fields, columns, strict=True))


def to_halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[blocks, ...] as fp16 and an exponent int8 [blocks]: x ≈ half · 2^exponent.

    The exponent is 0 unless a value of the block is too large for fp16, so that ordinary blocks do not depend on it.
    """
    top = x.reshape(x.shape[0], -1).abs().amax(dim=1) if x.numel() else x.new_zeros(x.shape[0])
    exponent = torch.frexp(top)[1].sub(_TOP).clamp_min(0).to(torch.int8)
    return _scaled(x, -exponent.int()).half(), exponent


def from_halves(half: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """What `to_halves` stored, float32."""
    return _scaled(half.float(), exponent.to(half.device).int())


def _scaled(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(x.float(), exponent.reshape(-1, *[1] * (x.ndim - 1)))


# Tokens kept as they are: the bytes of a tensor in the narrowest type that holds it without loss.

_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def exact_to_bytes(x: torch.Tensor) -> bytes:
    """One byte for the type, then the values of `x`, little-endian."""
    kind = x.dtype
    if kind not in (torch.bfloat16, torch.float16):
        kind = next(t for t in _TYPES if t == torch.float32 or torch.equal(x.to(t).float(), x.float()))
    raw = x.detach().to("cpu", kind).contiguous().reshape(-1).view(torch.uint8)
    return bytes([_TYPES.index(kind)]) + bytes(raw.numpy().tobytes())


def exact_from_bytes(data: bytes, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor of `shape`, float32; AssayError where the bytes do not fit."""
    if not data or data[0] >= len(_TYPES):
        raise damaged("a block of exact tokens has no known type")
    kind, count = _TYPES[data[0]], prod(shape)
    if len(data) - 1 != count * kind.itemsize:
        raise damaged(f"a block of exact tokens has {len(data) - 1} bytes for {count} values")
    if not count:
        return torch.zeros(shape)
    return torch.frombuffer(bytearray(data[1:]), dtype=kind).float().reshape(shape)
