"""How long a gate takes on a CPU: a contract of four sections, with Qwen2.5-Coder-0.5B behind vLLM.

    python benchmarks/gate/gate_time.py [RUNS]

The contract: digests of the checkpoint against a manifest, a quick check, the tools suite, and a
comparison of the weights at 8 bits with the model itself on 8 windows of 256 tokens. Digests are
kept from the run that wrote the manifest. Later runs name the first as their baseline. The server
is up before the clock starts; it parses tool calls as Hermes does. The tools part may take 2
minutes: 48 questions, 8 at once, and more if there is time. Writes results/gate_time.json.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import assay
from assay.demo import vllm_server
from assay.demo.models import build_qwen05
from assay.environment import describe

RESULTS = Path(__file__).parent / "results" / "gate_time.json"
CONTRACT = """\
[subject]
name = "Qwen2.5-Coder-0.5B"
server = "{url}"
checkpoint = "{model}"
engine = "hf:{model}?weights=int(bits=8)"

[reference]
engine = "hf:{model}"

[verify]
manifest = "manifest.json"

[check]
quick = true
budget = 1
min_tokens_per_s = 1

[tools]
budget = 2
min_schema_valid = "25%"

[compare]
windows = 8
length = 256
no_floors = true
"""


def row(report: assay.Report, wall: float, load: float) -> dict[str, Any]:
    """The seconds of each part, and what it said."""
    parts = report.to_json()["results"]["parts"]
    return {
        "seconds": round(wall, 1),
        "load_before": load,
        "verdict": report.verdict.value,
        "parts": {
            part["name"]: {
                "seconds": round(part["seconds"], 1),
                "verdict": part["verdict"],
                "says": part["says"],
                "figures": part["figures"],
            }
            for part in parts
        },
        "changes": [
            c
            for c in ((report.results.get("baseline") or {}).get("changes") or ())
            if "same" not in c["direction"]
        ],
    }


def main(runs: int) -> None:
    model = build_qwen05()
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chdir(folder)
        assay.verify(model, write_manifest="manifest.json", allow_unverified=True)
        with vllm_server(
            model,
            name="qwen",
            extra_args=("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        ) as server:
            (folder / "assay.toml").write_text(
                CONTRACT.format(url=server.url, model=model), encoding="utf-8"
            )
            for number in range(runs):
                more = {"baseline": "first.json"} if number else {}
                load, began = os.getloadavg()[0], time.monotonic()
                report = assay.gate("assay.toml", **more)
                found.append(row(report, time.monotonic() - began, load))
                if not number:
                    Path("first.json").write_text(json.dumps(report.to_json()), encoding="utf-8")
                print(json.dumps(found[-1], indent=1), flush=True)
    result = {"model": model.name, "contract": CONTRACT, "runs": found, "environment": describe()}
    RESULTS.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
