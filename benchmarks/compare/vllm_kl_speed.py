"""What KL over the whole vocabulary costs in vLLM: against a plain prefill, and against the ways
that vLLM has itself.

Run it with a Python that has vLLM (on a GPU or a CPU) and assay in its path:

    python benchmarks/compare/vllm_kl_speed.py 'vllm:./model?max_model_len=1024' --windows 64
    --batch 8
    --out FILE.json

Ways over the same windows, in tokens scored a second:

- *prefill*: `LLM.generate` with one new token, nothing scored: the bare forward pass;
- *kl*: what `assay compare` does: assay's scoring, then all statistics of every token (KL both
  ways, NLL, top-1) against
  states of a reference, which lie in the main memory as a stored reference's do;
- *statistics*: those alone, with the candidate's states at hand; `enqueued_s` are the seconds until
  the processor has told
  the device all of it;
- *top20*: `prompt_logprobs=20`, and *all*: `prompt_logprobs=-1`, on fewer tokens as they are slow,
  the second of them once.

The ways take turns, each once a round and every other round in reverse, and shares are those of one
round: a machine that becomes slower in the meantime moves both sides of a share. `processor_s` are
the seconds of all threads of this process, which other programs disturb less than the clock. On a
GPU `fused` says whether the kernel of `assay.fidelity.metrics.fused_gpu` took the statistics;
ASSAY_NO_TRITON=1 leaves it out.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from assay.engines.scoring import ScoreJob, StateRows, Window, to_host
from assay.engines.vllm.core import VllmCore
from assay.engines.vllm.scorer import VllmScorer
from assay.environment import describe
from assay.errors import AssayError
from assay.fidelity.metrics.token_statistics import batch_statistics, window_statistics

STATISTICS = "assay.fidelity.metrics.token_statistics:batch_statistics"


def windows_of(engine: VllmScorer, count: int, length: int) -> list[Window]:
    """Windows of Python's own documentation, repeated where it is too short; they differ by their
    first tokens.
    """
    ids = engine.tokenizer.encode("\n".join(pydoc_data.topics.topics.values()))
    start = engine.tokenizer.bos_id
    head = [] if start is None else [start]
    body = length - len(head)
    step = min(body, max(1, (len(ids) - body) // max(1, count - 1)))
    return [Window(i, (*head, *ids[i * step : i * step + body])) for i in range(count)]


@dataclass(frozen=True)
class Way:
    """One way of running: what is run, and the tokens that it is timed by."""

    run: Callable[[], Any]
    tokens: int


def in_turns(ways: Mapping[str, Way], rounds: int) -> dict[str, dict[str, Any]]:
    """Tokens a second of every way in each round, in the order of the rounds, after each ran once
    to warm up.
    """
    for way in ways.values():
        way.run()
    timed: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name in sorted(ways, key=list(ways).index, reverse=turn % 2 == 1):
            timed[name].append(seconds(ways[name].run))
    return {
        name: {
            "tokens_per_s": statistics.median(way.tokens / clock for clock, _ in timed[name]),
            "all": [way.tokens / clock for clock, _ in timed[name]],
            "tokens": way.tokens,
            "processor_s": [processor for _, processor in timed[name]],
        }
        for name, way in ways.items()
    }


def seconds(run: Callable[[], Any]) -> tuple[float, float]:
    """What the clock and the processor took."""
    start, began = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start, time.process_time() - began


def share(of: Sequence[float], by: Sequence[float]) -> dict[str, Any]:
    """Median and range of the shares of the rounds."""
    shares = [a / b for a, b in zip(of, by, strict=True)]
    return {"value": statistics.median(shares), "lo": min(shares), "hi": max(shares)}


def measure(
    engine: VllmScorer, windows: Sequence[Window], job: ScoreJob, args: argparse.Namespace
) -> dict[str, Any]:
    """All ways."""
    import torch
    from vllm import SamplingParams

    if not isinstance(engine.core, VllmCore):
        raise AssayError(
            "this Python has no vLLM",
            finding_id="fidelity.engine_missing",
            remedy="run it with one that has",
        )
    llm = engine.core._llm

    def generate(some: Sequence[Window], tokens: int | None, logprobs: int | None) -> None:
        prompts = [{"prompt_token_ids": list(w.tokens[:tokens])} for w in some]
        llm.generate(
            prompts,
            SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=logprobs),
            use_tqdm=False,
        )

    length = len(windows[0].tokens)
    scored = len(windows) * (length - 1)
    reference = [replace(r, states=r.states.cpu()) for r in engine.score_windows(windows, job)]

    def kl() -> list[float]:
        found = engine.reduce_windows(windows, iter(reference), job, STATISTICS)
        return [float(values["kl"].mean()) for _, values in found]

    own = [replace(r, states=r.states.clone()) for r in engine.score_windows(windows, job)]
    enqueued: list[float] = []

    def statistics_alone() -> None:
        began = time.perf_counter()
        of_all = [vars(s) for s in batch_statistics(reference, own)]
        enqueued.append(time.perf_counter() - began)
        to_host(of_all)

    some = windows[: args.top_windows]
    found: dict[str, Any] = in_turns(
        {
            "prefill": Way(lambda: generate(windows, -1, None), scored),
            "states": Way(lambda: list(engine.score_windows(windows, job)), scored),
            "kl": Way(kl, scored),
            "statistics": Way(statistics_alone, scored),
            "top20": Way(lambda: generate(some, -1, 20), len(some) * (length - 2)),
        },
        args.rounds,
    )
    every = Way(lambda: generate(windows[:1], args.all_tokens, -1), args.all_tokens - 1)
    found |= in_turns({"all": every}, 1)
    found["statistics"]["enqueued_s"] = statistics.median(enqueued[1:])
    kernel = sys.modules.get(
        "assay.fidelity.metrics.fused_gpu"
    )  # imported by the first logits on a GPU
    found |= {"kl_self": max(kl()), "fused": kernel and kernel.fused_statistics()}
    speed = {name: found[name]["all"] for name in ("prefill", "states", "kl", "top20")}
    found["kl_share_of_prefill"] = share(speed["kl"], speed["prefill"])
    found["kl_share_of_prefill_by_processor"] = share(
        found["prefill"]["processor_s"], found["kl"]["processor_s"]
    )
    found["states_share_of_prefill"] = share(speed["states"], speed["prefill"])
    found["kl_times_top20"] = share(speed["kl"], speed["top20"])
    found["kl_times_all"] = found["kl"]["tokens_per_s"] / found["all"]["tokens_per_s"]
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    check(reference[0])
    return found


def check(rows: StateRows) -> None:
    """The statistics that were timed are those of float64, on some rows."""
    import torch

    other = replace(rows, states=rows.states + 0.01 * torch.randn_like(rows.states))
    p, q = (r.to(torch.device("cpu")).logits(0, 8).double().log_softmax(-1) for r in (rows, other))
    wanted = (p.exp() * (p - q)).sum(-1)
    torch.testing.assert_close(
        window_statistics(rows, other).kl[:8].cpu(), wanted, atol=1e-4, rtol=0.05
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", "--repeats", type=int, default=5)
    parser.add_argument("--top-windows", type=int, default=4)
    parser.add_argument("--all-tokens", type=int, default=33)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    engine = VllmScorer.load(args.engine)
    try:
        windows = windows_of(engine, args.windows, args.length)
        found = measure(engine, windows, ScoreJob(batch=args.batch), args)
        result = {
            "engine": engine.describe(),
            "windows": args.windows,
            "length": args.length,
            "batch": args.batch,
            "rounds": args.rounds,
            **found,
            "load_average": os.getloadavg(),
            "environment": describe(),
        }
    finally:
        engine.close()
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
