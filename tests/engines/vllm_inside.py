"""Run by a Python that has vLLM: scores a real model in its process and prints what was measured as
JSON.

Usage: python vllm_inside.py CHECKPOINT
"""

from __future__ import annotations

import json
import pydoc_data.topics
import sys
import time
from typing import Any

import torch

from assay.engines.scoring import HookSpec, ScoreJob, ScoringPath, Window
from assay.engines.vllm.scorer import VllmScorer

LENGTH, COUNT, PREFIX = 64, 6, 33
DECODE = ScoreJob(ScoringPath.DECODE, scored_from=PREFIX, batch=COUNT)


class IdentityKv:
    """Gives K and V back as they came."""

    def __init__(self, placement: str) -> None:
        self.placement = placement

    def on_kv(self, layer: int, k: Any, v: Any, positions: Any) -> tuple[Any, Any]:
        return k.clone(), v.clone()


class ScaleV(IdentityKv):
    """Makes values a little larger."""

    def on_kv(self, layer: int, k: Any, v: Any, positions: Any) -> tuple[Any, Any]:
        return k, v * 1.05


def windows_of(engine: VllmScorer) -> list[Window]:
    """Windows of plain text."""
    topics = pydoc_data.topics.topics
    ids = engine.tokenizer.encode("\n".join(topics[name] for name in ("class", "assert", "import")))
    return [Window(i, tuple(ids[i * LENGTH : (i + 1) * LENGTH])) for i in range(COUNT)]


def logprobs(rows: Any) -> torch.Tensor:
    return rows.logits(0, len(rows.states)).double().log_softmax(-1)


def kl(reference: list[Any], candidate: list[Any], skip: int = 0) -> dict[str, float]:
    """Mean and largest KL, and the share of states that are equal bit for bit; the reference's
    first rows left out.
    """
    values, same = [], []
    for one, other in zip(reference, candidate, strict=True):
        p, q = logprobs(one)[skip:], logprobs(other)
        values.append((p.exp() * (p - q)).sum(-1))
        same.append((one.states[skip:] == other.states).all(-1))
    found = torch.cat(values)
    return {
        "mean": float(found.mean()),
        "max": float(found.max()),
        "same": float(torch.cat(same).double().mean()),
        "rows": len(found),
    }


class Watched:
    """vLLM's own `generate`, with the states of each of its steps: [(tokens of each request,
    states)].
    """

    def __init__(self, engine: VllmScorer) -> None:
        self.core = engine.core
        self.steps: list[tuple[list[int], torch.Tensor]] = []

    def generate(self, prompts: list[Any], params: Any) -> list[Any]:
        self.core._call("watch", self._keep)  # type: ignore[attr-defined]
        try:
            given = [{"prompt_token_ids": list(tokens)} for tokens in prompts]
            return list(self.core._llm.generate(given, params, use_tqdm=False))  # type: ignore[attr-defined]
        finally:
            self.core._call("unwatch")  # type: ignore[attr-defined]

    def _keep(self, step: list[Any], states: torch.Tensor) -> None:
        counts = [len(fed.tokens) for fed in step]
        self.steps.append((counts, states[: sum(counts)].clone()))

    def logprobs(self, states: torch.Tensor) -> torch.Tensor:
        return self.core.head.logits(states).double().log_softmax(-1)


def own_prompt_logprobs(engine: VllmScorer, windows: list[Window]) -> float:
    """Largest difference from vLLM's own `prompt_logprobs` of the same states: the likeliest tokens
    and the one that came.
    """
    from vllm import SamplingParams

    watched = Watched(engine)
    outputs = watched.generate(
        [w.tokens for w in windows], SamplingParams(max_tokens=1, prompt_logprobs=10)
    )
    counts, states = watched.steps[0]
    worst = 0.0
    for output, rows in zip(outputs, states.split(counts), strict=True):
        mine = watched.logprobs(rows)
        for position, entry in enumerate(output.prompt_logprobs[1:]):
            for token, value in entry.items():
                worst = max(worst, abs(float(mine[position, token]) - value.logprob))
    return worst


def own_decode_logprobs(engine: VllmScorer, window: Window) -> float:
    """Largest difference from the raw logprobs that vLLM returns while its decode is forced, of the
    same states.
    """
    from vllm import SamplingParams

    forced = list(window.tokens[PREFIX - 1 :])
    params = SamplingParams(
        temperature=0.0,
        max_tokens=len(forced),
        ignore_eos=True,
        logprobs=5,
        extra_args={"assay_forced": forced},
    )
    watched = Watched(engine)
    output = watched.generate([window.tokens[: PREFIX - 1]], params)[0].outputs[0]
    if list(output.token_ids) != forced or len(watched.steps) != len(forced):
        return float("inf")
    worst = 0.0
    for (_, states), entry in zip(watched.steps, output.logprobs, strict=True):
        mine = watched.logprobs(states[-1:])[0]
        worst = max(
            worst, *(abs(float(mine[token]) - value.logprob) for token, value in entry.items())
        )
    return worst


def measure(checkpoint: str) -> dict[str, Any]:
    """Everything, with one engine after the other."""
    found: dict[str, Any] = {"seconds": {}}
    last = time.monotonic()

    def lap(name: str) -> None:
        nonlocal last
        found["seconds"][name] = round(time.monotonic() - last, 1)
        last = time.monotonic()

    options = f"max_model_len=256&max_num_batched_tokens={COUNT * LENGTH}&kv_cache_gib=0.25"
    engine = VllmScorer.load(f"vllm:{checkpoint}?{options}")
    lap("start")
    found["facts"] = engine.describe()
    windows = windows_of(engine)
    prefill = list(engine.score_windows(windows, ScoreJob(batch=COUNT)))
    found["prefill_bytes_read"] = engine.engagement().bytes_read
    lap("prefill")
    found["batch_1"] = kl(prefill, list(engine.score_windows(windows, ScoreJob(batch=1))))
    chunked = ScoreJob(ScoringPath.CHUNKED, scored_from=PREFIX, chunk=16, batch=COUNT)
    found["chunked"] = kl(prefill, list(engine.score_windows(windows, chunked)), PREFIX - 1)
    lap("chunked")
    decode = list(engine.score_windows(windows, DECODE))
    found["decode"] = kl(prefill, decode, PREFIX - 1)
    found["decode_bytes_read"] = engine.engagement().bytes_read
    found["decode_again"] = kl(decode, list(engine.score_windows(windows, DECODE)))
    lap("decode")
    found["own_prompt_logprobs"] = own_prompt_logprobs(engine, windows[:3])
    found["own_decode_logprobs"] = own_decode_logprobs(engine, windows[0])
    lap("own")
    for name in ("pre_rope", "post_rope"):
        job = ScoreJob(
            scored_from=PREFIX,
            batch=COUNT,
            hook=HookSpec("vllm_inside:IdentityKv", {"placement": name}),
        )
        hooked = list(engine.score_windows(windows, job))
        taken = engine.engagement()
        found[f"identity_{name}"] = kl(prefill, hooked, PREFIX - 1) | {
            "fires": sorted(set(taken.per_layer.values()))
        }
        found["hooked_layers"] = len(taken.per_layer)
    job = ScoreJob(batch=COUNT, hook=HookSpec("vllm_inside:ScaleV", {"placement": "pre_rope"}))
    found["scaled_v"] = kl(prefill, list(engine.score_windows(windows, job)))
    found["after_hooks"] = kl(prefill, list(engine.score_windows(windows, ScoreJob(batch=COUNT))))
    lap("hooks")
    engine.close()
    engine = VllmScorer.load(f"vllm:{checkpoint}?{options}&kv_cache_dtype=fp8")
    lap("start_fp8")
    found["facts_fp8"] = engine.describe()
    found["fp8_decode"] = kl(decode, list(engine.score_windows(windows, DECODE)))
    found["fp8_bytes_read"] = engine.engagement().bytes_read
    lap("fp8")
    engine.close()
    return found


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
