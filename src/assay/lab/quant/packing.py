"""Integers of 1 to 16 bits packed without gaps, lowest bit first: bit k of value i is bit i · width + k of the bytes.

Bit j of the stream is bit j mod 8 of byte j // 8, the order of `numpy.packbits(bitorder="little")`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from assay.errors import UsageError
from assay.lab.quant.compiled import is_agreed

if TYPE_CHECKING:
    import numpy as np
    import torch


def packed_bytes(count: int, width: int) -> int:
    """Bytes that `count` values of `width` bits take."""
    return -(-count * width // 8)


_FEW = 4096
"""Fewer values are left to torch."""


def pack(values: torch.Tensor, width: int) -> torch.Tensor:
    """Integers [..., n] in 0 … 2^width − 1 → uint8 [..., ceil(n · width / 8)]; higher bits are ignored."""
    import torch

    _check(width)
    if not values.shape[-1]:
        return torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    if _is_for_loops(values, width) and is_agreed(("packing", width), lambda: _same_in_loops(width)):
        return _pack_in_loops(values, width)
    return _pack(values, width)


def _pack(values: torch.Tensor, width: int) -> torch.Tensor:
    import torch

    count = values.shape[-1]
    if width == 8:
        return values.to(torch.uint8)
    if width == 16:
        return values.to(torch.int32).to(torch.int16).contiguous().view(torch.uint8)
    if width > 8:
        return _pack_wide(values, width)
    padded = torch.nn.functional.pad(values.to(torch.uint8), (0, -count % 8)) & ((1 << width) - 1)
    words = padded.contiguous().view(torch.int64)
    for step, low in ((1, 0x00FF00FF00FF00FF), (2, 0x0000FFFF0000FFFF), (4, 0x00000000FFFFFFFF)):
        lower = words & low
        words = lower | ((words ^ lower) >> (step * (8 - width)))
    packed = words[..., None].view(torch.uint8)[..., :width].flatten(-2)
    return packed[..., : packed_bytes(count, width)].contiguous()


def _pack_wide(values: torch.Tensor, width: int) -> torch.Tensor:
    """9 to 15 bits: eight values fill `width` whole bytes, which two words of 64 bits hold."""
    import torch

    count = values.shape[-1]
    padded = torch.nn.functional.pad(values, (0, -count % 8)) & ((1 << width) - 1)
    grouped = padded.to(torch.int64).unflatten(-1, (-1, 8))
    low = torch.zeros_like(grouped[..., 0])
    high = torch.zeros_like(low)
    for i in range(8):
        start = i * width
        if start < 64:
            low = low | (grouped[..., i] << start)
            if start + width > 64:
                high = high | (grouped[..., i] >> (64 - start))
        else:
            high = high | (grouped[..., i] << (start - 64))
    words = torch.stack([low, high], dim=-1).contiguous().view(torch.uint8)
    return words[..., :width].flatten(-2)[..., : packed_bytes(count, width)].contiguous()


def unpack(data: torch.Tensor, width: int, count: int, *, small: bool = False) -> torch.Tensor:
    """The first `count` values of uint8 [..., bytes], as int32 [..., count]; `small`: as uint8 up to 8 bits, else int16."""
    import torch

    _check(width)
    if data.shape[-1] < packed_bytes(count, width):
        raise UsageError(
            f"{data.shape[-1]} bytes hold less than {count} values of {width} bits",
            finding_id="kv.packing",
        )
    data = data[..., : packed_bytes(count, width)]
    kind = (torch.uint8 if width <= 8 else torch.int16) if small else torch.int32
    if not count:
        return torch.empty(*data.shape[:-1], 0, dtype=kind, device=data.device)
    if _is_for_loops(data, width) and is_agreed(("packing", width), lambda: _same_in_loops(width)):
        return _unpack_in_loops(data, width, count).to(kind)
    return _unpack(data, width, count).to(kind)


def _unpack(data: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """uint8 up to 8 bits, else int32."""
    import torch

    if width == 8:
        return data[..., :count]
    padded = torch.nn.functional.pad(data, (0, -data.shape[-1] % width)).unflatten(-1, (-1, width))
    if width > 8:
        return _unpack_wide(padded, width)[..., :count].to(torch.int32)
    words = torch.nn.functional.pad(padded, (0, 8 - width)).contiguous().view(torch.int64)[..., 0]
    ones = (1 << width) - 1
    fours, pairs = (1 << 4 * width) - 1, ((1 << 2 * width) - 1) * 0x0000000100000001
    for step, low in ((4, fours), (2, pairs), (1, ones * 0x0001000100010001)):
        lower = words & low
        words = lower | ((words ^ lower) << (step * (8 - width)))
    return words.view(torch.uint8)[..., :count]


def _unpack_wide(groups: torch.Tensor, width: int) -> torch.Tensor:
    """Groups of `width` bytes [..., n, width] → eight values of each, int64 [..., 8 n]."""
    import torch

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


def _is_for_loops(x: torch.Tensor, width: int) -> bool:
    return x.device.type == "cpu" and width < 8 and x.numel() >= _FEW


def _same_in_loops(width: int) -> bool:
    """Compare loops and torch on values that fill no whole byte."""
    import torch

    values = torch.arange(3 * 1021, dtype=torch.int32).mul_(48271).remainder_(251).reshape(3, 1021)
    packed = _pack(values, width)
    back = _unpack(packed, width, 1021)
    return bool(
        torch.equal(_pack_in_loops(values, width), packed)
        and torch.equal(_unpack_in_loops(packed, width, 1021).int(), back)
    )


def _pack_in_loops(values: torch.Tensor, width: int) -> torch.Tensor:
    import torch

    from assay.lab.quant.packing_loops import pack_nibbles, pack_words

    count = values.shape[-1]
    rows = values.to(torch.uint8)
    if count % 8:
        rows = torch.nn.functional.pad(rows, (0, -count % 8))
    # A whole number of words in each row: all rows are one.
    flat = rows.contiguous().view(-1).numpy()
    packed = torch.empty(*values.shape[:-1], rows.shape[-1] // 8 * width, dtype=torch.uint8)
    if width == 4:
        pack_nibbles(flat.view("<u2"), packed.view(-1).numpy())
    else:
        pack_words(flat.view("<u8"), width, packed.view(-1).numpy())
    size = packed_bytes(count, width)
    return packed if size == packed.shape[-1] else packed[..., :size].contiguous()


def _unpack_in_loops(data: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """uint8 [..., count]."""
    import torch

    from assay.lab.quant.packing_loops import unpack_nibbles, unpack_words

    rows = torch.nn.functional.pad(data, (0, -data.shape[-1] % width)) if data.shape[-1] % width else data
    values = torch.empty(*data.shape[:-1], rows.shape[-1] // width * 8, dtype=torch.uint8)
    flat, into = rows.contiguous().view(-1).numpy(), values.view(-1).numpy()
    if width == 4:
        unpack_nibbles(flat, into.view("<u2"))
    else:
        unpack_words(flat, width, into.view("<u8"))
    return values[..., :count]


def pack_numpy(values: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
    """`pack` for a numpy array [..., n]."""
    import numpy as np

    _check(width)
    bits = (values[..., None] >> np.arange(width)) & 1
    return np.packbits(bits.astype(np.uint8).reshape(*values.shape[:-1], -1), axis=-1, bitorder="little")


def unpack_numpy(data: np.ndarray[Any, Any], width: int, count: int) -> np.ndarray[Any, Any]:
    """`unpack` for a numpy array of uint8 [..., bytes], as int32."""
    import numpy as np

    _check(width)
    if data.shape[-1] < packed_bytes(count, width):
        raise UsageError(
            f"{data.shape[-1]} bytes hold less than {count} values of {width} bits",
            finding_id="kv.packing",
        )
    bits = np.unpackbits(data, axis=-1, count=count * width, bitorder="little")
    grouped = bits.reshape(*data.shape[:-1], count, width).astype(np.int32)
    result: np.ndarray[Any, Any] = (grouped << np.arange(width, dtype=np.int32)).sum(-1, dtype=np.int32)
    return result


def _check(width: int) -> None:
    if not 1 <= width <= 16:
        raise UsageError(f"values of {width} bits cannot be packed, 1 to 16 can", finding_id="kv.packing")
