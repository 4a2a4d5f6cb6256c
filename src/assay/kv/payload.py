"""Payloads of fixed layout: fields of bytes that follow one another, the same for every block of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from assay.kv.codec import damaged

if TYPE_CHECKING:
    import torch

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
