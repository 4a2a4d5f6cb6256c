"""Candidates that only an engine has: 8-bit KV caches of vLLM and transformers by the decode path,
llama.cpp's formats.

    python benchmarks/compare/compare_engines.py --text WIKI_TEST --windows 64          # all;
    llama.cpp
    where it is built python benchmarks/compare/compare_engines.py --text WIKI_TEST --length 512
    --batch 64
    --only hf python benchmarks/compare/compare_engines.py --text WIKI_TEST --only vllm --caches
    'turboquant_4bit_nc&args={"kv_cache_dtype_skip_layers":[]}' python
    benchmarks/compare/compare_engines.py
    --reports FILE.json …                   # tables of `assay compare --json` reports

Reference and candidate run in the same engine by the same path, so that only the format differs.
Rows of the same text that an earlier run has written stay beside the new ones, so that caches can
be taken one after the other. The F16 reference and the candidates of llama.cpp come from its own
quantiser (`llama_perplexity_agreement.py` makes them).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from assay.cli.progress import show
from assay.demo import vllm_python
from assay.demo.models import build_qwen05, build_qwen15, build_smollm2
from assay.fidelity.compare import run_compare
from assay.fidelity.plan import Plan
from assay.runs import cache_dir
from comparison_table import comparison_table, sizes
from llama_perplexity_agreement import quantise

RESULTS = Path(__file__).parent / "results"
MODELS = {"smollm2": build_smollm2, "qwen05": build_qwen05, "qwen15": build_qwen15}
TYPES = ("Q8_0", "Q5_K_M", "Q4_K_M", "Q2_K")
KEPT = ("grade", "dppl_pct", "kld", "top1_pct", "design_effect", "tokens", "windows", "engine")
FAILED = (
    "fidelity.engine_load",
    "fidelity.engine_failed",
    "fidelity.missing_capability",
    "fidelity.not_engaged",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path)
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--python", help="a Python that has vLLM; demo's own by default")
    parser.add_argument(
        "--engine",
        default="kv_cache_gib=1",
        help="options of vLLM, as in vllm:MODEL?option=value&…",
    )
    parser.add_argument(
        "--caches",
        default="fp8",
        help="values of kv_cache_dtype by comma, with more options: CACHE&option=value",
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--only", choices=[*PLANS])
    parser.add_argument(
        "--dtypes", default="float32,bfloat16", help="number formats of transformers, by comma"
    )
    parser.add_argument("--reports", type=Path, nargs="+", default=[])
    parser.add_argument("--out", type=Path, default=RESULTS / "compare_engines.json")
    arguments = parser.parse_args()
    reports = [json.loads(path.read_text()) for path in arguments.reports]
    if arguments.text:
        chosen = [PLANS[arguments.only]] if arguments.only else PLANS.values()
        reports += [
            run_compare(plan, show).to_json() for plans in chosen for plan in plans(arguments)
        ]
    document: dict[str, Any] = (
        json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    )
    for report in reports:
        results = report["results"]
        engine = results["reference"]["engine"]
        name = f"hf, {results['reference']['dtype']}" if engine == "hf" else engine
        part = {
            "reference": {k: v for k, v in results["reference"].items() if k != "label"},
            "text": results["text"],
            "environment": report["environment"],
            "rows": [
                {k: r[k] for k in KEPT if k in r} for r in results.get("candidates", [results])
            ],
            # Of several candidates those that cannot be run: why.
            "unavailable": [
                without_python(f["title"]) for f in report["findings"] if f["id"] in FAILED
            ],
        }
        document[name] = together(document.get(name), part)
    arguments.out.write_text(
        json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    arguments.out.with_suffix(".md").write_text(table(document), encoding="utf-8")
    print(table(document))


def together(before: dict[str, Any] | None, part: dict[str, Any]) -> dict[str, Any]:
    """A part with what an earlier run wrote, where reference, text and packages are the same: the
    newer row counts.
    """

    def basis(of: dict[str, Any]) -> list[Any]:
        return [of["reference"], of["text"], of["environment"]["packages"]]

    if before is None or basis(before) != basis(part):
        return part
    rows = {name_of(row): row for row in (*before["rows"], *part["rows"])}
    refused = dict.fromkeys((*before["unavailable"], *part["unavailable"]))
    return part | {"rows": list(rows.values()), "unavailable": list(refused)}


def vllm_plans(arguments: argparse.Namespace) -> list[Plan]:
    """vLLM's own caches."""
    python = arguments.python or vllm_python()
    engine = f"vllm:{MODELS[arguments.model]()}?python={python}&max_model_len={arguments.length + 16}&{arguments.engine}"  # noqa: E501
    return [caches_plan(arguments, engine, arguments.caches.split(","))]


def hf_plans(arguments: argparse.Namespace) -> list[Plan]:
    """Caches that hold 8-bit floats in transformers, where nothing else differs; in each number
    format of the model.
    """
    engines = [
        f"hf:{MODELS[arguments.model]()}?dtype={dtype}" for dtype in arguments.dtypes.split(",")
    ]
    return [caches_plan(arguments, engine, ("fp8_e4m3", "fp8_e5m2")) for engine in engines]


def caches_plan(arguments: argparse.Namespace, engine: str, caches: Sequence[str]) -> Plan:
    """The second half of each window, token by token: the cache is read as serving reads it."""
    return Plan(
        engine,
        tuple(f"{engine}&kv_cache_dtype={cache}" for cache in caches),
        text=(str(arguments.text),),
        windows=arguments.windows,
        length=arguments.length,
        path="decode",
        scored="second-half",
        batch=arguments.batch,
        floors=not engine.startswith("hf:"),
    )


def gguf_plans(arguments: argparse.Namespace) -> list[Plan]:
    source, folder = (
        next(cache_dir("gguf").glob("smollm2/*.gguf")),
        cache_dir("gguf") / "smollm2-quantised",
    )
    return [
        Plan(
            f"gguf:{quantise(source, folder, 'F16')}",
            tuple(f"gguf:{quantise(source, folder, kind)}" for kind in TYPES),
            text=(str(arguments.text),),
            windows=arguments.windows,
            length=arguments.length,
        )
    ]


PLANS = {"vllm": vllm_plans, "hf": hf_plans, "gguf": gguf_plans}


def table(document: dict[str, Any]) -> str:
    lines = []
    for engine, part in document.items():
        if not part["rows"]:
            lines += [f"**{engine}**", "", *part["unavailable"], ""]
            continue
        lines += [f"**{engine}**, {part['text']['path']} path, {sizes(part['rows'])}", ""]
        lines += comparison_table((name_of(r), None, r) for r in part["rows"])
        lines += ["", *(f"- not available: {reason}" for reason in part.get("unavailable", ())), ""]
    return "\n".join(lines)


def name_of(row: dict[str, Any]) -> str:
    engine = row["engine"]
    if engine["engine"] == "gguf":
        return str(engine["model"])
    more = engine.get("args") or {}
    every = ", every layer" if more.get("kv_cache_dtype_skip_layers") == [] else ""
    every += ", calculate_kv_scales" * bool(more.get("calculate_kv_scales"))
    return (
        f"KV cache {engine['kv_cache_dtype']}{every}, {engine['kv_bytes_per_token']:,} bytes a"
        " token"
    )


def without_python(text: str) -> str:
    """Without the option that names a Python of this machine."""
    return re.sub(r"python=[^&\s:]*&", "", text)


if __name__ == "__main__":
    main()
