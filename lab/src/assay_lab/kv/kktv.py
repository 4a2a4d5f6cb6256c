"""KKTV files: one matrix of float32 vectors.

u32 magic 0x4B4B5456 | u32 version 1 | u64 vectors | u32 dimension | u32 zero
f32 values, row by row; little-endian
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import AssayError

if TYPE_CHECKING:
    import numpy as np

MAGIC = 0x4B4B5456
_HEADER = struct.Struct("<IIQII")


def read_kktv(path: Path) -> np.ndarray[Any, Any]:
    """The vectors [n, dimension], float32; AssayError where the file is no KKTV file or has another
    length.
    """
    import numpy as np

    try:
        data = path.read_bytes()
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror}") from error
    if len(data) < _HEADER.size:
        raise _wrong(path, f"has {len(data)} bytes, less than the {_HEADER.size} of its header")
    magic, version, count, dimension, _ = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise _wrong(
            path, f"is no KKTV file: it begins with 0x{magic:08X} instead of 0x{MAGIC:08X}"
        )
    if version != 1:
        raise _wrong(path, f"has KKTV version {version}, this assay reads version 1")
    due = _HEADER.size + 4 * count * dimension
    if len(data) != due:
        raise _wrong(path, f"has {len(data)} bytes, but {count} vectors of {dimension} need {due}")
    return (
        np.frombuffer(data, dtype="<f4", offset=_HEADER.size)
        .reshape(count, dimension)
        .astype(np.float32)
    )


def write_kktv(path: Path, vectors: np.ndarray[Any, Any]) -> None:
    """Write vectors [n, dimension]; AssayError where they are no matrix or the file cannot be
    written.
    """
    if vectors.ndim != 2:
        raise _wrong(path, f"takes a matrix of vectors, not an array of {vectors.ndim} dimensions")
    header = _HEADER.pack(MAGIC, 1, vectors.shape[0], vectors.shape[1], 0)
    try:
        path.write_bytes(header + vectors.astype("<f4").tobytes())
    except OSError as error:
        raise _wrong(path, f"cannot be written: {error.strerror}") from error


def _wrong(path: Path, why: str) -> AssayError:
    return AssayError(
        f"the file {path} {why}",
        finding_id="kv.kktv",
        remedy="write the tensor again as KKTV, or give it as safetensors",
    )
