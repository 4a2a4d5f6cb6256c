"""Does assay's timing agree with vLLM's own: its `bench serve`, and the histograms of its /metrics?

    python benchmarks/check/speed_agreement.py [--runs 5] [--requests 4] [--tokens 96] [--out FILE]

One stream on a real vLLM CPU server with SmolLM2-135M. assay and `bench serve` take turns request
by request (and swap places), on the same prompts, with the same sampling, seed and number of
tokens, so that a machine whose speed drifts drifts for both. The server's histograms are read
before and after every request: they time the very same request, and tell what a client does to the
server from what its clock says. A second server speculates with n-grams, where a chunk holds
several tokens. Every run is written as it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from assay.coherence.conversation import TEMPERATURE, TOP_P, user
from assay.coherence.speed import timed_requests, to_timed_text
from assay.demo import VERSION, vllm_server
from assay.demo.models import build_smollm2
from assay.engines import Request
from assay.engines.server.engine import ServerEngine
from assay.engines.server.metrics import Metrics
from assay.environment import describe
from bench_serve import BenchServe, bench_extras, bench_serve
from speed_agreement_table import write

RESULTS = Path(__file__).parent / "results"
SEED = 1000
HISTOGRAMS = {
    "ttft_s": "vllm:time_to_first_token_seconds",
    "tpot_s": "vllm:request_time_per_output_token_seconds",
    "step_s": "vllm:inter_token_latency_seconds",
}
"""`step_s` is the time between two outputs of the engine: with speculation that is several tokens,
not one.
"""
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
COPIED = (
    (
        "The miller carries one sack of flour to the old bridge, and the baker carries one sack of"
        " flour to the old mill."
    ),
    (
        "A red boat follows a blue boat, a blue boat follows a green boat, and a green boat follows"
        " a red boat."
    ),
    (
        "On Monday we count the apples, on Tuesday we count the pears, on Wednesday we count the"
        " apples again."
    ),
)


def assay_one(engine: ServerEngine, request: Request) -> dict[str, Any]:
    """assay's own timing of one request."""
    reply = engine.stream(request)
    timed = to_timed_text(reply)
    if reply.timing is None or timed.itl_s is None or timed.ttft_s is None:
        raise SystemExit("a reply came without timing")
    return {
        "ttft_s": timed.ttft_s,
        "tpot_s": timed.itl_s,
        "chunk_s": reply.timing.decode_seconds / (len(reply.timing.chunk_times) - 1),
        "tokens": timed.completion_tokens,
        "prompt_tokens": timed.prompt_tokens,
        "chunks": len(reply.timing.chunk_times),
        "first_chunk_source": timed.first_chunk_source,
        "text": reply.content,
    }


def with_histograms(engine: ServerEngine, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run `work`, which sends one request, and add what the server's own histograms say about that
    request.
    """
    load = os.getloadavg()[0]
    before = engine.metrics()
    found = work()
    deadline = time.monotonic() + 5.0
    while True:
        after = engine.metrics()
        seen = _growth(before, after, HISTOGRAMS["tpot_s"] + "_count")
        if seen == 1:
            break
        if seen > 1 or time.monotonic() > deadline:
            raise SystemExit(f"the server counts {seen:.0f} finished requests, one was sent")
        time.sleep(0.05)
    means = {
        name: _growth(before, after, metric + "_sum") / _growth(before, after, metric + "_count")
        for name, metric in HISTOGRAMS.items()
    }
    return found | {
        "metrics": means | {"tokens": _growth(before, after, "vllm:generation_tokens_total")},
        "loadavg_before": round(load, 2),
    }


def _growth(before: Metrics, after: Metrics, name: str) -> float:
    total = after.total(name)
    if total is None:
        raise SystemExit(f"the server has no metric {name}")
    return total - (before.total(name) or 0.0)


Keep = Callable[[str, list[dict[str, Any]]], None]


def plain_case(model: Path, arguments: argparse.Namespace, keep: Keep) -> None:
    """Both clients in turns, request by request, on a server that does not speculate."""
    requests = [
        replace(request, seed=SEED, max_tokens=arguments.tokens, ignore_eos=True)
        for request in timed_requests(arguments.requests, SEED, chat=True)
    ]
    runs: list[dict[str, Any]] = []
    with (
        vllm_server(model, name="smollm2", extra_args=["--no-enable-prefix-caching"]) as server,
        ServerEngine.connect(server.url) as engine,
        bench_serve(server, model) as bench,
    ):
        engine.stream(requests[0])
        bench.one(requests[0])
        for run in range(arguments.runs):
            pairs = [
                pair(engine, bench, request, run + index) for index, request in enumerate(requests)
            ]
            runs.append({name: [each[name] for each in pairs] for name in ("assay", "bench")})
            runs[-1]["same_texts"] = [each["same_text"] for each in pairs]
            keep("plain", runs)
            print(
                "plain",
                run,
                _line(runs[-1]["assay"]),
                "| bench",
                _line(runs[-1]["bench"]),
                flush=True,
            )


def pair(engine: ServerEngine, bench: BenchServe, request: Request, turn: int) -> dict[str, Any]:
    """One request by both clients, `turn` says who begins."""
    clients: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("assay", lambda: assay_one(engine, request)),
        ("bench", lambda: bench.one(request)),
    ]
    found: dict[str, Any] = {
        name: with_histograms(engine, work)
        for name, work in (clients if turn % 2 == 0 else clients[::-1])
    }
    for what in ("tokens", "prompt_tokens"):
        if found["assay"][what] != found["bench"][what]:
            raise SystemExit(f"the two clients differ in {what}")
    return found | {"same_text": found["assay"].pop("text") == found["bench"].pop("text")}


def speculative_case(model: Path, arguments: argparse.Namespace, keep: Keep) -> None:
    """assay against the server's histograms where a chunk holds several tokens: greedy copies with
    n-gram drafts.
    """
    requests = [
        Request(
            messages=(user(f"Repeat this sentence many times: {text}"),),
            max_tokens=arguments.tokens,
            ignore_eos=True,
        )
        for text in COPIED
    ]
    flags = ["--no-enable-prefix-caching", "--speculative-config", json.dumps(NGRAM)]
    runs: list[dict[str, Any]] = []
    with (
        vllm_server(model, name="smollm2", extra_args=flags) as server,
        ServerEngine.connect(server.url) as engine,
    ):
        engine.stream(requests[0])
        for run in range(arguments.runs):
            rows = [
                with_histograms(engine, partial(assay_one, engine, request)) for request in requests
            ]
            for row in rows:
                row.pop("text")
            runs.append({"assay": rows})
            keep("ngram", runs)
            print("ngram", run, _line(rows), flush=True)


def _line(rows: Sequence[dict[str, Any]]) -> str:
    def mean(figure: str) -> str:
        own, server = (
            fmean(1000 * side[figure] for side in (rows, [r["metrics"] for r in rows])[i])
            for i in (0, 1)
        )
        return f"{own:.2f} ms (metrics {server:.2f})"

    return f"TTFT {mean('ttft_s')}, TPOT {mean('tpot_s')}, load {rows[0]['loadavg_before']}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4, help="prompts of one run")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of one answer")
    parser.add_argument("--out", type=Path, default=RESULTS / "speed_agreement.json")
    arguments = parser.parse_args()
    model = build_smollm2()
    bench_extras()
    result: dict[str, Any] = {
        "machine": describe() | {"vllm": VERSION},
        "settings": {
            "model": "SmolLM2-135M",
            "runs": arguments.runs,
            "requests": arguments.requests,
            "tokens": arguments.tokens,
            "temperature": TEMPERATURE,
            "top_p": TOP_P,
            "seed": SEED,
            "streams": 1,
            "ngram": NGRAM,
        },
        "plain": [],
        "ngram": [],
    }

    def keep(case: str, runs: list[dict[str, Any]]) -> None:
        result[case] = runs
        write(result, arguments.out)

    plain_case(model, arguments, keep)
    speculative_case(model, arguments, keep)
    print(arguments.out.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
