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
    mask = (1 << width) - 1
    padded = torch.nn.functional.pad(values, (0, -count % 8))
    size = packed_bytes(count, width)
    if 8 % width == 0:  # whole values in every byte
        each = 8 // width
        grouped = (padded.to(torch.uint8) & mask).unflatten(-1, (-1, each))
        result = grouped[..., 0]
        for i in range(1, each):
            result = result | (grouped[..., i] << (i * width))
        return result[..., :size].contiguous()
    grouped = (padded & mask).to(torch.int64).unflatten(-1, (-1, 8))
    # Eight values fill `width` whole bytes: two 64-bit words at most.
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
    return words[..., :width].flatten(-2)[..., :size].contiguous()


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
    import torch

    mask = (1 << width) - 1
    if 8 % width == 0:
        each = 8 // width
        parts = [(data >> (i * width)) & mask for i in range(each)]
        return torch.stack(parts, dim=-1).flatten(-2)[..., :count].to(torch.int32)
    padded = torch.nn.functional.pad(data, (0, -data.shape[-1] % width)).unflatten(-1, (-1, width))
    grouped = torch.nn.functional.pad(padded, (0, 16 - width)).contiguous().view(torch.int64)
    low, high = grouped[..., 0], grouped[..., 1]
    parts = []
    for i in range(8):
        start = i * width
        if start >= 64:
            value = high >> (start - 64)
        elif start + width > 64:
            value = ((low >> start) & ((1 << (64 - start)) - 1)) | (high << (64 - start))
        else:
            value = low >> start
        parts.append(value & mask)
    return torch.stack(parts, dim=-1).flatten(-2)[..., :count].to(torch.int32)


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
