"""Whole numbers of few bits, packed: code i occupies bits i·b … i·b + b − 1 of the stream, lowest bit first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

MAX_BITS = 16


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that `count` codes of `bits` bits take."""
    return -(-count * bits // 8)


def pack(codes: ArrayLike, bits: int) -> bytes:
    """Codes 0 … 2ᵇ − 1 (b from 1 to 16) as bytes; ValueError where one does not fit."""
    import numpy as np

    _check(bits)
    values = np.ascontiguousarray(codes).ravel()
    if values.size and (values.min() < 0 or int(values.max()) >> bits):
        raise ValueError(f"a code does not fit into {bits} bits")
    if bits == 8:
        return values.astype(np.uint8).tobytes()
    if bits == 16:
        return values.astype("<u2").tobytes()
    if bits > 8:
        planes = (values.astype(np.uint16)[:, None] >> np.arange(bits, dtype=np.uint16)) & 1
        return np.packbits(planes.astype(np.uint8), bitorder="little").tobytes()
    # Eight codes of b bits are b bytes: they are put together in one 64-bit word.
    padded = np.zeros(-(-values.size // 8) * 8, dtype=np.uint64)
    padded[: values.size] = values
    words = np.zeros(padded.size // 8, dtype=np.uint64)
    for i in range(8):
        words |= padded[i::8] << np.uint64(i * bits)
    raw = words.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :bits]
    return np.ascontiguousarray(raw).tobytes()[: packed_bytes(values.size, bits)]


def unpack(data: bytes | memoryview, bits: int, count: int) -> NDArray[np.uint16]:
    """The first `count` codes of a stream; ValueError where it is too short."""
    import numpy as np

    _check(bits)
    size = packed_bytes(count, bits)
    raw = np.frombuffer(data, dtype=np.uint8, count=min(len(data), size))
    if raw.size < size:
        raise ValueError(f"{count} codes of {bits} bits take {size} bytes, there are {raw.size}")
    if bits == 8:
        return raw.astype(np.uint16)
    if bits == 16:
        return raw.view("<u2").astype(np.uint16)
    if bits > 8:
        planes = np.unpackbits(raw, bitorder="little")[: count * bits].reshape(count, bits).astype(np.uint16)
        codes: NDArray[np.uint16] = (planes << np.arange(bits, dtype=np.uint16)).sum(axis=1, dtype=np.uint16)
        return codes
    groups = -(-count // 8)
    spread = np.zeros((groups, 8), dtype=np.uint8)
    whole = np.zeros(groups * bits, dtype=np.uint8)
    whole[:size] = raw
    spread[:, :bits] = whole.reshape(groups, bits)
    words = spread.view("<u8")[:, 0]
    found = np.empty((groups, 8), dtype=np.uint16)
    mask = np.uint64((1 << bits) - 1)
    for i in range(8):
        found[:, i] = (words >> np.uint64(i * bits)) & mask
    return found.ravel()[:count]


def _check(bits: int) -> None:
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"codes have 1 to {MAX_BITS} bits, got {bits}")
