"""Integers of 1 to 16 bits packed into bytes, and back.

Bit j of the stream is bit j mod 8 of byte j // 8, the order of
`numpy.packbits(bitorder="little")`. Eight values fill `width` whole bytes. Up to 7 bits they are
the bytes of one word of 64 bits, which is closed up in three steps: pairs of values, then fours,
then all eight.
"""

from __future__ import annotations

import torch

from assay.errors import UsageError


def packed_bytes(count: int, width: int) -> int:
    """Bytes that `count` values of `width` bits take."""
    return -(-count * width // 8)


def pack(values: torch.Tensor, width: int) -> torch.Tensor:
    """Integers [..., n] in 0 … 2^width − 1 → uint8 [..., ceil(n · width / 8)]; higher bits are
    ignored.
    """
    _check(width)
    count = values.shape[-1]
    if not count:
        return torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    if width == 8:
        return values.to(torch.uint8)
    if width == 16:
        return values.to(torch.int32).to(torch.int16).contiguous().view(torch.uint8)
    kind = torch.uint8 if width < 8 else torch.int64
    padded = torch.nn.functional.pad(values.to(kind), (0, -count % 8)) & ((1 << width) - 1)
    words = _closed(padded, width) if width < 8 else _joined(padded, width)
    return (
        words.view(torch.uint8)[..., :width]
        .flatten(-2)[..., : packed_bytes(count, width)]
        .contiguous()
    )


def unpack(data: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """The first `count` values of uint8 [..., bytes]: [..., count], uint8 up to 8 bits, else int32.

    UsageError where the bytes are too few.
    """
    _check(width)
    if data.shape[-1] < packed_bytes(count, width):
        raise UsageError(
            f"{data.shape[-1]} bytes hold less than {count} values of {width} bits",
            finding_id="kv.packing",
        )
    kind = torch.uint8 if width <= 8 else torch.int32
    if not count:
        return torch.empty(*data.shape[:-1], 0, dtype=kind, device=data.device)
    data = data[..., : packed_bytes(count, width)]
    if width == 8:
        return data
    groups = torch.nn.functional.pad(data, (0, -data.shape[-1] % width)).unflatten(-1, (-1, width))
    return (_opened(groups, width) if width < 8 else _split(groups, width))[..., :count].to(kind)


def _closed(values: torch.Tensor, width: int) -> torch.Tensor:
    """Eight values in the bytes of each word → words [..., n, 1] whose lowest 8 · width bits hold
    them without gaps.
    """
    words = values.contiguous().view(torch.int64)
    for step, low in ((1, 0x00FF00FF00FF00FF), (2, 0x0000FFFF0000FFFF), (4, 0x00000000FFFFFFFF)):
        lower = words & low
        words = lower | ((words ^ lower) >> (step * (8 - width)))
    return words[..., None]


def _opened(groups: torch.Tensor, width: int) -> torch.Tensor:
    """The other way round: bytes [..., n, width] → uint8 [..., 8 n]."""
    words = torch.nn.functional.pad(groups, (0, 8 - width)).contiguous().view(torch.int64)[..., 0]
    for step, places in ((4, 0x1), (2, 0x0000000100000001), (1, 0x0001000100010001)):
        lower = words & (((1 << (step * width)) - 1) * places)
        words = lower | ((words ^ lower) << (step * (8 - width)))
    return words.view(torch.uint8)


def _joined(values: torch.Tensor, width: int) -> torch.Tensor:
    """Values of 8 to 16 bits, int64 [..., 8 n] → words [..., n, 2]: eight values take at most two
    of them.
    """
    eight = values.unflatten(-1, (-1, 8)).unbind(-1)
    low, high = torch.zeros_like(eight[0]), torch.zeros_like(eight[0])
    for i, value in enumerate(eight):
        start = i * width
        if start < 64:
            low = low | (value << start)
        if start + width > 64:
            high = high | (value << (start - 64) if start >= 64 else value >> (64 - start))
    return torch.stack([low, high], dim=-1)


def _split(groups: torch.Tensor, width: int) -> torch.Tensor:
    """The other way round: bytes [..., n, width] → int64 [..., 8 n]."""
    words = torch.nn.functional.pad(groups, (0, 16 - width)).contiguous().view(torch.int64)
    low, high = words[..., 0], words[..., 1]
    parts = []
    for i in range(8):
        start = i * width
        if start >= 64:
            value = high >> (start - 64)
        elif start + width > 64:
            value = ((low >> start) & ((1 << (64 - start)) - 1)) | (high << (64 - start))
        else:
            value = low >> start
        parts.append(value & ((1 << width) - 1))
    return torch.stack(parts, dim=-1).flatten(-2)


def _check(width: int) -> None:
    if not 1 <= width <= 16:
        raise UsageError(
            f"values of {width} bits cannot be packed, 1 to 16 can", finding_id="kv.packing"
        )
