"""Does assay's timing agree with vLLM's own: its `bench serve`, and the histograms of its /metrics?

    python benchmarks/speed_agreement.py [--runs 5] [--requests 3] [--tokens 96] [--out FILE]

One stream on a real vLLM CPU server with SmolLM2-135M. Runs of assay and of `bench serve` alternate (and swap places
each time) on the same prompts, with the same sampling, seed and number of tokens. The server's histograms are read
before and after every run: around assay's runs they time the very same requests, and around both they tell a
change of the machine from a disagreement of the clients. A second server speculates with n-grams, where a chunk
holds several tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from assay.cache import cache_dir
from assay.coherence.conversation import TEMPERATURE, TOP_P
from assay.coherence.probes.base import user
from assay.coherence.throughput import timed_requests, to_timed_text
from assay.demo.models import build_smollm2
from assay.demo.pip import run_pip
from assay.demo.servers import Server, vllm_server
from assay.demo.vllm_env import VERSION, vllm_python
from assay.engines.base import Request
from assay.engines.server import Metrics, ServerEngine
from assay.environment import describe
from speed_agreement_table import markdown, summarised

RESULTS = Path(__file__).parent / "results"
SEED = 1000
BENCH = (
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser()\n"
    "add_cli_args(parser)\n"
    "main(parser.parse_args())\n"
)
PANDAS = ("pandas==2.3.3", "python-dateutil==2.9.0.post0", "pytz==2025.2", "six==1.17.0", "tzdata==2025.2")
HISTOGRAMS = {
    "ttft_s": "vllm:time_to_first_token_seconds",
    "tpot_s": "vllm:request_time_per_output_token_seconds",
    "step_s": "vllm:inter_token_latency_seconds",
}
"""`step_s` is the time between two outputs of the engine: with speculation that is several tokens, not one."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
COPIED = (
    "The miller carries one sack of flour to the old bridge, and the baker carries one sack of flour to the old mill.",
    "A red boat follows a blue boat, a blue boat follows a green boat, and a green boat follows a red boat.",
    "On Monday we count the apples, on Tuesday we count the pears, on Wednesday we count the apples again.",
)


def bench_extras() -> Path:
    """A folder with pandas, which `bench serve` reads prompts with and vLLM does not install.

    It is apart from the private environment, so that the server that is measured is the one users get.
    """
    folder = cache_dir("bench-extras")
    if not (folder / "pandas").exists():
        run_pip(
            ["install", "--no-deps", "--target", str(folder), *PANDAS],
            log_name="bench-extras.log",
            python=vllm_python(),
        )
    return folder


def assay_run(engine: ServerEngine, requests: Sequence[Request]) -> dict[str, Any]:
    """assay's own timing of one request after the other; means over the requests, as the other two report them."""
    rows = []
    for request in requests:
        reply = engine.stream(request)
        timed = to_timed_text(reply)
        if reply.timing is None or timed.itl_s is None or timed.ttft_s is None:
            raise SystemExit("a reply came without timing")
        rows.append(
            {
                "ttft_s": timed.ttft_s,
                "tpot_s": timed.itl_s,
                "chunk_s": reply.timing.decode_seconds / (len(reply.timing.chunk_times) - 1),
                "tokens": timed.completion_tokens,
                "prompt_tokens": timed.prompt_tokens,
                "chunks": len(reply.timing.chunk_times),
                "first_chunk_source": timed.first_chunk_source,
                "text": reply.content,
            }
        )
    return {name: fmean(row[name] for row in rows) for name in ("ttft_s", "tpot_s", "chunk_s")} | {
        "requests": rows
    }


def bench_run(server: Server, model: Path, requests: Sequence[Request]) -> dict[str, Any]:
    """`vllm bench serve` on the same prompts, over the same route, one at a time, after one warm-up of its own."""
    first = requests[0]
    with tempfile.TemporaryDirectory(prefix="assay-bench-") as folder:
        prompts = Path(folder) / "prompts.jsonl"
        texts = [r.messages[0].content for r in requests if r.messages]
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
        command = [
            str(vllm_python()), "-c", BENCH, "--backend", "openai-chat", "--endpoint", "/v1/chat/completions",
            "--base-url", server.url, "--model", server.model, "--tokenizer", str(model),
            "--dataset-name", "custom", "--dataset-path", str(prompts), "--disable-shuffle", "--no-oversample",
            "--skip-chat-template", "--custom-output-len", str(first.max_tokens), "--ignore-eos",
            "--num-prompts", str(len(texts)), "--max-concurrency", "1", "--num-warmups", "1", "--disable-tqdm",
            "--temperature", str(first.temperature), "--top-p", str(first.top_p), "--repetition-penalty", "1.0",
            "--extra-body", json.dumps({"seed": first.seed}), "--save-result", "--save-detailed",
            "--result-dir", folder, "--result-filename", "result.json",
        ]  # fmt: skip
        quiet = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "PYTHONPATH": str(bench_extras()),
        }
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, **quiet}, cwd=folder
        )
        if done.returncode != 0:
            raise SystemExit(f"bench serve failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
        result = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
    if result["completed"] != len(texts):
        raise SystemExit(f"bench serve completed {result['completed']} of {len(texts)} requests")
    return {
        "ttft_s": result["mean_ttft_ms"] / 1000,
        "tpot_s": result["mean_tpot_ms"] / 1000,
        "tokens": result["output_lens"],
        "prompt_tokens": result["input_lens"],
        "texts": result["generated_texts"],
    }


def with_histograms(
    engine: ServerEngine, requests: int, work: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Run `work`, and add what the server's own histograms say about its `requests` requests."""
    load = os.getloadavg()
    before = engine.metrics()
    found = work()
    deadline = time.monotonic() + 5.0
    while True:
        after = engine.metrics()
        seen = _growth(before, after, HISTOGRAMS["tpot_s"] + "_count")
        if seen == requests:
            break
        if seen > requests or time.monotonic() > deadline:
            raise SystemExit(f"the server counts {seen:.0f} finished requests, {requests} were sent")
        time.sleep(0.05)
    means = {
        name: _growth(before, after, metric + "_sum") / _growth(before, after, metric + "_count")
        for name, metric in HISTOGRAMS.items()
    }
    return found | {
        "metrics": means | {"tokens": _growth(before, after, "vllm:generation_tokens_total")},
        "loadavg_before": [round(value, 2) for value in load],
    }


def _growth(before: Metrics, after: Metrics, name: str) -> float:
    total = after.total(name)
    if total is None:
        raise SystemExit(f"the server has no metric {name}")
    return total - (before.total(name) or 0.0)


def plain_case(model: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Alternating runs of both clients on a server that does not speculate."""
    requests = [
        replace(request, seed=SEED, max_tokens=arguments.tokens, ignore_eos=True)
        for request in timed_requests(arguments.requests, SEED, chat=True)
    ]
    runs = []
    with (
        vllm_server(model, name="smollm2", extra_args=["--no-enable-prefix-caching"]) as server,
        ServerEngine.connect(server.url) as engine,
    ):
        engine.stream(requests[0])
        for index in range(arguments.runs):
            clients: list[tuple[str, int, Callable[[], dict[str, Any]]]] = [
                ("assay", len(requests), lambda: assay_run(engine, requests)),
                ("bench", len(requests) + 1, lambda: bench_run(server, model, requests)),
            ]
            pair = {
                name: with_histograms(engine, count, work)
                for name, count, work in (clients if index % 2 == 0 else clients[::-1])
            }
            mine, theirs = pair["assay"]["requests"], pair["bench"]
            if [r["tokens"] for r in mine] != theirs["tokens"]:
                raise SystemExit("the two clients got different numbers of tokens")
            if [r["prompt_tokens"] for r in mine] != theirs["prompt_tokens"]:
                raise SystemExit("the two clients sent different prompts")
            pair["same_texts"] = sum(r["text"] == t for r, t in zip(mine, theirs.pop("texts"), strict=True))
            runs.append(pair)
            print("plain", index, _line(pair["assay"]), "| bench", _line(pair["bench"]), flush=True)
    return runs


def speculative_case(model: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """assay against the server's histograms where a chunk holds several tokens: greedy copies with n-gram drafts."""
    requests = [
        Request(
            messages=(user(f"Repeat this sentence many times: {text}"),),
            max_tokens=arguments.tokens,
            ignore_eos=True,
        )
        for text in COPIED
    ]
    flags = ["--no-enable-prefix-caching", "--speculative-config", json.dumps(NGRAM)]
    runs = []
    with (
        vllm_server(model, name="smollm2", extra_args=flags) as server,
        ServerEngine.connect(server.url) as engine,
    ):
        engine.stream(requests[0])
        for index in range(arguments.runs):
            run = with_histograms(engine, len(requests), lambda: assay_run(engine, requests))
            runs.append(run)
            print("ngram", index, _line(run), flush=True)
    return runs


def _line(run: dict[str, Any]) -> str:
    own, metrics = run, run["metrics"]
    return (
        f"TTFT {1000 * own['ttft_s']:.1f} ms (metrics {1000 * metrics['ttft_s']:.1f}), "
        f"TPOT {1000 * own['tpot_s']:.2f} ms (metrics {1000 * metrics['tpot_s']:.2f}), load {run['loadavg_before'][0]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=3, help="prompts of one run")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of one answer")
    parser.add_argument("--out", type=Path, default=RESULTS / "speed_agreement.json")
    arguments = parser.parse_args()
    model = build_smollm2()
    bench_extras()
    result: dict[str, Any] = {
        "machine": describe() | {"vllm": VERSION},
        "settings": {
            "model": "SmolLM2-135M", "runs": arguments.runs, "requests": arguments.requests, "tokens": arguments.tokens,
            "temperature": TEMPERATURE, "top_p": TOP_P, "seed": SEED, "streams": 1, "ngram": NGRAM,
        },
        "plain": plain_case(model, arguments),
        "ngram": speculative_case(model, arguments),
    }  # fmt: skip
    for run in [pair["assay"] for pair in result["plain"]] + result["ngram"]:
        for row in run["requests"]:
            row.pop("text")
    result["summary"] = summarised(result)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    page = markdown(result)
    arguments.out.with_suffix(".md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
