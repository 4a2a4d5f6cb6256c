"""Damage to the numbers: each function changes the tensors of a checkpoint in place."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from assay.demo.damage.tensors import bf16_tensors, bf16_to_float32, float32_to_bf16, read_header, shards

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_LAYER = re.compile(r"\.layers\.(\d+)\.")
BLOCKS, BLOCK_BYTES = 60, 4096


def random_blocks(folder: Path, rng: np.random.Generator) -> None:
    """Overwrite `BLOCKS` blocks of the shard bodies with random bytes, as a bad download or disk leaves them."""
    files = shards(folder)
    for block in range(BLOCKS):
        shard = files[block % len(files)]
        start, _ = read_header(shard)
        size = shard.stat().st_size
        # Disks and downloads fail in whole sectors.
        first, last = -(-start // BLOCK_BYTES), size // BLOCK_BYTES - 1
        with shard.open("r+b") as file:
            file.seek(int(rng.integers(first, last + 1)) * BLOCK_BYTES)
            file.write(rng.bytes(BLOCK_BYTES))


def stuck_exponent_bit(folder: Path, rng: np.random.Generator) -> None:
    """Flip one exponent bit (a factor of 16) of 32,768 neighbouring weights in one MLP, as bad memory does."""
    for name, bits in _in_layer(folder, _depth(folder) // 3):
        if name.endswith("down_proj.weight"):
            flat = bits.reshape(-1)
            start = int(rng.integers(0, max(1, flat.size - 32_768)))
            flat[start : start + 32_768] ^= 0x0200


def nan_row(folder: Path, rng: np.random.Generator) -> None:
    """Write NaN over one row of one value projection."""
    for name, bits in _in_layer(folder, _depth(folder) // 2):
        if name.endswith("v_proj.weight"):
            bits[int(rng.integers(0, bits.shape[0]))] = 0x7FC0


def swapped_layers(folder: Path, rng: np.random.Generator) -> None:
    """Exchange all tensors of two layers, a sixth and two thirds of the way up."""
    depth = _depth(folder)
    low, high = dict(_in_layer(folder, depth // 6)), dict(_in_layer(folder, 2 * depth // 3))
    for name, bits in low.items():
        other = high[name.replace(f".layers.{depth // 6}.", f".layers.{2 * depth // 3}.")]
        bits[...], other[...] = other.copy(), bits.copy()


def scaled_k(folder: Path, rng: np.random.Generator) -> None:
    """Multiply every key projection by 3, as a lost or doubled scale of a quantised K does."""
    _change(folder, "k_proj.weight", lambda values: 3.0 * values)


def zeroed_layer(folder: Path, rng: np.random.Generator) -> None:
    """Zero all matrices of one layer, a third of the way up: a shard that was never filled."""
    for _, bits in _in_layer(folder, _depth(folder) // 3):
        if bits.ndim == 2:
            bits[...] = 0


def norm_plus_one(folder: Path, rng: np.random.Generator) -> None:
    """Add 1 to every norm weight: the convention of Gemma applied to a model that does not use it."""
    _change(folder, "norm.weight", lambda values: values + 1.0)


def int2(folder: Path, rng: np.random.Generator) -> None:
    """Round every projection to 2 bits, groups of 32 along the input, nearest value, no calibration."""
    _change(folder, "_proj.weight", lambda values: round_to_nearest(values, bits=2, group=32))


def int3(folder: Path, rng: np.random.Generator) -> None:
    """Round every projection to 3 bits, one scale per row, nearest value, no calibration."""
    _change(folder, "_proj.weight", lambda values: round_to_nearest(values, bits=3, group=values.shape[1]))


def shifted_scales(folder: Path, rng: np.random.Generator) -> None:
    """Round every projection to 4 bits and read each group of 32 with the scale of the row before."""
    import numpy as np

    def misread(values: NDArray[np.float32]) -> NDArray[np.float32]:
        grouped = values.reshape(values.shape[0], -1, 32)
        scale = np.abs(grouped).max(axis=-1, keepdims=True) / 7
        scale[scale == 0] = 1.0
        rounded: NDArray[np.float32] = np.round(grouped / scale) * np.roll(scale, 1, axis=0)
        return rounded.reshape(values.shape)

    _change(folder, "_proj.weight", misread)


def round_to_nearest(values: NDArray[np.float32], *, bits: int, group: int) -> NDArray[np.float32]:
    """Asymmetric uniform quantisation and back: (rows, columns) in groups of `group` columns.

    Each group has 2**bits levels from its minimum to its maximum; the error is at most half a step.
    """
    import numpy as np

    grouped = values.reshape(values.shape[0], -1, group)
    low = grouped.min(axis=-1, keepdims=True)
    step = (grouped.max(axis=-1, keepdims=True) - low) / (2**bits - 1)
    step[step == 0] = 1.0
    rounded = low + np.round((grouped - low) / step) * step
    result: NDArray[np.float32] = rounded.reshape(values.shape).astype(np.float32)
    return result


def _change(
    folder: Path, suffix: str, function: Callable[[NDArray[np.float32]], NDArray[np.float32]]
) -> None:
    """Apply `function` to the values of every tensor whose name ends in `suffix`."""
    for name, bits in bf16_tensors(folder):
        if name.endswith(suffix):
            bits[...] = float32_to_bf16(function(bf16_to_float32(bits)))


def _in_layer(folder: Path, layer: int) -> list[tuple[str, NDArray[np.uint16]]]:
    return [(name, bits) for name, bits in bf16_tensors(folder) if f".layers.{layer}." in name]


def _depth(folder: Path) -> int:
    """Number of transformer layers."""
    numbers = [int(m[1]) for name, _ in bf16_tensors(folder) if (m := _LAYER.search(name))]
    return 1 + max(numbers, default=0)
