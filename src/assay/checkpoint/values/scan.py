"""Stream every tensor of the local files once, several files' parts at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from assay.checkpoint.tensors import DTYPE_BITS, Tensor
from assay.checkpoint.values.statistics import Statistics

_local = threading.local()

CHUNK = 1 << 20
"""Bytes read at once: stays in the core's own cache while they are looked at several times."""


def scan(
    jobs: Iterable[tuple[Tensor, Path]],
    progress: Callable[[int], None] = lambda count: None,
    workers: int | None = None,
) -> tuple[list[Statistics], list[tuple[str, str]]]:
    """Statistics of each (tensor, file), and (tensor, reason) for those that could not be read to
    their end.
    """
    ordered = sorted(jobs, key=lambda job: -job[0].nbytes)

    def one(job: tuple[Tensor, Path]) -> Statistics | tuple[str, str]:
        tensor, path = job
        try:
            return scan_tensor(tensor, path, progress)
        except OSError as error:
            return tensor.name, error.strerror or str(error)

    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        done = list(pool.map(one, ordered))
    return [d for d in done if isinstance(d, Statistics)], [
        d for d in done if not isinstance(d, Statistics)
    ]


def _buffer() -> memoryview:
    """One chunk of memory for each thread."""
    if not hasattr(_local, "chunk"):
        _local.chunk = memoryview(bytearray(CHUNK))
    chunk: memoryview = _local.chunk
    return chunk


def scan_tensor(
    tensor: Tensor, path: Path, progress: Callable[[int], None] = lambda count: None
) -> Statistics:
    """Statistics of one tensor. Raises OSError if the file ends before the tensor does."""
    statistics = Statistics(tensor.name, tensor.dtype, tensor.shape)
    width = max(DTYPE_BITS.get(tensor.dtype, 8) // 8, 1)
    view = _buffer()
    with path.open("rb", buffering=0) as stream:
        stream.seek(tensor.start)
        left = tensor.nbytes
        while left:
            count = stream.readinto(view[: min(left, CHUNK)])
            if not count:
                raise OSError(0, f"the file ends {left} bytes before the tensor does")
            whole = count // width * width
            if whole != count:
                stream.seek(whole - count, os.SEEK_CUR)
            if not whole:
                raise OSError(0, "the file ends inside an element")
            statistics.add(view[:whole])
            progress(whole)
            left -= whole
    statistics.finish()
    return statistics
