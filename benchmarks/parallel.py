"""Tensor parallelism in `vllm:`: the same statistics as one rank gives, and windows scored a second against plain prefill.

    python benchmarks/parallel.py MODEL [--tensor 1 2] [--pipeline 1] [--out benchmarks/results/parallel_cpu.json]

Every layout scores the same windows against one stored reference: the states of one rank with a little noise, so that no
difference is zero. `exact` is how far the statistics of a layout are from those of one rank: `largest` over tokens, and
the means of both. `speed` has windows a second of scoring and of plain prefill (vLLM's own `generate` of one token), in
turns, as medians of the rounds with the range; their ratio is what scoring costs.
`memory_of_ranks` has the bytes of output heads that each rank holds (the engine's and the reference's) and its peak. What is measured is kept as it comes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch

from assay.engines.scoring import ScoreJob, StateRows, Window
from assay.engines.vllm.scorer import VllmScorer
from assay.fidelity.metrics import batch_statistics
from assay.runs import write_atomically

TARGET = f"{batch_statistics.__module__}:{batch_statistics.__name__}"


def windows_of(engine: VllmScorer, count: int, length: int) -> list[Window]:
    """Windows of Python's own help texts."""
    ids = engine.tokenizer.encode("\n".join(topics.values())[: 12 * count * length])
    return [Window(i, tuple(ids[i * length : (i + 1) * length])) for i in range(count)]


def score(engine: VllmScorer, reference: list[StateRows], batch: int) -> dict[str, np.ndarray[Any, Any]]:
    windows = [row.window for row in reference]
    found = [v for _, v in engine.reduce_windows(windows, iter(reference), ScoreJob(batch=batch), TARGET)]
    return {name: torch.cat([values[name] for values in found]).double().numpy() for name in found[0]}


def seconds(call: Any) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def measure(engine: VllmScorer, reference: list[StateRows], rounds: int) -> tuple[dict[str, Any], Any]:
    """Speed of a layout, and its statistics; the first round of each is not timed."""
    prompts = [row.window.tokens[:-1] for row in reference]
    found = score(engine, reference, len(reference))
    engine.generate_greedy(prompts, 1)
    scored, plain = [], []
    for _ in range(rounds):
        scored.append(len(prompts) / seconds(lambda: score(engine, reference, len(reference))))
        plain.append(len(prompts) / seconds(lambda: engine.generate_greedy(prompts, 1)))
    figures = {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in (("scored_windows_per_s", scored), ("prefill_windows_per_s", plain))
    }
    ratios = [a / b for a, b in zip(scored, plain, strict=True)]
    return {**figures, "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}}, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--tensor", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pipeline", type=int, nargs="+", default=[1])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--options", default="", help="more options of vllm:, such as &kv_cache_gib=0.5")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "parallel_cpu.json")
    a = parser.parse_args()
    results = json.loads(a.out.read_text(encoding="utf-8")) if a.out.exists() else {"layouts": {}}
    layouts = [(1, 1), *((t, p) for p in a.pipeline for t in a.tensor if t * p > 1)]
    reference: list[StateRows] = []
    one: Any = None
    for tensor, stages in layouts:
        name = f"tensor {tensor}, pipeline {stages}"
        if name in results["layouts"] and (tensor, stages) != (1, 1):
            continue
        options = (
            f"dtype={a.dtype}&max_model_len={a.length + 2}&max_num_batched_tokens={a.windows * a.length}{a.options}"
        )
        begun = time.perf_counter()
        engine = VllmScorer.load(f"vllm:{a.model}?{options}&tensor_parallel={tensor}&pipeline_parallel={stages}")
        started = time.perf_counter() - begun
        try:
            if not reference:
                windows = windows_of(engine, a.windows, a.length)
                rng = torch.Generator().manual_seed(0)
                for row in engine.score_windows(windows, ScoreJob(batch=a.windows)):
                    states = row.states.cpu().float()
                    noisy = states + 0.02 * states.std() * torch.randn(states.shape, generator=rng)
                    reference.append(StateRows(row.window, row.first, noisy.to(row.states.dtype), row.head))
            speed, found = measure(engine, reference, a.rounds)
            facts, memory = engine.describe(), engine.core.memory()
        finally:
            engine.close()
        one = found if one is None else one
        apart = {key: float(np.nanmax(np.abs(found[key] - one[key]))) for key in found}
        means = {key: [float(np.nanmean(one[key])), float(np.nanmean(found[key]))] for key in ("kl", "tv", "nll_cand")}
        results["layouts"][name] = {
            "start_s": started, "speed": speed, "exact": {"largest": apart, "means_of_one_and_of_this": means},
            "kv_bytes_per_token": facts["kv_bytes_per_token"], "memory_of_ranks": memory,
        }  # fmt: skip
        results |= {
            "model": Path(a.model).name, "dtype": a.dtype, "windows": a.windows, "length": a.length, "rounds": a.rounds,
            "vllm": facts["vllm"], "torch": facts["torch"], "device": facts["device"],
            "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} CPUs", "load_average": os.getloadavg()[0],
        }  # fmt: skip
        write_atomically(a.out, json.dumps(results, indent=1) + "\n")
        print(name, json.dumps(results["layouts"][name]["speed"]["ratio"]), apart, flush=True)


if __name__ == "__main__":
    main()
