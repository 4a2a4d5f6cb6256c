"""Scoring beside other programs: torch's threads as assay chooses them, and as many as there are
cores.

    python benchmarks/compare/threads_busy.py [--cpus 0,1] [--busy 0,1] [--repeats 3] [--random]
    [--out FILE]

Each row is a process of its own that loads SmolLM2-135M (`--random`: its shape with random weights)
and scores 8 windows of 64 tokens by the prefill and by the decode path, while so many endless loops
run on the same cores. Loading is not counted. Give `--cpus` to keep process and loops to some cores
of a larger machine, which must be quiet otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from assay.environment import describe

RESULTS = Path(__file__).parent / "results"
LOOP = "while True: pass"
WAYS = {
    "chosen": {},
    "all cores": {"threads": "ALL"},
    "all cores, threads that spin": {"threads": "ALL", "OMP_WAIT_POLICY": "ACTIVE"},
}


def child(model: str, threads: str) -> None:
    """Score and print what it took."""
    from assay.engines.hf.scorer import HfScorer
    from assay.engines.scoring import ScoreJob, ScoringPath, Window

    engine = HfScorer.load(f"hf:{model}?device=cpu" + (f"&threads={threads}" if threads else ""))
    windows = [Window(i, tuple(range(100 * i + 1, 100 * i + 65))) for i in range(8)]
    list(engine.score_windows(windows[:1], ScoreJob()))
    took = {}
    for path in (ScoringPath.PREFILL, ScoringPath.DECODE):
        started = time.monotonic()
        list(engine.score_windows(windows, ScoreJob(path, batch=8)))
        took[str(path)] = time.monotonic() - started
    print(json.dumps({"threads": engine.describe()["threads"], **took}))


def row(model: str, way: str, busy: int, cpus: set[int]) -> dict[str, Any]:
    settings = dict(WAYS[way])
    threads = settings.pop("threads", "").replace("ALL", str(len(cpus)))
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(busy)]
    try:
        time.sleep(1.0)
        command = [sys.executable, __file__, "--child", model, "--threads", threads]
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | settings
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=1800
        )
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    return {"way": way, "busy": busy, **json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpus", default="")
    parser.add_argument("--busy", default="0,1")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "threads_busy.json")
    parser.add_argument("--child", default="")
    parser.add_argument("--threads", default="")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.threads)
        return
    if arguments.cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in arguments.cpus.split(",")})
    cpus = os.sched_getaffinity(0)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        if arguments.random:
            from hf_attention import random_smollm2

            model = random_smollm2(Path(folder))
        else:
            from assay.demo.models import build_smollm2

            model = build_smollm2()
        for repeat in range(arguments.repeats):
            for busy in map(int, arguments.busy.split(",")):
                for way in WAYS:
                    rows.append(
                        {
                            "repeat": repeat,
                            "load": os.getloadavg()[0],
                            **row(str(model), way, busy, cpus),
                        }
                    )
                    print(json.dumps(rows[-1]), flush=True)
    name = "SmolLM2-135M" + (", random weights" if arguments.random else "")
    lines = [
        (
            f"{name} on {len(cpus)} cores, 8 windows of 64 tokens, seconds (median of"
            f" {arguments.repeats})."
        ),
        "",
        "| other programs | threads | used | prefill | decode |",
        "|---|---|---|---|---|",
    ]
    for busy in map(int, arguments.busy.split(",")):
        for way in WAYS:
            own = [r for r in rows if (r["way"], r["busy"]) == (way, busy)]
            used = "/".join(sorted({str(r["threads"]) for r in own}))
            lines.append(
                f"| {busy} | {way} | {used} | {median(r['prefill'] for r in own):.2f} |"
                f" {median(r['decode'] for r in own):.2f} |"
            )
    arguments.out.write_text(
        json.dumps(
            {"model": name, "cpus": len(cpus), "rows": rows, "environment": describe()}, indent=1
        )
        + "\n"
    )
    arguments.out.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
