"""Where the gap between transformers and llama.cpp comes from, without any codec: Qwen2.5-Coder-0.5B from one GGUF file.

    python benchmarks/gap_llama_cpp.py [--windows 8] [--length 128] [--model qwen05|smollm2] [--out FILE]

The checkpoint was made of that file, so that both sides hold the same weights but for their rounding to bf16; what differs
is arithmetic: transformers computes in float32, llama.cpp multiplies its 4-bit blocks with activations of 8 bits.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from assay.cli.progress import show
from assay.demo import models
from assay.lab.gap.gap import run_gap
from assay.lab.gap.plan import GapPlan

MODELS = {"qwen05": models.QWEN05, "smollm2": models.SMOLLM2}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--fresh", type=int, default=0)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--model", choices=MODELS, default="qwen05")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    out = given.out or Path(__file__).parent / "results" / f"gap_llama_cpp_{given.model}.json"
    model = MODELS[given.model]
    folder, file = models.build(model), models.gguf_of(model)
    began = time.perf_counter()
    plan = GapPlan(
        f"hf:{folder}?dtype=float32",
        f"gguf:{file}",
        windows=given.windows,
        fresh=given.fresh,
        length=given.length,
        phases=(1,),
        batch=4,
    )
    report = run_gap(plan, show)
    body = report.to_json()
    body["seconds"] = round(time.perf_counter() - began, 1)
    body["subject"] = {"model": model.title, "plan": {"windows": given.windows, "length": given.length}}
    out.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    keep = ("total", "buckets", "floors", "repeatability", "checks", "causes")
    print(json.dumps({k: body["results"].get(k) for k in keep}, indent=1))


if __name__ == "__main__":
    main()
