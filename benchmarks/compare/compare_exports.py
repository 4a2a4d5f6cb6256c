"""Checkpoints of SmolLM2-135M that real quantisers saved, against the bf16 model: bytes, Δppl, KL
and top-1.

    python benchmarks/verify/quantised_checkpoints.py                       # makes the checkpoints
    and their environments CACHE/quantisers/round/bin/python -m pip install .               # assay
    beside torchao, hqq and bitsandbytes CACHE/quantisers/round/bin/python
    benchmarks/compare/compare_exports.py --text WIKI_TEST CACHE/quantisers/compressor/bin/python -m
    pip install . && CACHE/quantisers/compressor/bin/python …   # llm-compressor

Everything was rounded to nearest without calibration data, so these rows say what the formats cost
on this small model, not what their libraries can do. Each is loaded by transformers as it is; one
that this Python cannot load is a row that says why. The results of two environments go into one
file.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from assay.cli.progress import show
from assay.demo.models import build_smollm2
from assay.environment import describe
from assay.errors import AssayError
from assay.fidelity.compare import run_compare
from assay.fidelity.keep_reference import keep_reference
from assay.fidelity.plan import Plan
from assay.runs import cache_dir
from comparison_table import comparison_table, sizes

RESULTS = Path(__file__).parent / "results"
KEPT = ("grade", "grade_point", "dppl_pct", "kld", "top1_pct", "design_effect", "tokens", "windows")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--only", nargs="*", help="names of exports")
    parser.add_argument("--out", type=Path, default=RESULTS / "compare_exports.json")
    arguments = parser.parse_args()
    reference = f"hf:{build_smollm2()}?dtype=bfloat16"
    plan = Plan(
        reference,
        (reference,),
        text=(str(arguments.text),),
        windows=arguments.windows,
        length=arguments.length,
        floors=False,
    )
    stored = (
        cache_dir("compare-exports")
        / f"{version('transformers')}-{arguments.text.stem}-{arguments.windows}x{arguments.length}"
    )
    keep_reference(plan, stored, dtype="engine", form="assay", progress=show)
    document: dict[str, Any] = (
        json.loads(arguments.out.read_text()) if arguments.out.exists() else {"rows": {}}
    )
    for folder in sorted((cache_dir("quantisers") / "exports").iterdir()):
        if arguments.only and folder.name not in arguments.only:
            continue
        if "kld" in document["rows"].get(folder.name, {}):
            continue
        document["rows"][folder.name] = row(stored, folder, arguments)
        document |= {
            "text": arguments.text.name,
            "length": arguments.length,
            "environment": describe(),
        }
        arguments.out.write_text(
            json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        arguments.out.with_suffix(".md").write_text(table(document), encoding="utf-8")
    print(table(document))


def row(stored: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    plan = Plan(
        f"run:{stored}",
        (f"hf:{folder}",),
        windows=arguments.windows,
        length=arguments.length,
        floors=False,
    )
    try:
        found = run_compare(plan, show).to_json()["results"]
    except AssayError as error:
        return {"bytes": size, "reason": str(error).splitlines()[0]}
    return {"bytes": size, **{name: found[name] for name in KEPT}}


def table(document: dict[str, Any]) -> str:
    measured = {n: r for n, r in document["rows"].items() if "kld" in r}
    others = {n: r for n, r in document["rows"].items() if "kld" not in r}
    ordered = sorted(measured.items(), key=lambda item: item[1]["kld"]["mean"])
    lines = [sizes(measured.values()), ""]
    lines += comparison_table(((name, r["bytes"], r) for name, r in ordered), "checkpoint")
    lines += ["", *(f"- {name}: {r['reason']}" for name, r in others.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
