"""`assay check` on real servers of Qwen2.5-Coder, with a sound KV cache and with one that breaks its tool calls.

    python benchmarks/check_models.py --model qwen05|qwen15 [--device cpu|cuda] [--levels 1,8] [--kv auto,fp8]

Each server (vLLM) is checked alone, against the model itself in transformers, and by the suite of tool calls and JSON
schemas at each concurrency. Written to results/check_models.json and .md as it is measured; rows of other models are kept.
All texts are kept in full in results/check_models_texts.jsonl.gz, by which benchmarks/detector_roc.py measures stutter.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from assay.demo.models import build_gemma3, build_qwen05, build_qwen15, build_smollm2
from assay.demo.servers import vllm_server
from assay.environment import describe

RESULTS = Path(__file__).parent / "results" / "check_models.json"
TEXTS = RESULTS.with_name("check_models_texts.jsonl.gz")
MODELS = {"qwen05": build_qwen05, "qwen15": build_qwen15, "smollm2": build_smollm2, "gemma3": build_gemma3}
WHOLE_TEXTS = """
import sys
from assay.cli.main import main
from assay.coherence import measure, tools
measure.HEAD_CHARS = tools._HEAD = 100_000
sys.exit(main())
"""
"""The command line of assay, which keeps its texts whole."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--kv", default="auto,fp8")
    parser.add_argument("--ways", default="alone,reference,tools")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--options", default="", help="more options of assay check, separated by spaces")
    given = parser.parse_args()
    model = MODELS[given.model]()
    python = Path(sys.executable) if given.device == "cuda" else None
    extra = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    if given.device == "cuda":
        extra += ["--gpu-memory-utilization", "0.5"]
    for dtype in given.kv.split(","):
        with vllm_server(
            model, name=given.model, max_model_len=given.max_model_len, python=python,
            extra_args=[*extra, "--kv-cache-dtype", dtype],
        ) as server:  # fmt: skip
            for way in given.ways.split(","):
                options = {
                    "alone": [],
                    "reference": ["--reference-engine", f"hf:{model}"],
                    "tools": ["--suite", "tools"],
                }[way]
                add(given, dtype, way, checked(server.url, [*options, *given.options.split()]))


def checked(url: str, options: list[str]) -> dict[str, Any]:
    """The result of one check, and how long it took."""
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        command = [sys.executable, "-c", WHOLE_TEXTS, "check", url, "--json", *options]
        subprocess.run(command, stdout=out, check=False)
        out.seek(0)
        report = json.load(out)
    return {"seconds": round(time.perf_counter() - began, 1), "options": options, "report": report}


def add(given: argparse.Namespace, dtype: str, way: str, found: dict[str, Any]) -> None:
    """Put one row into the results; what it says of the machine stands beside it."""
    document = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {"rows": []}
    report = found["report"]
    probes = report["results"].get("probes", [])
    samples = [s for p in probes for s in p.get("samples", [])]
    row = {
        "model": given.model,
        "device": given.device,
        "kv_cache_dtype": dtype,
        "way": way,
        "verdict": report["verdict"],
        "seconds": found["seconds"],
        "texts": len(samples),
        "degenerate": sum(s["label"] == "degenerate" for s in samples),
        "bits_per_byte": (report["results"].get("bits_per_byte") or {}).get("mean"),
        "errors": [f["id"] for f in report["findings"] if f["severity"] == "error"],
        "warnings": [f["id"] for f in report["findings"] if f["severity"] == "warning"],
        "titles": [f["title"] for f in report["findings"] if f["severity"] != "info"][:8],
        "tools": [
            {key: value for key, value in level.items() if key != "answers"}
            for level in report["results"].get("tools") or ()
        ],
        "server": report["subject"].get("server"),
    }
    same = ("model", "device", "kv_cache_dtype", "way")
    document["rows"] = [r for r in document["rows"] if any(r[k] != row[k] for k in same)] + [row]
    document.setdefault("machines", {})[given.device] = describe()
    keep_texts(given.out.with_name(TEXTS.name), {key: row[key] for key in same}, report["results"])
    given.out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    given.out.with_suffix(".md").write_text(table(document["rows"]), encoding="utf-8")
    print(row["kv_cache_dtype"], way, row["verdict"], row["seconds"], "s", row["errors"], flush=True)


def keep_texts(path: Path, run: dict[str, str], results: dict[str, Any]) -> None:
    """Put the texts of one run into a file of texts, in place of those of an earlier run of the same kind."""
    kept = []
    if path.exists():
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            kept = [line for line in map(json.loads, lines) if any(line[key] != run[key] for key in run)]
    fields = ("label", "kind", "finish_reason", "temperature", "seed", "tool_form")
    for probe in results.get("probes", ()):
        for sample in probe.get("samples", ()):
            kept.append({**run, "probe": probe["name"], **{key: sample.get(key) for key in fields}})
            kept[-1]["text"] = sample["text_head"]
    for text in (results.get("throughput") or {}).get("texts") or ():
        kept.append(
            {**run, "probe": "speed", "label": text["label"], "temperature": 0.0, "text": text["text_head"]}
        )
    for level in results.get("tools") or ():
        for answer in level.get("answers", ()):
            kept.append({**run, "probe": f"tools at {level['concurrency']}", **answer})
    path.write_bytes(
        gzip.compress("".join(json.dumps(k, ensure_ascii=False) + "\n" for k in kept).encode(), mtime=0)
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| model | device | KV cache | check | verdict | findings of severity error | degenerate | bits per byte | s |",
        "|---|---|---|---|---|---|---|---|---:|",
    ]
    for r in rows:
        bits = "–" if r["bits_per_byte"] is None else f"{r['bits_per_byte']:.4f}"
        lines.append(
            f"| {r['model']} | {r['device']} | {r['kv_cache_dtype']} | {r['way']} | {r['verdict']} | "
            f"{', '.join(dict.fromkeys(r['errors'])) or '–'} | {r['degenerate']} / {r['texts']} | {bits} | {r['seconds']:.0f} |"
        )
    suites = [(r, level) for r in rows for level in r["tools"] or []]
    if suites:
        lines += [
            "",
            "| model | device | KV cache | concurrency | asked | parsed | schema-valid | right |",
            "|---|---|---|---:|---:|---:|---:|---:|",
        ]
        lines += [
            f"| {r['model']} | {r['device']} | {r['kv_cache_dtype']} | {t['concurrency']} | {t['asked']} | {t['parsed']} | "
            f"{t['schema_valid']} | {t['right']} |"
            for r, t in suites
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
