"""How fast does `verify --values` look at every stored value, against only reading the bytes?

    python benchmarks/verify/verify_values.py [FOLDER]

Files are in the page cache; best of five rounds; all cores. Speeds are given in GB a second on the
clock, and in GB a second of CPU time (all threads together), which other programs on the machine
disturb less. Four readings of the same number of bytes: `memory` only looks at words that lie in
memory already, `read` copies the file chunk by chunk into one small buffer (what any scan of a file
must do), `touch` also passes a SIMD maximum over each chunk (one plain look at every word), `scan`
is assay's scan. On synthetic tensors the types are told apart, 512 MiB each; on a model the whole
stage of `assay verify --values` is timed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from assay.checkpoint.tensors import Tensor
from assay.checkpoint.values.scan import CHUNK, scan

RESULTS = Path(__file__).parent / "results"
PARTS, PART_BYTES = 8, 64 << 20
Job = tuple[Tensor, Path]


def words(dtype: str) -> np.ndarray[Any, Any]:
    """64 MiB of a type's words as a model would hold them."""
    rng = np.random.default_rng(1)
    if dtype in {"BF16", "F32", "F16"}:
        values = rng.standard_normal(PART_BYTES // (4 if dtype == "F32" else 2), np.float32) * 0.02
        if dtype == "F16":
            return values.astype(np.float16).view(np.uint16)
        return (
            values.view(np.uint32)
            if dtype == "F32"
            else (values.view(np.uint32) >> 16).astype(np.uint16)
        )
    if dtype == "F8_E4M3":
        return rng.integers(0, 0x77, PART_BYTES, np.uint8) | (
            rng.integers(0, 2, PART_BYTES, np.uint8) << 7
        )
    return rng.integers(0, 1 << 32, PART_BYTES // 4, np.uint32)


def synthetic(dtype: str, folder: Path) -> list[Job]:
    path = folder / f"{dtype}.bin"
    array = words(dtype)
    with path.open("wb") as stream:
        for _ in range(PARTS):
            stream.write(array.tobytes())
    shape = (array.size // 1024, 1024)
    return [
        (
            Tensor(
                f"layers.{i}.weight", dtype, shape, path.name, i * PART_BYTES, (i + 1) * PART_BYTES
            ),
            path,
        )
        for i in range(PARTS)
    ]


def plain(job: Job, touch: bool) -> None:
    tensor, path = job
    buffer = memoryview(bytearray(CHUNK))
    array = np.frombuffer(buffer, np.uint64)
    with path.open("rb", buffering=0) as stream:
        stream.seek(tensor.start)
        left = tensor.nbytes
        while left > 0:
            left -= stream.readinto(buffer[: min(left, CHUNK)]) or left
            if touch:
                array.max()


def threaded(jobs: list[Job], touch: bool) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: plain(job, touch), sorted(jobs, key=lambda j: -j[0].nbytes)))


def in_memory(size: int) -> None:
    """The same number of bytes read from memory that holds them already, by a SIMD maximum."""
    held = np.ones(PART_BYTES // 8, np.uint64)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda _: held.max(), range(max(size // PART_BYTES, 1))))


def row(name: str, jobs: list[Job]) -> dict[str, object]:
    """The best of five rounds, in each of which every reading is timed once, so that all see the
    same machine.
    """
    size = sum(tensor.nbytes for tensor, _ in jobs)
    readings: dict[str, Callable[[], object]] = {
        "memory": lambda: in_memory(size),
        "read": lambda: threaded(jobs, touch=False),
        "touch": lambda: threaded(jobs, touch=True),
        "scan": lambda: scan(jobs),
    }
    threaded(jobs, touch=False)  # into the page cache
    clock: dict[str, list[float]] = {reading: [] for reading in readings}
    cpu: dict[str, list[float]] = {reading: [] for reading in readings}
    for _ in range(5):
        for reading, run in readings.items():
            start, used = time.perf_counter(), time.process_time()
            run()
            clock[reading].append(time.perf_counter() - start)
            cpu[reading].append(time.process_time() - used)

    def speeds(taken: dict[str, list[float]]) -> dict[str, float]:
        return {reading: round(size / min(seconds) / 1e9, 2) for reading, seconds in taken.items()}

    return {
        "subject": name, "bytes": size, "clock": speeds(clock), "cpu": speeds(cpu),
        "scan_to_read": round(min(cpu["read"]) / min(cpu["scan"]), 3),
    }  # fmt: skip


def model(folder: Path) -> list[Job]:
    from assay.checkpoint.opening import open_checkpoint

    opened = open_checkpoint(str(folder))
    layout = opened.layout
    if layout is None:
        raise SystemExit("a local folder is needed")
    return [
        (tensor, layout.files[tensor.file].real) for tensor in opened.checkpoint.tensors.values()
    ]


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for dtype in ("BF16", "F16", "F32", "F8_E4M3", "I32"):
            jobs = synthetic(dtype, Path(temporary))
            rows.append(row(dtype, jobs))
            jobs[0][1].unlink()
            print(rows[-1], flush=True)
    for folder in map(Path, sys.argv[1:]):
        rows.append(row(folder.name, model(folder)))
        print(rows[-1], flush=True)
    RESULTS.mkdir(exist_ok=True)
    result = {
        "cores": os.cpu_count(),
        "unit": "GB/s",
        "load_average": os.getloadavg()[0],
        "rows": rows,
    }
    (RESULTS / "verify_values.json").write_text(
        json.dumps(result, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
