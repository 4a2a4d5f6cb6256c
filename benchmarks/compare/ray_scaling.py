"""Windows scored per second on Ray with 1 and 2 workers, beside the same run without Ray; and what
the driver can pass on.

    python benchmarks/compare/ray_scaling.py --out benchmarks/compare/results/ray_scaling_cpu.json
    #
    two workers share the cores python benchmarks/compare/ray_scaling.py --device cuda --workers
    1,2,4,8
    --out …                    # one GPU a worker

Every run scores the same windows of one model against itself in another number format, with equally
many threads a worker; runs take turns, `--rounds` times. A rate is that of the windows between the
first batch and the last of a candidate, so that neither the start of Ray nor the loading of a model
counts. All runs must give the same numbers: the script ends with an error where they do not. The
driver's own rate is measured on final states of random numbers: read from the store with their hash
checked, copied, and put into Ray's memory, as they are for every candidate.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from assay.demo.models import build_smollm2
from assay.engines.scoring import Head, Window
from assay.environment import describe
from assay.fidelity.compare import run_compare
from assay.fidelity.plan import Plan
from assay.fidelity.store.manifest import StoreHeader
from assay.fidelity.store.writer import StoreWriter


class Clock:
    """Progress that notes when the windows of the candidate were done."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    @contextmanager
    def __call__(self, what: str, steps: int) -> Iterator[Any]:
        mine = self.seen if what.startswith("scoring hf:") and "bfloat16" in what else []
        yield lambda: mine.append(time.perf_counter())

    def rate(self, batch: int) -> float:
        """Windows a second, the first batch left out."""
        return (len(self.seen) - batch) / (self.seen[-1] - self.seen[batch - 1])


def scored(plan: Plan, ray: str, workers: int) -> tuple[float, dict[str, Any], float]:
    """Windows a second, the results, and the load of the machine during the run."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ASSAY_CACHE"] = folder
        clock = Clock()
        results = run_compare(replace(plan, ray=ray, workers=workers), clock).results
    return clock.rate(plan.batch), dict(results), os.getloadavg()[0]


def driver_rate(width: int = 4096, windows: int = 12, length: int = 1025) -> dict[str, float]:
    """MB a second of final states that the driver reads and hands on, and MB a second of results
    that it keeps.
    """
    import ray

    states = torch.randn(length - 1, width).to(torch.bfloat16)
    size = states.numel() * states.element_size() / 1e6
    all_windows = [Window(i, (i, *range(length - 1))) for i in range(windows)]
    head = Head(torch.zeros(8, width, dtype=torch.bfloat16))
    header = StoreHeader({}, {}, {}, "prefill", 1, length)
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            writer = StoreWriter(Path(folder), header, head)
            for window in all_windows:
                writer.add(window, states + window.index)
            store = writer.finish()
            wrote = time.perf_counter() - began
            began = time.perf_counter()
            for _ in store.rows(all_windows):
                pass
            read = time.perf_counter() - began
            began = time.perf_counter()
            for rows in store.rows(all_windows):
                ray.put(rows.states.detach().cpu().clone())
            both = time.perf_counter() - began
    finally:
        ray.shutdown()
    return {
        "store_mb_per_s": windows * size / wrote,
        "read_mb_per_s": windows * size / read,
        "read_and_send_mb_per_s": windows * size / both,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="", help="folder of a checkpoint; left out: SmolLM2-135M-Instruct"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    model = given.model or str(build_smollm2())
    plan = Plan(
        f"hf:{model}?dtype=float32&device={given.device}",
        (f"hf:{model}?dtype=bfloat16&device={given.device}",),
        windows=given.windows,
        length=given.length,
        batch=given.batch,
        threads=1,
        floors=False,
        all=True,
    )
    runs = [("", 0), *(("local", int(n)) for n in given.workers.split(","))]
    rates: dict[str, list[float]] = {}
    loads: list[float] = []
    first: Any = None
    for _ in range(given.rounds):
        for ray, workers in runs:
            rate, results, load = scored(plan, ray, workers)
            first = first or results
            if results != first:
                raise SystemExit(f"{workers} workers give other numbers than a run without Ray")
            rates.setdefault(f"{workers} workers" if ray else "without Ray", []).append(rate)
            loads.append(load)
            print(f"{workers or 'no'} workers: {rate:.3f} windows/s, load {load:.1f}", flush=True)
    found = {
        "model": Path(model).name,
        "windows": given.windows,
        "length": given.length,
        "batch": given.batch,
        "threads_a_worker": 1,
        "windows_per_second": rates,
        "best_over_without_ray": {
            name: max(r) / max(rates["without Ray"]) for name, r in rates.items()
        },
        "the_same_numbers": True,
        "load_average": loads,
        "driver": driver_rate(),
        "environment": describe(),
    }
    print(json.dumps(found, indent=1))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
