"""Where the gap between transformers in float32 and vLLM comes from: SmolLM2-135M with a 4-bit KV
codec.

    python gap_smollm2.py [--codec SPEC] [--windows 8] [--length 256] [--groups 5] [--text FILE]
    python gap_smollm2.py --device cuda --windows 128 --length 1024 --groups 0 --batch 128 --text FILE \
        --engine "kv_cache_gib=5&max_num_batched_tokens=140032&max_num_seqs=128" --minutes 8 --keep

What is scored is kept until the run ends, so an interrupted one goes on where it stopped; with
`--minutes` it interrupts itself before the first measurement that would begin after so long. Writes
the report as JSON and its tables as Markdown after every stage; what a stage that was cut off has
measured already stands in the report of the one before it, under `measured_further`.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from assay.cli.progress import show
from assay.demo.models import build_smollm2
from assay.progress import Progress
from assay.report import markdown
from assay.verdict import Report
from assay_lab.gap.gap import run_gap
from assay_lab.gap.plan import GapPlan
from assay_lab.options import QUICK, SWEEP

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
    parser.add_argument(
        "--engine", default="", help="more options of vLLM, as in vllm:MODEL?option=value&…"
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument(
        "--levels", type=int, default=len(QUICK["sweep"]), help="noise levels, 3 or 5"
    )
    parser.add_argument("--text", type=Path)
    parser.add_argument("--stages", default="2;4;5;3;1", help="phases, one stage after another")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "gap_smollm2.json")
    given = parser.parse_args()
    model = build_smollm2()
    # On a CPU vLLM's cache need not hold more than the windows that run together.
    small = "kv_cache_gib=0.5" if given.device == "cpu" else ""
    options = "".join(f"&{o}" for o in (small, given.engine) if o)
    plan = GapPlan(
        reference=f"hf:{model}?dtype=float32&device={given.device}",
        candidate=f"vllm:{model}?max_model_len={max(given.length, 512)}{options}",
        codec=given.codec,
        text=(str(given.text),) if given.text else (),
        windows=given.windows,
        length=given.length,
        fresh=given.fresh,
        groups=given.groups,
        batch=given.batch,
        sweep=SWEEP if given.levels == len(SWEEP) else QUICK["sweep"],
    )
    began = time.monotonic()
    # One stage more at a time, each written: a run that is cut off leaves the stages before.
    phases: tuple[int, ...] = ()
    shown = until(began + 60 * given.minutes)
    last: Report | None = None
    for more in given.stages.split(";"):
        phases = (*phases, *(int(p) for p in more.split(",")))
        report = run_gap(replace(plan, phases=phases, keep=True), shown)
        if report.interrupted:
            print(f"interrupted in the stage {more}", file=sys.stderr)
            write(last or report, given, str(model), began, report.results["measured"])
            sys.exit(report.exit_code)
        write(report, given, str(model), began)
        last = report
    if not given.keep:
        run_gap(replace(plan, phases=phases), show)


def until(end: float) -> Progress:
    """Progress that says what took how long, and interrupts before anything that would begin after
    `end`.
    """

    @contextmanager
    def shown(what: str, steps: int) -> Iterator[Callable[[], None]]:
        if time.monotonic() > end:
            print(f"out of time before: {what}", file=sys.stderr)
            raise KeyboardInterrupt
        begun = time.monotonic()
        with show(what, steps) as advance:
            yield advance
        print(f"{time.monotonic() - begun:6.1f} s  {what}", file=sys.stderr, flush=True)

    return shown


def write(
    report: Report,
    given: argparse.Namespace,
    model: str,
    began: float,
    further: dict[str, Any] | None = None,
) -> None:
    body = report.to_json()
    if further:
        body["measured_further"] = further
    body["subject"] = {
        "reference": "hf:SmolLM2-135M?dtype=float32",
        "candidate": "vllm:SmolLM2-135M",
        "codec": given.codec,
    }
    children, own = (
        resource.getrusage(resource.RUSAGE_CHILDREN),
        resource.getrusage(resource.RUSAGE_SELF),
    )
    body["seconds"] = {
        "wall": round(time.monotonic() - began),
        "cpu": round(sum(u.ru_utime + u.ru_stime for u in (children, own))),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(
        without_python(json.dumps(body, indent=1, ensure_ascii=False)) + "\n", encoding="utf-8"
    )
    text = without_python(markdown.render(report).replace(model, "SmolLM2-135M"))
    given.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text, flush=True)


def without_python(text: str) -> str:
    """Without the option that names a Python of this machine."""
    return re.sub(r"python=[^&?\s`\\\"]+(\\?&)?", "", text)


if __name__ == "__main__":
    main()
