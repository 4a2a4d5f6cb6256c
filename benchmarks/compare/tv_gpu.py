"""Total variation and the other statistics of a row on a real GPU: the fused kernel beside plain
torch and float64.

    python benchmarks/compare/tv_gpu.py [--out benchmarks/compare/results/tv_gpu.json]

For every vocabulary and pair of types: the largest difference of total variation from float64's, of
the kernel and of torch, over rows whose sides differ by noise of several sizes; whether
`assay.fidelity.metrics.fused_gpu` takes the kernel; and the time of both on 1,024 rows. Exits 1
where the kernel is further from float64 than 1e-5.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from assay.environment import describe
from assay.fidelity.metrics.fused_gpu import fused_row_sums, same_by_both
from assay.fidelity.metrics.row_sums import RowSums, _stacked_sums
from assay.fidelity.metrics.token_statistics import statistics_of

VOCABULARIES = (1, 700, 2049, 49_152, 151_936, 262_144)
TYPES = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
)
NOISES = (0.0, 1e-3, 0.05, 1.0)
BOUND = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "tv_gpu.json"
    )
    out = parser.parse_args().out
    rows = [row(vocab, *types) for vocab in VOCABULARIES for types in TYPES]
    found = {
        "machine": describe() | {"gpu": torch.cuda.get_device_name()},
        "noises": NOISES,
        "rows": rows,
    }
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    worst = max(r["kernel_from_float64"] for r in rows)
    print(f"{len(rows)} rows, total variation of the kernel at most {worst:.2g} from float64")
    sys.exit(not (worst <= BOUND and all(r["kernel_taken"] for r in rows)))


def row(vocab: int, own: torch.dtype, other: torch.dtype) -> dict[str, Any]:
    """One vocabulary and pair of types."""
    make = torch.Generator("cuda").manual_seed(vocab)
    base = torch.randn(16 * len(NOISES), vocab, generator=make, device="cuda") * 4
    noise = torch.randn(base.shape, generator=make, device="cuda")
    size = torch.tensor(NOISES, device="cuda").repeat_interleave(16)[:, None]
    ref, cand = base.to(own), (base + size * noise).to(other)
    gold = torch.randint(0, vocab, (len(base),), generator=make, device="cuda")
    p, q = (x.double().softmax(-1) for x in (ref, cand))
    exact = (p - q).abs().sum(-1) / 2
    ways = {"kernel": fused_row_sums, "torch": _stacked_sums}
    far = {
        name: float((tv(way(ref, cand, gold)) - exact.cpu()).abs().max())
        for name, way in ways.items()
    }
    many = [x.repeat(max(1, 1024 // len(x)), 1) for x in (ref, cand)]
    ids = gold.repeat(max(1, 1024 // len(gold)))
    return {
        "vocabulary": vocab,
        "types": [str(t).removeprefix("torch.") for t in (own, other)],
        "largest_tv": float(exact.max()),
        "kernel_from_float64": far["kernel"],
        "torch_from_float64": far["torch"],
        "kernel_taken": same_by_both(ref, cand, gold, _stacked_sums),
        "ms": {name: timed(lambda way=way: way(*many, ids)) for name, way in ways.items()},  # type: ignore[misc]
    }


def tv(sums: torch.Tensor) -> torch.Tensor:
    """Total variation from the sums of `assay.fidelity.metrics.row_sums.RowSums`."""
    sides = dict(zip((f.name for f in fields(RowSums)), sums, strict=True))
    return statistics_of(RowSums(**sides | {"same_best": sides["same_best"] > 0}), None).tv.cpu()


def timed(run: Callable[[], Any], rounds: int = 5) -> float:
    """Milliseconds of the fastest of some rounds."""
    best = float("inf")
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return round(1e3 * best, 3)


if __name__ == "__main__":
    main()
