"""llama.cpp's own server with drafts in known states: do its log, its `/metrics` and its responses
say the same?

    python benchmarks/spec/spec_llama_cpp.py BIN WORKDIR [CONFIGURATION...]

BIN is the folder that build_llama_cpp.sh made. Each configuration is one server with SmolLM2-135M
(Q4_1), greedy, 4 requests of 96 tokens. Writes results/spec_llama_cpp.json; the logs, pages and
responses stay in WORKDIR.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from assay.demo import llama_server
from assay.demo.models import SMOLLM2, gguf_of
from assay.speculation.combine import combine
from assay.speculation.live import between
from assay.speculation.read import Reading
from assay.speculation.record import Record
from assay.speculation.spec import examine
from assay.speculation.traffic import PROMPTS

RESULTS = Path(__file__).parent / "results" / "spec_llama_cpp.json"
REQUESTS, MAX_TOKENS = 4, 96
# One thread, and weights as they are: threads that spin stall on shared cores, and repacked weights
# need instructions that some virtual machines announce and then forbid.
SHARED = ["--threads", "1", "--no-repack"]
PRUNED = ",".join(str(i) for i in range(12, 28))
# name: (how the draft is made with llama-quantize, the server's arguments); `self` is the target.
CONFIGURATIONS: dict[str, tuple[list[str] | None, list[str]]] = {
    "self": (None, ["--spec-type", "draft-simple"]),
    "q2k": (["--allow-requantize", "Q2_K"], ["--spec-type", "draft-simple"]),
    "pruned": (
        ["--allow-requantize", "--prune-layers", PRUNED, "Q4_1"],
        ["--spec-type", "draft-simple"],
    ),
    "ngram": (
        None,
        [
            "--spec-type",
            "ngram-simple",
            "--spec-ngram-simple-size-n",
            "3",
            "--spec-ngram-simple-size-m",
            "6",
        ],
    ),
    "off": (None, []),
}


def draft(name: str, target: Path, binaries: Path, work: Path) -> Path:
    """The GGUF file of the draft called `name`."""
    made = CONFIGURATIONS[name][0]
    path = work / f"{name}.gguf"
    if made is None:
        return target
    if not path.exists():
        *options, kind = made
        command = [str(binaries / "llama-quantize"), *options, str(target), str(path), kind, "2"]
        subprocess.run(command, check=True, capture_output=True)
    return path


def run(name: str, binaries: Path, work: Path) -> dict[str, Any]:
    """One server: its traffic, and what assay reads from each of the three sources."""
    target = work / "speculating.gguf"  # a name, and so a log, of its own
    if not target.exists():
        target.symlink_to(gguf_of(SMOLLM2))
    arguments = CONFIGURATIONS[name][1]
    if "draft-simple" in arguments:
        arguments = [
            *arguments,
            "-md",
            str(draft(name, target, binaries, work)),
            "--spec-draft-n-max",
            "3",
        ]
    with llama_server(
        target,
        binaries / "llama-server",
        max_model_len=1024,
        streams=1,
        extra_args=[*arguments, *SHARED],
    ) as server:
        with httpx.Client(base_url=server.url, timeout=300) as client:
            before = client.get("/metrics").text
            began = time.monotonic()
            responses = [
                client.post(
                    "/completion",
                    json={
                        "prompt": PROMPTS[i % len(PROMPTS)],
                        "n_predict": MAX_TOKENS,
                        "temperature": 0,
                        "ignore_eos": True,
                        "cache_prompt": False,
                    },
                )
                .raise_for_status()
                .json()
                for i in range(REQUESTS)
            ]
            seconds = time.monotonic() - began
            after = client.get("/metrics").text
        log = server.log
    shutil.copyfile(log, work / f"{name}.log")
    (work / f"{name}.before.prom").write_text(before)
    (work / f"{name}.prom").write_text(after)
    (work / f"{name}.json").write_text(
        json.dumps([{"timings": r["timings"]} for r in responses], indent=1)
    )
    report = examine([str(work / f"{name}.log")])
    reading = Reading()
    reading.document(responses)
    return {
        "health": report.results["health"],
        "findings": [f.id for f in report.findings],
        "rate": report.results["evidence"]["rate"],
        "tokens_per_step": report.results["record"]["tokens_per_step"],
        "counts": {
            "log": {k: report.results["record"][k] for k in ("drafts", "drafted", "accepted")},
            "responses": counts(combine(reading.settled()).record),
            "metrics": counts(between(before, after, seconds).window.record),
        },
        "tokens": sum(r["tokens_predicted"] for r in responses),
        "tokens_per_s": sum(r["tokens_predicted"] for r in responses) / seconds,
    }


def counts(record: Record) -> dict[str, int | None]:
    return {
        "drafts": record.counts.drafts,
        "drafted": record.counts.drafted,
        "accepted": record.counts.accepted,
    }


def main() -> None:
    binaries, work = Path(sys.argv[1]), Path(sys.argv[2])
    work.mkdir(parents=True, exist_ok=True)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in sys.argv[3:] or list(CONFIGURATIONS):
        results[name] = run(name, binaries, work)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(name, results[name], flush=True)


if __name__ == "__main__":
    main()
