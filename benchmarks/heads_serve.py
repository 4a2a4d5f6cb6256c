"""A trained head in a real vLLM: acceptance by position and kind of text, health by `assay spec`, and losslessness.

    python benchmarks/heads_serve.py MODEL HEAD RESULTS.json --label NAME [--python PYTHON] [--off URL] [--kv-cache-dtype fp8]
        [--temperature 0] [--head-state zeros] [--options "--gpu-memory-utilization 0.1"] [--start-lock FILE] [--serve-off SECONDS]

The prompts are those that `assay heads train` held out with its default seed. They are sent four at a time, and the counters
of /metrics are read around each four: those are the clusters of the intervals. With `--off URL` the texts are compared with
those of a server without speculation. `--serve-off SECONDS` serves MODEL without any, prints its URL and waits.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from assay.demo.servers import vllm_python, vllm_server
from assay.errors import AssayError
from assay.lab.heads.train import HELD_OUT, KINDS, prompts
from assay.runs import write_atomically
from assay.speculation.spec import SpecOptions, examine
from assay.stats.cluster import cluster_proportion, cluster_ratio

DEPTH, FOUR = 4, 4


def damaged(head: Path, state: str, folder: Path) -> Path:
    """A copy of the head as a loader would leave it: `zeros`, or with tensors left out (`missing`, `missing-layer`)."""
    tensors = load_file(head / "model.safetensors")
    shutil.copytree(head, folder, ignore=shutil.ignore_patterns("text", "*.pt"))
    if state == "zeros":
        tensors = {n: torch.zeros_like(t) if t.is_floating_point() else t for n, t in tensors.items()}
    elif state == "norms-minus-one":  # as Gemma stores them, read as Llama does
        tensors = {n: t - 1 if "norm" in n else t for n, t in tensors.items()}
    elif state in ("missing", "missing-layer"):
        keep = ("d2t", "t2d") if state == "missing" else ("d2t", "t2d", "fc", "norm", "lm_head")
        tensors = {n: t for n, t in tensors.items() if n.startswith(keep)}
    else:
        raise ValueError(state)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@contextlib.contextmanager
def served(a: argparse.Namespace, name: str, extra: list[str]) -> Iterator[Any]:
    """A server that starts while no other does."""
    python = Path(a.python) if a.python else vllm_python()
    args = [*extra, *shlex.split(a.options), "--max-num-seqs", "8"]
    with contextlib.ExitStack() as held:
        with contextlib.ExitStack() as starting:
            if a.start_lock:
                lock = starting.enter_context(Path(a.start_lock).open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            server = held.enter_context(
                vllm_server(Path(a.model), name=name, max_model_len=2048, extra_args=args, python=python,
                            env={"VLLM_LOG_STATS_INTERVAL": "2"})
            )  # fmt: skip
        yield server


def counters(client: httpx.Client) -> dict[str, float]:
    """Steps, and accepted drafts by position."""
    found: dict[str, float] = {}
    for line in client.get("/metrics").text.splitlines():
        if match := re.match(r"vllm:spec_decode_num_accepted_tokens_per_pos_total\{(.*)\} (\S+)", line):
            position = re.search(r'position="(\d+)"', match[1])
            found[position[1] if position else "?"] = float(match[2])
        elif match := re.match(r"vllm:spec_decode_num_drafts_total\{.*\} (\S+)", line):
            found["steps"] = float(match[1])
    return found


def measure(url: str, model: str, a: argparse.Namespace) -> dict[str, Any]:
    """Acceptance by kind of text."""
    tokenizer = AutoTokenizer.from_pretrained(a.model)
    asked = [p for i, p in enumerate(prompts(tokenizer, a.prompts, a.text)) if i % HELD_OUT == 0]
    rows: dict[str, Any] = {}
    groups: list[tuple[str, float, list[float]]] = []
    with httpx.Client(base_url=url, timeout=300) as client, ThreadPoolExecutor(FOUR) as pool:

        def complete(ids: list[int]) -> int:
            body = {"model": model, "prompt": ids, "max_tokens": a.tokens, "temperature": a.temperature, "seed": 1}
            usage = client.post("/v1/completions", json=body).raise_for_status().json()["usage"]
            return int(usage["completion_tokens"])

        complete(asked[0][1])
        began, tokens = time.monotonic(), 0
        for kind in KINDS:
            own = [ids for k, ids in asked if k == kind][: a.texts]
            for i in range(0, len(own), FOUR):
                before = counters(client)
                tokens += sum(pool.map(complete, own[i : i + FOUR]))
                time.sleep(0.05)
                after = counters(client)
                gained = {k: after[k] - before.get(k, 0) for k in after}
                if gained.get("steps"):
                    groups.append((kind, gained["steps"], [gained.get(str(j), 0.0) for j in range(DEPTH)]))
        seconds = time.monotonic() - began
    for kind in ("all", *KINDS):
        part = [g for g in groups if kind in ("all", g[0])]
        if not part:
            continue
        steps = [s for _, s, _ in part]
        positions = [cluster_proportion([c[j] for *_, c in part], steps).interval for j in range(DEPTH)]
        rows[kind] = {
            "steps": sum(steps), "groups": len(part), "counts": [sum(c[j] for *_, c in part) for j in range(DEPTH)],
            "positions": [[i.value, i.lo, i.hi] for i in positions],
            "tokens_per_step": (lambda r: [r.value, r.lo, r.hi])(
                cluster_ratio([s + sum(c) for _, s, c in part], steps).interval
            ),
        }  # fmt: skip
    return {"kinds": rows, "tokens": tokens, "seconds": seconds}


def main() -> None:
    """Serve, measure, and add one row to the results."""
    parser = argparse.ArgumentParser()
    for name in ("model", "head", "results"):
        parser.add_argument(name)
    parser.add_argument("--label", default="bf16")
    parser.add_argument("--python", default="")
    parser.add_argument("--off", default="")
    parser.add_argument("--options", default="")
    parser.add_argument("--start-lock", default="")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--head-state", default="")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--prompts", type=int, default=6000)
    parser.add_argument("--text", action="append", default=[])
    parser.add_argument("--serve-off", type=float, default=0)
    a = parser.parse_args()
    if a.serve_off:
        with served(a, f"off-{a.label}", []) as server:
            write_atomically(Path(a.results), server.url)
            time.sleep(a.serve_off)
        return
    path = Path(a.results)
    head = Path(a.head)
    if a.head_state:
        head = damaged(head, a.head_state, Path(tempfile.mkdtemp()) / "eagle3")
    speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": DEPTH}
    extra = ["--speculative-config", json.dumps(speculative), "--kv-cache-dtype", a.kv_cache_dtype]
    row: dict[str, Any] = {"started": False}
    try:
        with served(a, f"on-{a.label}", extra) as server:
            row = {
                "started": True,
                "kv": a.kv_cache_dtype,
                "temperature": a.temperature,
                "head": a.head_state or "as trained",
            }
            row |= measure(server.url, server.model, a)
            time.sleep(2.5)
            log = server.log
            report = examine([str(log)], SpecOptions(num_speculative_tokens=DEPTH, model=str(head)))
            row["spec"] = {
                "health": report.results["health"], "findings": [f.id for f in report.findings],
                "head": report.results.get("head"), "start_up": report.results["start_up"],
                "causes": [c for f in report.findings if f.id.startswith("speculation.head_") for c in f.causes][:3],
            }  # fmt: skip
            if a.off:
                off = a.off if a.off.startswith("http") else Path(a.off).read_text()
                held = examine([server.url], SpecOptions(interval=0, lossless=off, samples=24))
                row["lossless"] = held.results["lossless"]
                row["lossless_findings"] = [f.id for f in held.findings]
    except AssayError as error:
        row["error"] = error.message
    finally:
        rows = json.loads(path.read_text()) if path.exists() else {}
        write_atomically(path, json.dumps({**rows, a.label: row}, indent=1) + "\n")
    print(a.label, json.dumps(row)[:1500], file=sys.stderr)


if __name__ == "__main__":
    main()
