"""Tensors of a safetensors checkpoint as writable arrays over the files themselves, without torch.

Layout of a file (safetensors format): 8 bytes, the little-endian length N of the header; N bytes of
JSON `{name: {dtype, shape, data_offsets}}`; then the body, to which the offsets are relative.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import AssayError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in order of name; AssayError where there are none."""
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise AssayError(
            f"{folder} holds no safetensors file",
            finding_id="checkpoint.shard_missing",
            remedy="give the folder of a checkpoint in the safetensors format",
        )
    return found


def read_header(shard: Path) -> tuple[int, dict[str, Any]]:
    """Where the body of a shard begins, in bytes, and its header."""
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return 8 + length, {name: entry for name, entry in header.items() if name != "__metadata__"}


def bf16_tensors(folder: Path) -> Iterator[tuple[str, NDArray[np.uint16]]]:
    """Every bf16 tensor as (name, bit patterns); what is written to the array is written to the
    file.
    """
    import numpy as np

    for shard in shards(folder):
        start, header = read_header(shard)
        for name, entry in header.items():
            if entry["dtype"] == "BF16":
                shape = tuple(entry["shape"])
                offset = start + entry["data_offsets"][0]
                yield (
                    name,
                    np.memmap(shard, dtype=np.dtype("<u2"), mode="r+", offset=offset, shape=shape),
                )


def bf16_to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Values of bf16 bit patterns; a bf16 is the upper half of a float32."""
    import numpy as np

    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bit patterns of the nearest bf16 values, ties to even. For finite values."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded >> 16).astype(np.uint16)
