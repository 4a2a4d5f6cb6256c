"""Tokens kept as they are: the bytes of a tensor in the narrowest type that holds it without loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from assay.kv.codec import damaged

if TYPE_CHECKING:
    import torch

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
