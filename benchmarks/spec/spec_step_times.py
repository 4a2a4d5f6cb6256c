"""How long is a decode step with N speculative tokens? Servers that run side by side, asked in
turn.

    python benchmarks/spec/spec_step_times.py MODEL WORKDIR [DRAFT...]

For each draft four servers are up at once: without speculation, and with N = 1, 3 and 5. Each round
sends the same greedy streamed request to every server in turn, so that whatever else the machine
does hits all of them alike; ratios are taken within a round. A chunk of the stream is one decode
step. Adds to results/spec_step_times.json; what the figures mean for the model of the net
multiplier is worked out by spec_multiplier.py.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from assay.speculation.spec import examine
from assay.speculation.traffic import PROMPTS
from spec_engine import make_draft, server

RESULTS = Path(__file__).parent / "results" / "spec_step_times.json"
DEPTHS = (0, 1, 3, 5)
ROUNDS = 6
TOKENS = 64
REPETITIVE = "one two three four five six seven eight " * 12
"""n-gram drafting proposes tokens at every step of this; it costs next to nothing, so its steps
show the verification.
"""


def speculative(draft: str, depth: int, model: Path, work: Path) -> dict[str, Any] | None:
    if not depth:
        return None
    if draft == "ngram":
        return {
            "method": "ngram",
            "num_speculative_tokens": depth,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    path = model if draft == "self" else make_draft(draft, model, work / draft.replace(":", ""))
    return {"method": "draft_model", "model": str(path), "num_speculative_tokens": depth}


def ask(url: str, name: str, prompt: str, tokens: int = TOKENS) -> dict[str, float]:
    """One greedy request: seconds from the first chunk to the last, chunks after the first, tokens
    in them.
    """
    body = {
        "model": name,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    times: list[float] = []
    counts: list[int] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk["choices"]:
                times.append(time.monotonic())
                counts.append(chunk["usage"]["completion_tokens"])
    return {
        "seconds": times[-1] - times[0],
        "steps": len(times) - 1,
        "tokens": counts[-1] - counts[0],
    }


def measure(draft: str, model: Path, work: Path) -> dict[str, Any]:
    """All rounds of one draft."""
    with ExitStack() as held:
        urls: dict[int, str] = {}
        for depth in DEPTHS:
            name = f"steps{depth}"
            url = held.enter_context(
                server(
                    model,
                    speculative(draft, depth, model, work),
                    work / f"steps_{draft}_{depth}.log",
                    name,
                )
            )
            if url is None:
                raise SystemExit(f"{draft} at depth {depth} did not start; see {work}")
            urls[depth] = url
            ask(url, name, "Warm up", 8)
        rounds = []
        for i in range(ROUNDS):
            prompt = REPETITIVE if draft == "ngram" else PROMPTS[i % len(PROMPTS)]
            order = DEPTHS[i % 4 :] + DEPTHS[: i % 4]
            rounds.append({str(d): ask(urls[d], f"steps{d}", prompt) for d in order})
            print(
                draft,
                i,
                {d: round(r["seconds"] / r["steps"], 4) for d, r in rounds[-1].items()},
                flush=True,
            )
    return {"rounds": rounds, "rates": rates(draft, work)}


def rates(draft: str, work: Path) -> dict[str, list[float]]:
    """Acceptance per position, from the log of each depth."""
    found = {}
    for depth in DEPTHS[1:]:
        record = examine([str(work / f"steps_{draft}_{depth}.log")]).results["record"]
        found[str(depth)] = record["per_position"] or []
    return found


def main() -> None:
    model, work = Path(sys.argv[1]), Path(sys.argv[2])
    work.mkdir(parents=True, exist_ok=True)
    for draft in sys.argv[3:] or ("self", "layers:12", "layers:26", "ngram"):
        found = measure(draft, model, work)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results[draft] = found
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
