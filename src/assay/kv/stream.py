"""The serialised form of a coded sequence: a header, the sizes of its blocks, the blocks.

All numbers little-endian:

    4 bytes  "ASKV"
    u8       version, 1
    u8       length of the codec's name, then the name in ASCII
    u16      KV heads          u16  head_dim
    u32      tokens            u32  tokens of a block        u32  number of blocks
    u32      bytes of each block
    u32      CRC-32 of everything before this and of all blocks
    …        the blocks, one after the other

Block i holds tokens i·B … i·B + B − 1, the last one what is left; each decodes on its own.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from assay.errors import AssayError

MAGIC = b"ASKV"
VERSION = 1
_SHAPE = struct.Struct("<HHIII")


@dataclass(frozen=True)
class StreamHeader:
    """What the header of a stream says."""

    codec: str
    heads: int
    tokens: int
    head_dim: int
    block_tokens: int

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-self.tokens // self.block_tokens)


def write_stream(header: StreamHeader, blocks: Sequence[bytes]) -> bytes:
    """Header and blocks as one stream."""
    if len(blocks) != header.blocks:
        raise ValueError(f"{header.tokens} tokens are {header.blocks} blocks, got {len(blocks)}")
    name = header.codec.encode("ascii")
    head = b"".join(
        (
            MAGIC,
            struct.pack("<BB", VERSION, len(name)),
            name,
            _SHAPE.pack(header.heads, header.head_dim, header.tokens, header.block_tokens, len(blocks)),
            struct.pack(f"<{len(blocks)}I", *map(len, blocks)),
        )
    )
    body = b"".join(blocks)
    return head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body


def read_stream(stream: bytes) -> tuple[StreamHeader, list[memoryview]]:
    """Header and blocks of a stream; AssayError where it is no stream, cut short or altered."""
    view = memoryview(stream)
    if bytes(view[:4]) != MAGIC:
        raise _damaged("it does not begin with ASKV")
    try:
        version, length = struct.unpack_from("<BB", view, 4)
        if version != VERSION:
            raise _damaged(f"it is of version {version}, this assay reads {VERSION}")
        name = bytes(view[6 : 6 + length]).decode("ascii")
        at = 6 + length
        heads, head_dim, tokens, block_tokens, count = _SHAPE.unpack_from(view, at)
        at += _SHAPE.size
        if not block_tokens or count != -(-tokens // block_tokens) or 4 * count > len(view):
            raise _damaged("its block counts contradict each other")
        sizes = struct.unpack_from(f"<{count}I", view, at)
        at += 4 * count
        (crc,) = struct.unpack_from("<I", view, at)
    except (struct.error, UnicodeDecodeError) as error:
        raise _damaged("its header is cut short or altered") from error
    head, body = view[:at], view[at + 4 :]
    if sum(sizes) != len(body):
        raise _damaged(f"its blocks take {sum(sizes):,} bytes, there are {len(body):,}")
    if zlib.crc32(body, zlib.crc32(head)) != crc:
        raise _damaged("its checksum does not match")
    blocks, start = [], 0
    for size in sizes:
        blocks.append(body[start : start + size])
        start += size
    return StreamHeader(name, heads, tokens, head_dim, block_tokens), blocks


def _damaged(reason: str) -> AssayError:
    return AssayError(
        f"the stream is damaged: {reason}",
        finding_id="kv.stream_damaged",
        remedy="encode it again from the original",
    )
