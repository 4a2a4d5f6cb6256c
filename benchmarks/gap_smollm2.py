"""Where the gap between transformers in float32 and vLLM comes from: SmolLM2-135M with a 4-bit KV codec.

    python benchmarks/gap_smollm2.py [--codec SPEC] [--windows 8] [--length 256] [--groups 5] [--device cpu] [--text FILE]

What is scored is kept until the run ends, so an interrupted one goes on where it stopped. Writes the report as JSON and its
tables as Markdown after every stage.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

from assay.cli.progress import show
from assay.demo.models import build_smollm2
from assay.gap.plan import QUICK, GapPlan
from assay.gap.run import run_gap
from assay.report import markdown
from assay.verdict import Report

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codec", default="hadamard(bits=4)")
    parser.add_argument("--windows", type=int, default=QUICK["windows"])
    parser.add_argument("--fresh", type=int, default=QUICK["fresh"])
    parser.add_argument("--length", type=int, default=QUICK["length"])
    parser.add_argument("--groups", type=int, default=QUICK["groups"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--stages", default="2;4;5;3;1", help="phases, one stage after another")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "gap_smollm2.json")
    given = parser.parse_args()
    model = build_smollm2()
    # On a CPU vLLM's cache need not hold more than the windows that run together.
    small = "&kv_cache_gib=0.5" if given.device == "cpu" else ""
    plan = GapPlan(
        reference=f"hf:{model}?dtype=float32&device={given.device}",
        candidate=f"vllm:{model}?max_model_len={max(given.length, 512)}{small}",
        codec=given.codec,
        text=(str(given.text),) if given.text else (),
        windows=given.windows,
        length=given.length,
        fresh=given.fresh,
        groups=given.groups,
        sweep=QUICK["sweep"],
    )
    began = time.monotonic()
    # One stage more at a time, each written: a run that is cut off leaves the stages before.
    phases: tuple[int, ...] = ()
    for more in given.stages.split(";"):
        phases = (*phases, *(int(p) for p in more.split(",")))
        report = run_gap(replace(plan, phases=phases), show, keep=True)
        if report.interrupted:
            sys.exit(report.exit_code)
        write(report, given, str(model), began)
    if not given.keep:
        run_gap(replace(plan, phases=phases), show)


def write(report: Report, given: argparse.Namespace, model: str, began: float) -> None:
    body = report.to_json()
    body["subject"] = {
        "reference": "hf:SmolLM2-135M?dtype=float32",
        "candidate": "vllm:SmolLM2-135M",
        "codec": given.codec,
    }
    children, own = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
    body["seconds"] = {
        "wall": round(time.monotonic() - began),
        "cpu": round(sum(u.ru_utime + u.ru_stime for u in (children, own))),
    }
    given.out.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    text = markdown.render(report).replace(model, "SmolLM2-135M")
    given.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text, flush=True)


if __name__ == "__main__":
    main()
