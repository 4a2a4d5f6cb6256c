"""What KL over the whole vocabulary costs in vLLM: against a plain prefill, and against the ways that vLLM has itself.

Run it with a Python that has vLLM (on a GPU or a CPU) and assay in its path:

    python benchmarks/vllm_kl_speed.py 'vllm:./model?max_model_len=1024' --windows 64 --batch 8 --out FILE.json

Four ways over the same windows, in tokens scored a second:

- *prefill*: `LLM.generate` with one new token, nothing scored: the bare forward pass;
- *kl*: what `assay compare` does: assay's scoring, then all statistics of every token (KL both ways, NLL, top-1) against
  states of a reference, which lie in the main memory as a stored reference's do;
- *top20*: `prompt_logprobs=20`, and *all*: `prompt_logprobs=-1`, on fewer tokens as they are slow.

`processor_s` are the seconds of all threads of this process, which other programs disturb less than the clock. On a GPU
`fused` says whether the kernel of `assay.fidelity.statistics_kernel` took the statistics; ASSAY_NO_TRITON=1 leaves it out.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from assay.engines.scoring import ScoreJob, StateRows, Window
from assay.engines.vllm.core import VllmCore
from assay.engines.vllm.scorer import VllmScorer
from assay.environment import describe
from assay.errors import AssayError
from assay.fidelity.fused import fused_statistics
from assay.fidelity.metrics import window_statistics

STATISTICS = "assay.fidelity.metrics:statistics_on_device"


def windows_of(engine: VllmScorer, count: int, length: int) -> list[Window]:
    """Windows of Python's own documentation, repeated where it is too short; they differ by their first tokens."""
    ids = engine.tokenizer.encode("\n".join(pydoc_data.topics.topics.values()))
    start = engine.tokenizer.bos_id
    head = [] if start is None else [start]
    body = length - len(head)
    step = min(body, max(1, (len(ids) - body) // max(1, count - 1)))
    return [Window(i, (*head, *ids[i * step : i * step + body])) for i in range(count)]


def rate(run: Callable[[], Any], tokens: int, repeats: int) -> dict[str, Any]:
    """Tokens a second of `run`, which is run once to warm up: median and all values."""
    run()
    values, processor = [], []
    for _ in range(repeats):
        start, began = time.perf_counter(), time.process_time()
        run()
        values.append(tokens / (time.perf_counter() - start))
        processor.append(time.process_time() - began)
    return {
        "tokens_per_s": statistics.median(values),
        "all": values,
        "tokens": tokens,
        "processor_s": statistics.median(processor),
    }


def measure(
    engine: VllmScorer, windows: Sequence[Window], job: ScoreJob, args: argparse.Namespace
) -> dict[str, Any]:
    """All four ways."""
    import torch
    from vllm import SamplingParams

    if not isinstance(engine.core, VllmCore):
        raise AssayError(
            "this Python has no vLLM", finding_id="fidelity.engine_missing", remedy="run it with one that has"
        )
    llm = engine.core._llm

    def generate(some: Sequence[Window], tokens: int | None, logprobs: int | None) -> None:
        prompts = [{"prompt_token_ids": list(w.tokens[:tokens])} for w in some]
        llm.generate(
            prompts, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=logprobs), use_tqdm=False
        )

    length = len(windows[0].tokens)
    scored = len(windows) * (length - 1)
    found = {
        "prefill": rate(lambda: generate(windows, -1, None), scored, args.repeats),
        "top20": rate(
            lambda: generate(windows[: args.top_windows], -1, 20), args.top_windows * (length - 2), 1
        ),
        "all": rate(lambda: generate(windows[:1], args.all_tokens, -1), args.all_tokens - 1, 1),
    }
    reference = [replace(r, states=r.states.cpu()) for r in engine.score_windows(windows, job)]
    states = rate(lambda: list(engine.score_windows(windows, job)), scored, args.repeats)

    def kl() -> list[float]:
        found = engine.reduce_windows(windows, iter(reference), job, STATISTICS)
        return [float(values["kl"].mean()) for _, values in found]

    found |= {"states": states, "kl": rate(kl, scored, args.repeats)}
    found["kl_self"] = max(kl())
    found["fused"] = fused_statistics()
    found["kl_share_of_prefill"] = found["kl"]["tokens_per_s"] / found["prefill"]["tokens_per_s"]
    found["kl_share_of_prefill_by_processor"] = found["prefill"]["processor_s"] / found["kl"]["processor_s"]
    found["states_share_of_prefill"] = states["tokens_per_s"] / found["prefill"]["tokens_per_s"]
    found["kl_times_top20"] = found["kl"]["tokens_per_s"] / found["top20"]["tokens_per_s"]
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
    torch.testing.assert_close(window_statistics(rows, other).kl[:8].cpu(), wanted, atol=1e-4, rtol=0.05)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
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
