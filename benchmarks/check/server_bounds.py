"""How much of KL the bound sees that a server's log-probabilities allow, for so and so many ids a
token.

    python benchmarks/check/server_bounds.py [--windows 8] [--length 64] [--out FILE]

SmolLM2-135M in float32 against itself in other formats, both in this process, so that the whole KL
is known as well. The candidate's log-probabilities are cut to what a server would send: those of
the ids that the reference finds likeliest (vLLM's `prompt_logprob_token_ids`), or the candidate's
own likeliest (`prompt_logprobs`, SGLang, `echo`), in float32.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from assay.demo.models import build_smollm2
from assay.engines.hf.scorer import HfScorer
from assay.engines.scoring import ScoreJob, Window, WindowRows
from assay.engines.server.topk import TopkLogprobs
from assay.environment import describe
from assay.fidelity.bounds import Bounds, bounds_of
from assay.fidelity.metrics.bounds import choose_ids, window_bounds
from assay.fidelity.metrics.token_statistics import window_statistics
from assay.fidelity.observation import WindowObservation, observation, pooled
from assay.fidelity.plan import Plan
from assay.fidelity.reference import plan_windows

RESULTS = Path(__file__).parent / "results"
CANDIDATES = {
    "bfloat16": "dtype=bfloat16",
    "PolarQuant, 6 bits": "dtype=float32&weights=polar(bits=6)",
    "int4, groups of 128": "dtype=float32&weights=int(bits=4,group=128)",
    "int3, groups of 128": "dtype=float32&weights=int(bits=3,group=128)",
}
IDS = (5, 20, 100)


def as_served(reference: WindowRows, logprobs: torch.Tensor, count: int, by: str) -> TopkLogprobs:
    """What a server whose log-probabilities [n, V] these are would answer for one window."""
    tokens = reference.window.tokens
    gold = tokens[reference.first :]
    if by == "reference":
        ids = choose_ids(reference, count)
    else:
        ids = [
            [*row, token]
            for row, token in zip(logprobs.topk(count, -1).indices.tolist(), gold, strict=True)
        ]
    rows = tuple(
        dict(zip(row, values[row].tolist(), strict=True))
        for row, values in zip(ids, logprobs, strict=True)
    )
    own = tuple(row[token] for row, token in zip(rows, gold, strict=True))
    return TopkLogprobs(reference.first, own, rows, by)  # type: ignore[arg-type]


def pairs(
    reference: list[WindowRows], spec: str, windows: Sequence[Window]
) -> Iterator[tuple[WindowRows, WindowRows]]:
    engine = HfScorer.load(spec)
    yield from zip(reference, engine.score_windows(windows, ScoreJob(batch=2)), strict=True)
    engine.close()


def measured(
    name: str, spec: str, reference: list[WindowRows], windows: Sequence[Window]
) -> dict[str, Any]:
    """KL over the whole vocabulary, and what each number of ids leaves of it."""
    exact: list[WindowObservation] = []
    bounded: dict[tuple[str, int], list[WindowObservation]] = {
        (by, k): [] for by in ("reference", "candidate") for k in IDS
    }
    for own, other in pairs(reference, spec, windows):
        exact.append(observation(own.window, own.first, window_statistics(own, other)))
        logprobs = other.logits(0, len(own.window.tokens) - own.first).log_softmax(-1)
        for (by, count), seen in bounded.items():
            scores = as_served(own, logprobs, count, by)
            seen.append(observation(own.window, own.first, window_bounds(own, scores)))
    kl = float(pooled(exact, "kl").mean())
    rows = []
    for (by, count), seen in bounded.items():
        bounds: Bounds | None = bounds_of(seen)
        assert bounds is not None
        bound = float(pooled(seen, "kl").mean())
        rows.append(
            {
                "ids": count,
                "chosen_by": by,
                "kld_lower": bound,
                "share_of_kld": bound / kl,
                "tokens_above_exact": int((pooled(seen, "kl") > pooled(exact, "kl") + 1e-6).sum()),
                "unresolved_mass_reference": bounds.tail_reference,
                "unresolved_mass_candidate": bounds.tail_candidate,
                "tv": [bounds.tv_lo, bounds.tv_hi],
                "top1_pct": [100 * bounds.certain.value, 100 * bounds.possible.value],
            }
        )
    return {
        "candidate": name,
        "kld": kl,
        "top1_pct": 100 * float(pooled(exact, "top1").mean()),
        "bounds": rows,
    }


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        (
            "| candidate | KL, whole | ids | chosen by | KL, at least | share | left over,"
            " reference | top-1 certain … possible % |"
        ),
        "|---|---:|---:|---|---:|---:|---:|---|",
    ]
    for result in results:
        for row in result["bounds"]:
            certain, possible = row["top1_pct"]
            lines.append(
                f"| {result['candidate']} | {result['kld']:.5f} | {row['ids']} | {row['chosen_by']}"
                f" | {row['kld_lower']:.5f} | {row['share_of_kld']:.0%} |"
                f" {row['unresolved_mass_reference']:.1%} | {certain:.2f} … {possible:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS / "server_bounds.json")
    arguments = parser.parse_args()
    model = build_smollm2()
    engine = HfScorer.load(f"hf:{model}?dtype=float32")
    plan = Plan("hf:", ("hf:",), windows=arguments.windows, length=arguments.length)
    windows, text = plan_windows(plan, engine.tokenizer)
    reference = list(engine.score_windows(windows, ScoreJob(batch=2)))
    with torch.inference_mode():
        results = [
            measured(name, f"hf:{model}?{options}", reference, windows)
            for name, options in CANDIDATES.items()
        ]
    tokens = len(windows) * (arguments.length - 1)
    body = {
        "tokens": tokens,
        "windows": len(windows),
        "text": text,
        "results": results,
        "environment": describe(),
    }
    arguments.out.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    arguments.out.with_suffix(".md").write_text(table(results) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
