"""Payloads of fixed layout: fields of bytes that follow one another, the same in every block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from assay_lab.kv.codecs.stream import damaged
from assay_lab.quantisation.packing import pack, packed_bytes, unpack

_TOP = 15
"""Halves are scaled below 2^15, which leaves room for rounding under the largest half, 65,504."""


@dataclass(frozen=True)
class Field:
    """One tensor of codes in the payload of a block: its shape, and its type or the bits of an
    integer.

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
        planes = [
            pack((flat >> (16 * i)) & 0xFFFF, width) for i, width in enumerate(_planes(self.kind))
        ]
        return torch.cat(planes, dim=1)

    def unpack(self, raw: torch.Tensor) -> torch.Tensor:
        """The other way round; integers are uint8 up to 8 bits, int32 up to 16 and else int64."""
        shape = (raw.shape[0], *self.shape)
        if isinstance(self.kind, torch.dtype):
            # Its bytes need not be at whole addresses.
            return (
                raw.clone(memory_format=torch.contiguous_format)
                .reshape(-1)
                .view(self.kind)
                .reshape(shape)
            )
        count, widths = prod(self.shape), _planes(self.kind)
        planes = raw.split([packed_bytes(count, width) for width in widths], dim=1)
        codes = [unpack(plane, width, count) for plane, width in zip(planes, widths, strict=True)]
        if len(codes) > 1:
            codes[0] = torch.stack([code.long() << (16 * i) for i, code in enumerate(codes)]).sum(
                dim=0
            )
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
    raw = (
        torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
    )
    columns = raw.reshape(len(payloads), total).split(sizes, dim=1)
    return tuple(field.unpack(column) for field, column in zip(fields, columns, strict=True))


def to_halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[blocks, ...] as fp16 and an exponent int8 [blocks]: x ≈ half · 2^exponent.

    The exponent is 0 unless a value of the block is too large for fp16, so that ordinary blocks do
    not depend on it.
    """
    top = x.reshape(x.shape[0], -1).abs().amax(dim=1) if x.numel() else x.new_zeros(x.shape[0])
    exponent = torch.frexp(top)[1].sub(_TOP).clamp_min(0).to(torch.int8)
    return _scaled(x, -exponent.int()).half(), exponent


def from_halves(half: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """What `to_halves` stored, float32."""
    return _scaled(half.float(), exponent.to(half.device).int())


def _scaled(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(x.float(), exponent.reshape(-1, *[1] * (x.ndim - 1)))
