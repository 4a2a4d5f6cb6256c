"""The bytes of a coded KV stream: header, block index, payloads (lab/docs/methods/kv_stream.md).

All integers are little-endian.

    magic "AKVS" | u16 version | u16 bytes of the spec
    u32 heads | u32 head_dim | u32 blocks | u32 CRC-32 of the tables
    spec, UTF-8
    index: per block u32 tokens, u32 bytes, u32 CRC-32 of the payload
    u32 CRC-32 of all before it
    payloads

The highest bit of a token count marks a block of exact tokens. Its payload is the tensor in the
narrowest type that holds it without loss, after a byte for the type.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from zlib import crc32

import torch

from assay.errors import AssayError


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
    """A stream taken apart. `tables` is the CRC-32 of the calibration tables that it was coded
    with.
    """

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
    head = _HEAD.pack(
        MAGIC, VERSION, len(spec), stream.heads, stream.head_dim, count, stream.tables
    )
    index = b"".join(
        _ENTRY.pack(b.tokens | (_EXACT if b.exact else 0), len(b.payload), crc32(b.payload))
        for b in stream.blocks
    )
    front = head + spec + index
    return b"".join([front, struct.pack("<I", crc32(front)), *(b.payload for b in stream.blocks)])


def from_bytes(data: bytes) -> Stream:
    """A stream from its bytes; AssayError where it is cut, altered, or no such stream."""
    if len(data) < _HEAD.size or data[:4] != MAGIC:
        if data[: len(MAGIC)] == MAGIC:
            raise damaged(f"it ends after {len(data)} bytes, inside its header")
        raise AssayError(
            "this is no KV stream of assay (it does not begin with AKVS)",
            finding_id="kv.stream_unknown",
            remedy="give a file that `assay kv encode` wrote",
        )
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


_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def exact_to_bytes(x: torch.Tensor) -> bytes:
    """One byte for the type, then the values of `x`, little-endian."""
    kind = x.dtype
    if kind not in (torch.bfloat16, torch.float16):
        kind = next(
            t for t in _TYPES if t == torch.float32 or torch.equal(x.to(t).float(), x.float())
        )
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
