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
from typing import TYPE_CHECKING
from zlib import crc32

from assay.errors import AssayError
from assay.lab.kv.codec import damaged

if TYPE_CHECKING:
    import torch

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
        _ENTRY.pack(b.tokens | (_EXACT if b.exact else 0), len(b.payload), crc32(b.payload))
        for b in stream.blocks
    )
    front = head + spec + index
    return b"".join([front, struct.pack("<I", crc32(front)), *(b.payload for b in stream.blocks)])


def from_bytes(data: bytes, lo: int = 0, hi: int | None = None) -> Stream:
    """A stream from its bytes; AssayError where it is cut, altered, or no such stream.

    With `lo` and `hi`, payloads of blocks without a token in lo … hi − 1 are neither checked nor kept (they are empty).
    """
    if len(data) < _HEAD.size or data[:4] != MAGIC:
        if data[: len(MAGIC)] == MAGIC:
            raise damaged(f"it ends after {len(data)} bytes, inside its header")
        raise AssayError(
            "this is no KV stream of assay (it does not begin with AKVS)", finding_id="kv.stream_unknown"
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
    blocks, offset, token = [], end + 4, 0
    for number, (marked, size, crc) in enumerate(_ENTRY.iter_unpack(data[index_at:end])):
        tokens = marked & ~_EXACT
        wanted = hi is None or (token < hi and token + tokens > lo)
        payload = data[offset : offset + size] if wanted else b""
        if wanted and len(payload) != size:
            raise damaged(f"it ends after {len(data)} bytes, inside block {number} of {count}")
        if wanted and crc32(payload) != crc:
            raise damaged(f"the checksum of block {number} does not match")
        blocks.append(Block(tokens, bool(marked & _EXACT), payload))
        offset, token = offset + size, token + tokens
    if offset != len(data):
        raise damaged(f"it has {len(data)} bytes and its index says {offset}")
    return Stream(data[_HEAD.size : index_at].decode(), heads, head_dim, tables, tuple(blocks))


# -----------------------------------------------------------------------------
# Payloads of fixed layout: fields of bytes that follow one another, the same for every block of a batch.

_TOP = 15
"""Halves are scaled below 2^15, which leaves room for rounding under the largest half, 65,504."""


def join_fields(fields: Sequence[torch.Tensor]) -> list[bytes]:
    """Fields [blocks, ...] of any types as the bytes of each block."""
    import torch

    rows = [as_bytes(field) for field in fields]
    whole = torch.cat(rows, dim=1).cpu().contiguous().numpy()
    return [row.tobytes() for row in whole]


def split_fields(payloads: Sequence[bytes], sizes: Sequence[int]) -> list[torch.Tensor]:
    """The fields [blocks, size] of uint8; AssayError where a payload has another length."""
    import torch

    total = sum(sizes)
    for payload in payloads:
        if len(payload) != total:
            raise damaged(f"a block has {len(payload)} bytes instead of {total}")
    raw = torch.frombuffer(bytearray(b"".join(payloads)), dtype=torch.uint8) if total else torch.empty(0)
    return list(raw.to(torch.uint8).reshape(len(payloads), total).split(list(sizes), dim=1))


def as_bytes(field: torch.Tensor) -> torch.Tensor:
    """[blocks, ...] → uint8 [blocks, bytes], little-endian."""
    import torch

    return field.reshape(field.shape[0], -1).contiguous().view(torch.uint8)


def to_halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[blocks, ...] as fp16 and an exponent int8 [blocks]: x ≈ half · 2^exponent.

    The exponent is 0 unless a value of the block is too large for fp16, so that ordinary blocks do not depend on it.
    """
    import torch

    top = x.reshape(x.shape[0], -1).abs().amax(dim=1) if x.numel() else x.new_zeros(x.shape[0])
    exponent = torch.frexp(top)[1].sub(_TOP).clamp_min(0).to(torch.int8)
    return _scaled(x, -exponent.int()).half(), exponent


def from_halves(half: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """What `to_halves` stored, float32."""
    return _scaled(half.float(), exponent.to(half.device).int())


def _scaled(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.ldexp(x.float(), exponent.reshape(-1, *[1] * (x.ndim - 1)))


def typed(field: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """A field of `split_fields` as values of another type, flat: its bytes need not stand at whole addresses."""
    import torch

    return field.clone(memory_format=torch.contiguous_format).reshape(-1).view(kind)


# -----------------------------------------------------------------------------
# Tokens kept as they are: the bytes of a tensor in the narrowest type that holds it without loss.

_NAMES = ("bfloat16", "float16", "float32")


def exact_to_bytes(x: torch.Tensor) -> bytes:
    """One byte for the type, then the values of `x`, little-endian."""
    import torch

    kind = x.dtype
    if kind not in (torch.bfloat16, torch.float16):
        kind = next(t for t in _types() if t == torch.float32 or torch.equal(x.to(t).float(), x.float()))
    raw = x.detach().to("cpu", kind).contiguous().reshape(-1).view(torch.uint8)
    return bytes([_types().index(kind)]) + bytes(raw.numpy().tobytes())


def exact_from_bytes(data: bytes, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor of `shape`, float32; AssayError where the bytes do not fit."""
    import torch

    if not data or data[0] >= len(_NAMES):
        raise damaged("a block of exact tokens has no known type")
    raw = torch.frombuffer(bytearray(data[1:]), dtype=torch.uint8) if len(data) > 1 else torch.empty(0)
    kind = _types()[data[0]]
    count = 1
    for size in shape:
        count *= size
    if raw.numel() != count * kind.itemsize:
        raise damaged(f"a block of exact tokens has {raw.numel()} bytes for {count} values")
    return raw.to(torch.uint8).view(kind).float().reshape(shape)


def _types() -> tuple[torch.dtype, ...]:
    import torch

    return tuple(getattr(torch, name) for name in _NAMES)
