"""Tensor parallelism in `vllm:`: the same statistics as one rank gives, and windows scored a second
against plain prefill.

    python benchmarks/compare/parallel.py --routine python benchmarks/compare/parallel.py MODEL
    [--tensor 1 2] [--pipeline 1] [--out benchmarks/compare/results/parallel_cpu.json]

Every layout scores the same windows against one stored reference: the states of one rank with a
little noise, so that no difference is zero. `exact` is how far the statistics of a layout are from
those of one rank: `largest` over tokens, and the means of both. `speed` has windows a second of
scoring and of plain prefill (vLLM's own `generate` of one token), in turns, as medians of the
rounds with the range; their ratio is what scoring costs. `memory_of_ranks` has the bytes of output
heads that each rank holds (the engine's and the reference's) and its peak. What is measured is kept
as it comes.

`--routine` needs no model and no vLLM: two processes over gloo take the statistics of random heads
of 151,936 entries, each with half of the rows, and what they give is held against float64 of the
whole vocabulary, as is what one process gives.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from assay.engines.scoring import Head, ScoreJob, StateRows, VocabularyShard, Window
from assay.engines.vllm.scorer import VllmScorer
from assay.fidelity.metrics.token_statistics import batch_statistics
from assay.runs import write_atomically

MACHINE = f"{platform.machine()}, {len(os.sched_getaffinity(0))} CPUs that other programs use too"
TARGET = f"{batch_statistics.__module__}:{batch_statistics.__name__}"


def windows_of(engine: VllmScorer, count: int, length: int) -> list[Window]:
    """Windows of Python's own help texts."""
    ids = engine.tokenizer.encode("\n".join(topics.values())[: 12 * count * length])
    return [Window(i, tuple(ids[i * length : (i + 1) * length])) for i in range(count)]


def score(
    engine: VllmScorer, reference: list[StateRows], batch: int
) -> dict[str, np.ndarray[Any, Any]]:
    windows = [row.window for row in reference]
    found = [
        v for _, v in engine.reduce_windows(windows, iter(reference), ScoreJob(batch=batch), TARGET)
    ]
    return {
        name: torch.cat([values[name] for values in found]).double().numpy() for name in found[0]
    }


def seconds(call: Any) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def measure(
    engine: VllmScorer, reference: list[StateRows], rounds: int
) -> tuple[dict[str, Any], Any]:
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
    return {
        **figures,
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
    }, found


VOCAB, WIDTH, TOKENS, RANKS = 151_936, 128, 64, 2


def routine_case() -> tuple[list[torch.Tensor], list[torch.Tensor], tuple[int, ...]]:
    """Heads and states of two sides that differ a little, and token ids."""
    rng = torch.Generator().manual_seed(11)
    head = torch.randn(VOCAB, WIDTH, generator=rng)
    states = 0.35 * torch.randn(TOKENS, WIDTH, generator=rng)
    moved = states + 0.02 * torch.randn(TOKENS, WIDTH, generator=rng)
    tokens = tuple(torch.randint(0, VOCAB, (TOKENS + 1,), generator=rng).tolist())
    return [head, head + 0.01 * torch.randn(VOCAB, WIDTH, generator=rng)], [states, moved], tokens


def routine_rank(rank: int, ranks: int, folder: str) -> None:
    """One process: its statistics, bytes sent and seconds, in a file."""
    torch.set_num_threads(1)
    heads, states, tokens = routine_case()
    each, sent = -(-VOCAB // ranks), 0
    lo, hi = rank * each, min(VOCAB, (rank + 1) * each)
    sides = [
        StateRows(Window(0, tokens), 1, s, Head(h[lo:hi]))
        for h, s in zip(heads, states, strict=True)
    ]
    shards: tuple[VocabularyShard, ...] = ()
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks
        )

        def gather(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal sent
            sent += tensor.numel() * tensor.element_size()
            parts = [torch.empty_like(tensor) for _ in range(ranks)]
            dist.all_gather(parts, tensor)
            return torch.stack(parts)

        shards = (VocabularyShard(lo, VOCAB, ranks, gather),)
    begun = time.process_time()
    found = batch_statistics([sides[0]], [sides[1]], *shards)[0]
    torch.save((vars(found), sent, time.process_time() - begun), f"{folder}/{ranks}-{rank}")
    if ranks > 1:
        dist.destroy_process_group()


def routine() -> dict[str, Any]:
    """How far one process and two are from float64 of the whole vocabulary: the largest difference
    of each statistic.
    """
    heads, states, tokens = routine_case()
    p, q = ((s.double() @ h.double().T).log_softmax(-1) for h, s in zip(heads, states, strict=True))
    gold = torch.tensor(tokens[1:])[:, None]
    exact = {
        "nll_ref": -p.gather(1, gold)[:, 0],
        "nll_cand": -q.gather(1, gold)[:, 0],
        "tv": (p.exp() - q.exp()).abs().sum(-1) / 2,
        "kl": (p.exp() * (p - q)).sum(-1),
        "kl_rev": (q.exp() * (q - p)).sum(-1),
        "top1": p.argmax(-1) == q.argmax(-1),
    }
    found: dict[str, Any] = {
        "vocabulary": VOCAB,
        "width": WIDTH,
        "tokens": TOKENS,
        "mean_kl": float(exact["kl"].mean()),
    }
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, RANKS):
            processes.spawn(routine_rank, (ranks, folder), nprocs=ranks)
            values, sent, _ = torch.load(f"{folder}/{ranks}-0")
            apart = {
                n: float((values[n].double() - e.double()).abs().max()) for n, e in exact.items()
            }
            seconds_ = [torch.load(f"{folder}/{ranks}-{rank}")[2] for rank in range(ranks)]
            found[f"ranks {ranks}"] = {
                "largest_from_float64": apart,
                "bytes_a_token_and_rank": sent / TOKENS,
                "cpu_seconds_of_ranks": seconds_,
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--routine", action="store_true", help="two processes without a model")
    parser.add_argument("--tensor", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pipeline", type=int, nargs="+", default=[1])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--options", default="", help="more options of vllm:, such as &kv_cache_gib=0.5"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "parallel_cpu.json"
    )
    a = parser.parse_args()
    results = json.loads(a.out.read_text(encoding="utf-8")) if a.out.exists() else {"layouts": {}}
    if a.routine:
        results["routine"] = routine() | {"torch": torch.__version__, "machine": MACHINE}
        write_atomically(a.out, json.dumps(results, indent=1) + "\n")
        print(json.dumps(results["routine"], indent=1))
    if not a.model:
        return
    layouts = [(1, 1), *((t, p) for p in a.pipeline for t in a.tensor if t * p > 1)]
    reference: list[StateRows] = []
    one: Any = None
    for tensor, stages in layouts:
        name = f"tensor {tensor}, pipeline {stages}"
        if name in results["layouts"] and (tensor, stages) != (1, 1):
            continue
        options = f"dtype={a.dtype}&max_model_len={a.length + 2}&max_num_batched_tokens={a.windows * a.length}{a.options}"  # noqa: E501
        begun = time.perf_counter()
        engine = VllmScorer.load(
            f"vllm:{a.model}?{options}&tensor_parallel={tensor}&pipeline_parallel={stages}"
        )
        started = time.perf_counter() - begun
        try:
            if not reference:
                windows = windows_of(engine, a.windows, a.length)
                rng = torch.Generator().manual_seed(0)
                for row in engine.score_windows(windows, ScoreJob(batch=a.windows)):
                    states = row.states.cpu().float()
                    noisy = states + 0.02 * states.std() * torch.randn(states.shape, generator=rng)
                    reference.append(
                        StateRows(row.window, row.first, noisy.to(row.states.dtype), row.head)
                    )
            speed, found = measure(engine, reference, a.rounds)
            facts, memory = engine.describe(), engine.core.memory()
        finally:
            engine.close()
        one = found if one is None else one
        apart = {key: float(np.nanmax(np.abs(found[key] - one[key]))) for key in found}
        means = {
            key: [float(np.nanmean(one[key])), float(np.nanmean(found[key]))]
            for key in ("kl", "tv", "nll_cand")
        }
        results["layouts"][name] = {
            "start_s": started,
            "speed": speed,
            "exact": {"largest": apart, "means_of_one_and_of_this": means},
            "kv_bytes_per_token": facts["kv_bytes_per_token"],
            "memory_of_ranks": memory,
        }
        results |= {
            "model": Path(a.model).name,
            "dtype": a.dtype,
            "windows": a.windows,
            "length": a.length,
            "rounds": a.rounds,
            "vllm": facts["vllm"],
            "torch": facts["torch"],
            "device": facts["device"],
            "machine": MACHINE,
            "load_average": os.getloadavg()[0],
        }
        write_atomically(a.out, json.dumps(results, indent=1) + "\n")
        print(name, json.dumps(results["layouts"][name]["speed"]["ratio"]), apart, flush=True)


if __name__ == "__main__":
    main()
