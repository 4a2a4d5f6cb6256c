"""Windows scored a second against a plain prefill of the same windows, with one worker and with two
side by side.

    python benchmarks/compare/throughput.py hf:./model?dtype=float32 --windows 8 --length 256
    --threads 1
    --out FILE.json python benchmarks/compare/throughput.py 'vllm:./model?max_model_len=1024'
      --python
    /path/to/vllm/python --gpus 0,1

A worker is a process with an engine of its own; two of them share the windows, as `--ray` shares
them. In each round every way runs once, every other round in reverse:

- *prefill*: the bare forward pass that fills a KV cache and gives the logits of the last token
  (transformers), or
  `LLM.generate` with one new token (vLLM);
- *scored*: what `assay compare` does with a candidate: all statistics of every token over the whole
  vocabulary, against
  states of a reference that lie in memory.

Shares and speed-ups are those of one round; the intervals are Student's over the rounds, two-sided
95 %. `processor_s` are the seconds of all threads of the workers, which other programs disturb less
than the clock. The file is written after every round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from assay.engines.scoring import ScoreJob, StateRows, Window
from assay.engines.specs import open_scorer
from assay.environment import describe
from assay.stats import mean_interval
from vllm_kl_speed import STATISTICS, windows_of

WAYS = ("prefill", "scored")
GOALS = {"share_of_prefill": 0.5, "speed_up": 1.9}


def work(args: argparse.Namespace) -> None:
    """A worker: loads its engine, then runs `[way, first, last]` of every line it is told, and says
    what it took.
    """
    engine: Any = open_scorer(args.engine)
    windows = windows_of(engine, args.windows, args.length)
    job = ScoreJob(batch=args.batch)
    rows = list(engine.score_windows(windows, job))
    ways = (
        vllm_ways(engine, rows, job)
        if args.engine.startswith("vllm:")
        else hf_ways(engine, rows, job)
    )
    print(json.dumps(engine.describe()), flush=True)
    for line in sys.stdin:
        way, lo, hi = json.loads(line)
        began, processor = time.perf_counter(), time.process_time()
        ways[way](windows[lo:hi], lo)
        spent = time.process_time() - processor
        print(json.dumps([time.perf_counter() - began, spent]), flush=True)
    engine.close()


def hf_ways(engine: Any, rows: list[StateRows], job: ScoreJob) -> dict[str, Callable[..., Any]]:
    """The ways of transformers, in the same batches."""
    import torch

    from assay.fidelity.metrics.token_statistics import window_statistics

    model = engine.engine.model

    def prefill(windows: list[Window], lo: int) -> None:
        with torch.inference_mode():
            for at in range(0, len(windows), job.batch):
                ids = torch.tensor(
                    [w.tokens[:-1] for w in windows[at : at + job.batch]], device=model.device
                )
                model(input_ids=ids, use_cache=True, logits_to_keep=1).logits.cpu()

    def scored(windows: list[Window], lo: int) -> None:
        for own, row in zip(engine.score_windows(windows, job), rows[lo:], strict=False):
            window_statistics(row, own)

    return {"prefill": prefill, "scored": scored}


def vllm_ways(engine: Any, rows: list[StateRows], job: ScoreJob) -> dict[str, Callable[..., Any]]:
    """The ways of vLLM in this process."""
    from dataclasses import replace

    from vllm import SamplingParams

    kept = [replace(row, states=row.states.cpu()) for row in rows]

    def prefill(windows: list[Window], lo: int) -> None:
        prompts = [{"prompt_token_ids": list(w.tokens[:-1])} for w in windows]
        engine.core._llm.generate(
            prompts, SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False
        )

    def scored(windows: list[Window], lo: int) -> None:
        list(engine.reduce_windows(windows, iter(kept[lo : lo + len(windows)]), job, STATISTICS))

    return {"prefill": prefill, "scored": scored}


class Worker:
    """A process with an engine."""

    def __init__(self, args: argparse.Namespace, number: int) -> None:
        flags = [
            args.engine,
            "--worker",
            "--windows",
            args.windows,
            "--length",
            args.length,
            "--batch",
            args.batch,
        ]
        gpus = args.gpus.split(",") if args.gpus else []
        env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        if args.threads:
            env["OMP_NUM_THREADS"] = str(args.threads)
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
        self.process = subprocess.Popen(
            [args.python, __file__, *map(str, flags)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.facts = self.read()

    def tell(self, *order: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def read(self) -> Any:
        """Its next line of JSON; other lines are vLLM's."""
        assert self.process.stdout
        for line in self.process.stdout:
            try:
                return json.loads(line)
            except ValueError:
                continue
        raise SystemExit("a worker ended")


def run(workers: list[Worker], way: str, windows: int) -> dict[str, float]:
    """All windows by all of these workers: windows a second by the clock, and the seconds of their
    processors.
    """
    cuts = [i * windows // len(workers) for i in range(len(workers) + 1)]
    began = time.perf_counter()
    for worker, lo, hi in zip(workers, cuts, cuts[1:], strict=False):
        worker.tell(way, lo, hi)
    spent = [worker.read()[1] for worker in workers]
    return {"windows_per_s": windows / (time.perf_counter() - began), "processor_s": sum(spent)}


def interval(values: list[float]) -> dict[str, float]:
    found = mean_interval(values) if len(values) > 1 else None
    return {"value": found.value, "lo": found.lo, "hi": found.hi} if found else {"value": values[0]}


def summary(rounds: list[dict[str, Any]], counts: list[int]) -> dict[str, Any]:
    """Means over the rounds with their intervals."""

    def each(key: str, of: str, by: str) -> dict[str, float]:
        return interval([r[of][key] / r[by][key] for r in rounds])

    return {
        "windows_per_s": {
            name: interval([r[name]["windows_per_s"] for r in rounds]) for name in rounds[0]
        },
        "share_of_prefill": {
            n: each("windows_per_s", f"scored {n}", f"prefill {n}") for n in counts
        },
        "share_of_prefill_by_processor": {
            n: each("processor_s", f"prefill {n}", f"scored {n}") for n in counts
        },
        "speed_up": {
            way: each("windows_per_s", f"{way} {counts[-1]}", f"{way} {counts[0]}") for way in WAYS
        }
        if len(counts) > 1
        else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine")
    for name, default in (
        ("windows", 8),
        ("length", 256),
        ("batch", 4),
        ("rounds", 6),
        ("threads", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--gpus", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true")
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    workers = [Worker(args, number) for number in range(max(args.workers))]
    names = [(way, count) for count in args.workers for way in WAYS]
    for way, count in names:  # once to warm up
        run(workers[:count], way, args.windows)
    rounds: list[dict[str, Any]] = []
    for turn in range(args.rounds):
        order = names[::-1] if turn % 2 else names
        found = {f"{way} {count}": run(workers[:count], way, args.windows) for way, count in order}
        rounds.append({f"{way} {count}": found[f"{way} {count}"] for way, count in names})
        result = {
            **{k: getattr(args, k) for k in ("windows", "length", "batch", "threads")},
            "engine": workers[0].facts,
            **summary(rounds, args.workers),
            "goals": GOALS,
            "rounds": rounds,
            "load_average": os.getloadavg(),
            "environment": describe(),
        }
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(summary(rounds[-1:], args.workers)), flush=True)
    for worker in workers:
        assert worker.process.stdin
        worker.process.stdin.close()
        worker.process.wait(60)


if __name__ == "__main__":
    main()
