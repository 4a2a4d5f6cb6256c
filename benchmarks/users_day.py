"""A serving engineer's day with Qwen2.5-Coder-0.5B on a CPU: every verb as it is typed, its time and its verdict.

    python benchmarks/users_day.py [VERB ...] [--out FILE]

Verbs are compare, kv-eval, gap, verify, and server (starts vLLM's CPU build, then check --quick and spec URL). Each is a process
of its own with an empty cache, and adds its rows to the results file, which keeps the machine's load of that time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from assay.demo.models import build_qwen05
from assay.environment import describe

RESULTS = Path(__file__).parent / "results"


def run(name: str, *arguments: str, limit: float = 840) -> dict[str, Any]:
    """One command: its time, its exit code, its verdict, and what it said of its time."""
    command = [sys.executable, "-m", "assay", *arguments, "--json"]
    began, load = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as cache:
        settings = {**os.environ, "ASSAY_CACHE": cache, "OMP_WAIT_POLICY": "PASSIVE"}
        process = subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, stderr=sys.stderr)
        try:
            out, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.send_signal(2)  # as Ctrl-C does: what was measured is still printed
            out, _ = process.communicate(timeout=60)
    body = json.loads(out)
    results = body["results"]
    row = {
        "job": name,
        "seconds": round(time.monotonic() - began, 1),
        "exit_code": body["exit_code"],
        "verdict": body["verdict"],
        "findings": [f["title"] for f in body["findings"]],
        "times": results.get("times"),
        "load": round(load, 1),
        "load_after": round(os.getloadavg()[0], 1),
    }
    row |= {k: results[k] for k in ("grade", "windows", "dppl_pct", "health") if k in results}
    if "kld" in results:
        row["kld"] = {k: results["kld"][k] for k in ("mean", "lo", "hi")}
    return row


def server(model: str) -> list[dict[str, Any]]:
    """Start vLLM with n-gram speculation; check it, then judge its speculation."""
    from assay.demo.servers import vllm_server

    speculation = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4})
    began = time.monotonic()
    with vllm_server(Path(model), name="qwen", extra_args=("--speculative-config", speculation)) as running:
        starting = {
            "job": "start vLLM",
            "seconds": round(time.monotonic() - began, 1),
            "load": os.getloadavg()[0],
        }
        return [
            starting,
            run("check --quick", "check", running.url, "--quick"),
            run("spec URL", "spec", running.url),
        ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("verbs", nargs="*", default=["compare", "kv-eval", "gap", "verify", "server"])
    parser.add_argument("--out", type=Path, default=RESULTS / "users_day.json")
    arguments = parser.parse_args()
    model = str(build_qwen05())
    int8 = f"hf:{model}?weights=int(bits=8)"
    jobs = {
        "compare": lambda: [run("compare --quick", "compare", f"hf:{model}", int8, "--quick")],
        "kv-eval": lambda: [run("kv eval --quick", "kv", "eval", model, "--codec", "fp8", "--quick")],
        "gap": lambda: [run("gap --quick", "gap", f"hf:{model}", int8, "--codec", "fp8", "--quick")],
        "verify": lambda: [run("verify", "verify", model)],
        "server": lambda: server(model),
    }
    for verb in arguments.verbs:
        rows = jobs[verb]()
        known = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"rows": []}
        names = {row["job"] for row in rows}
        known["rows"] = [row for row in known["rows"] if row["job"] not in names] + rows
        known |= {
            "model": "Qwen2.5-Coder-0.5B-Instruct",
            "cpus": os.cpu_count(),
            "environment": describe(),
        }
        arguments.out.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
        for row in rows:
            print(json.dumps({k: row.get(k) for k in ("job", "seconds", "exit_code", "verdict", "load")}))


if __name__ == "__main__":
    main()
