"""`assay check` on real servers of four models, with a sound KV cache and with one of 8 bits.

    python benchmarks/check/check_models.py --model qwen15 [--device cpu|cuda] [--kv auto,fp8]
    [--ways
    alone,reference] [--seeds 0,100] python benchmarks/check/check_models.py --add FOLDER         #
    takes
    the results of other machines into results/ python benchmarks/check/check_models.py --again
    # judges every kept record by the rules as they are now

Each server (vLLM) is checked alone, against the model itself in transformers, and by the suite of
tool calls and JSON schemas at each concurrency. Written to results/check_models.json and .md as it
is measured; other rows are kept. The records of both sides, with whole texts, are kept in
results/check_models_runs.jsonl.xz: benchmarks/grade/detector_roc.py measures stutter on them, and
benchmarks/check/check_decisions.py judges them again.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import lzma
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from assay.coherence.judge import judge
from assay.coherence.record import CheckRecord
from assay.demo import vllm_server
from assay.demo.models import build_gemma3, build_qwen05, build_qwen15, build_smollm2
from assay.environment import describe
from assay.runs import write_atomically
from assay.stats.multiplicity import confidence_of_analysis
from assay.verdict import Verdict

RESULTS = Path(__file__).parent / "results" / "check_models.json"
RUNS = RESULTS.with_name("check_models_runs.jsonl.xz")
MODELS = {
    "qwen15": build_qwen15,
    "qwen05": build_qwen05,
    "smollm2": build_smollm2,
    "gemma3": build_gemma3,
}
WAYS = {
    "alone": (),
    "alone_all": ("all",),
    "reference": ("reference",),
    "tools": ("tools",),
    "tools_reference": ("tools", "reference"),
}
RUN = ("model", "device", "kv_cache_dtype", "way", "seed")
"""What tells runs apart."""
WHOLE_TEXTS = """
import json, sys
from assay.cli.main import main
from assay.coherence import replies, results, run, tools
kept, build_report = sys.argv.pop(1), run.build_report
def build(subject, options, record, reference, *rest):
    both = {"server": record, "reference": reference and reference.record}
    with open(kept, "w", encoding="utf-8") as file:
        json.dump({k: v and results.record_json(v) for k, v in both.items()}, file)
    return build_report(subject, options, record, reference, *rest)
run.build_report = build
replies.HEAD_CHARS = tools._HEAD = 100_000
sys.exit(main())
"""
"""The command line of assay, which keeps its texts whole and writes the records of both sides to
the file named first.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--kv", default="auto,fp8")
    parser.add_argument("--ways", default="alone,reference,tools")
    parser.add_argument(
        "--seeds", default="0", help="of each way but the tools suite, which is greedy"
    )
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--options", default="", help="more options of assay check, separated by spaces"
    )
    parser.add_argument("--server-options", default="", help="more options of vllm serve")
    parser.add_argument("--start-lock", type=Path, help="file to lock while a server starts")
    parser.add_argument(
        "--add",
        type=Path,
        metavar="FOLDER",
        help="take rows and records from the files of a folder",
    )
    parser.add_argument(
        "--again", action="store_true", help="judge the kept records by the rules as they are now"
    )
    given = parser.parse_args()
    if given.again:
        judge_all_again(given.out)
        return
    if given.add:
        add_all(given.add, given.out)
        return
    model = MODELS[given.model]()
    python = Path(sys.executable) if given.device == "cuda" else None
    extra = [
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "hermes",
        *given.server_options.split(),
    ]
    for dtype in given.kv.split(","):
        with contextlib.ExitStack() as stack:
            with locked(given.start_lock):
                server = stack.enter_context(
                    vllm_server(
                        model,
                        name=f"{given.model}-{dtype}",
                        max_model_len=given.max_model_len,
                        python=python,
                        extra_args=[*extra, "--kv-cache-dtype", dtype],
                    )
                )
            print(given.model, dtype, "is served", flush=True)
            for way in given.ways.split(","):
                for seed in map(int, given.seeds.split(",") if "tools" not in way else ["0"]):
                    options = {
                        "tools": [
                            "--suite",
                            "tools",
                            "--all",
                        ],  # every concurrency, also once the verdict is certain
                        "reference": ["--reference-engine", f"hf:{model}"],
                        "all": ["--all"],
                    }
                    asked = [word for name in WAYS[way] for word in options[name]] + [
                        "--seed",
                        str(seed),
                    ]
                    run = dict(zip(RUN, (given.model, given.device, dtype, way, seed), strict=True))
                    found, records = checked(server.url, [*asked, *given.options.split()])
                    add(given.out, run, row_of(found), records)


@contextlib.contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Hold the lock of a file: two servers that measure their memory at once disturb each other."""
    if path is None:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def checked(url: str, options: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """One check: its result with the seconds that it took, and the records of both sides."""
    began = time.perf_counter()
    with (
        tempfile.NamedTemporaryFile("r", encoding="utf-8") as kept,
        tempfile.TemporaryFile("w+") as out,
    ):
        command = [sys.executable, "-c", WHOLE_TEXTS, kept.name, "check", url, "--json", *options]
        subprocess.run(command, stdout=out, check=False)
        out.seek(0)
        report = json.load(out)
        records = json.loads(kept.read() or "{}")
    return {"seconds": round(time.perf_counter() - began, 1), "options": options, **report}, records


def row_of(report: dict[str, Any]) -> dict[str, Any]:
    """What is kept of one result."""
    results = report["results"]
    samples = [s for p in results.get("probes", []) for s in p.get("samples", [])]
    rules = {"stutter": "", **{r["rule"]: r["says"] for r in results.get("rules") or ()}}
    return {
        "verdict": report["verdict"],
        "seconds": report["seconds"],
        "texts": len(samples),
        "degenerate": sum(s["label"] == "degenerate" for s in samples),
        "stutter": rules["stutter"],
        "bits_per_byte": (results.get("bits_per_byte") or {}).get("mean"),
        "looks": (results.get("time") or {}).get("looks"),
        "errors": [f["id"] for f in report["findings"] if f["severity"] == "error"],
        "warnings": [f["id"] for f in report["findings"] if f["severity"] == "warning"],
        "titles": [f["title"] for f in report["findings"] if f["severity"] != "info"][:8],
        "tools": [
            {key: value for key, value in level.items() if key != "answers"}
            for level in results.get("tools") or ()
        ],
        "server": report["subject"].get("server"),
        "options": [word for word in report["options"] if not word.startswith("hf:")],
        "machine": describe(),
    }


def add(out: Path, run: dict[str, Any], row: dict[str, Any], records: dict[str, Any]) -> None:
    """Put one row and its records into the results, in the place of those of an earlier run of the
    same kind.
    """
    document = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"rows": []}
    others = [r for r in document["rows"] if any(r.get(key, 0) != run[key] for key in RUN)]
    document["rows"] = sorted([*others, {**run, **row}], key=_order)
    runs = [
        kept
        for kept in read_runs(out.with_name(RUNS.name))
        if any(kept[key] != run[key] for key in RUN)
    ]
    if records:
        runs.append({**run, **records})
    lines = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in sorted(runs, key=_order))
    write_atomically(out.with_name(RUNS.name), lzma.compress(lines.encode()))
    write_atomically(out, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    out.with_suffix(".md").write_text(table(document["rows"]), encoding="utf-8")
    print(*run.values(), row["verdict"], row["seconds"], "s", row["errors"], flush=True)


def _order(run: dict[str, Any]) -> tuple[Any, ...]:
    return list(MODELS).index(run["model"]), *(run.get(key, 0) for key in RUN[1:])


def read_runs(path: Path = RUNS) -> list[dict[str, Any]]:
    """The kept records of runs, `server` and `reference`, each beside what tells its run apart."""
    if not path.exists():
        return []
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def add_all(folder: Path, out: Path) -> None:
    """Take rows and records from every results file below a folder."""
    for path in sorted(folder.rglob("check_models*.json")):
        runs = {tuple(r[key] for key in RUN): r for r in read_runs(path.with_name(RUNS.name))}
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            run = {key: row.pop(key) for key in RUN}
            kept = runs.get(tuple(run.values()), {})
            add(
                out,
                run,
                row,
                {side: kept[side] for side in ("server", "reference") if side in kept},
            )


def judge_all_again(out: Path) -> None:
    """Write beside every row what the rules of today say of its kept record; rows without one are
    left as they are.
    """
    document = json.loads(out.read_text(encoding="utf-8"))
    kept = {tuple(r[key] for key in RUN): r for r in read_runs(out.with_name(RUNS.name))}
    for row in document["rows"]:
        if found := kept.get(tuple(row[key] for key in RUN)):
            row["again"] = judged_again(found, row.get("looks") or 1)
    write_atomically(out, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    out.with_suffix(".md").write_text(table(document["rows"]), encoding="utf-8")


def judged_again(run: dict[str, Any], look: int) -> dict[str, Any]:
    """Verdict and deciding rules of a kept record; a run that ended early is judged by what it had
    asked until then.
    """
    server, reference = (
        _formed_again(CheckRecord.from_json(run[side])) if run.get(side) else None
        for side in ("server", "reference")
    )
    judgement = judge(server or CheckRecord(), reference, confidence_of_analysis(look))
    deciding = "bad" if judgement.verdict is Verdict.FAIL else "unclear"
    rules = [r.rule for r in judgement.rulings if r.state == deciding]
    return {"verdict": str(judgement.verdict), "rules": rules}


def _formed_again(record: CheckRecord) -> CheckRecord:
    """The form of a call is that of the first answer: older records hold that of the worst one, the
    second call included.
    """
    return replace(
        record,
        probes=tuple(
            replace(
                probe,
                samples=tuple(
                    (
                        replace(s, tool_form="parsed", tool_text="")
                        if s.tool_form == "remains" and s.finish_reason == "tool_calls"
                        else s
                    )
                    for s in probe.samples
                ),
            )
            for probe in record.probes
        ),
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown: runs of a kind together, tools suites by concurrency, then
    every run.
    """
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if "tools" not in row["way"]:
            kinds.setdefault((row["model"], row["device"], _cache(row), row["way"]), []).append(row)
    lines = [
        (
            "| model | on | KV cache | check | runs | verdict | by | degenerate | stutter in 1,000"
            " words | bits per byte | s | judged again |"
        ),
        "|---|---|---|---|---:|---|---|---|---|---|---|---|",
    ]
    for kind, runs in kinds.items():
        verdicts = Counter(r["verdict"] for r in runs)
        by = dict.fromkeys(e.partition(".")[2] for r in runs for e in r["errors"])
        cells = (
            *kind,
            len(runs),
            ", ".join(f"{v} {n}" for v, n in verdicts.most_common()),
            ", ".join(by) or "–",
            f"{sum(r['degenerate'] for r in runs)} / {sum(r['texts'] for r in runs)}",
            _span([_stutter(r) for r in runs], ".1f"),
            _span([r["bits_per_byte"] for r in runs], ".4f"),
            _span([r["seconds"] for r in runs], ".0f"),
            "; ".join(map(_again, runs)),
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    suites = [(r, level) for r in rows for level in r["tools"] or []]
    if suites:
        lines += [
            "",
            (
                "| model | on | KV cache | verdict | concurrency | asked | parsed | schema-valid |"
                " right | of the reference | p |"
            ),
            "|---|---|---|---|---:|---:|---:|---:|---|---:|---:|",
        ]
    for r, t in suites:
        theirs, p = t.get("reference"), t.get("p_value")
        if theirs is None and any(
            o["way"] == "tools_reference" and all(o[k] == r[k] for k in RUN[:3]) for o in rows
        ):
            continue  # the same answers again, held against the reference
        rate = t.get("right_rate")
        right = f"{t['right']}" + (f" [{rate['lo']:.0%}, {rate['hi']:.0%}]" if rate else "")
        cells = (
            r["model"],
            r["device"],
            _cache(r),
            r["verdict"],
            t["concurrency"],
            t["asked"],
            t["parsed"],
            t["schema_valid"],
            right,
            "–" if theirs is None else theirs,
            "–" if p is None else f"{p:.2g}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        (
            "| run | seed | verdict | looks | findings of severity error | degenerate | stutter |"
            " bits per byte | s |"
        ),
        "|---|---:|---|---:|---|---|---|---|---:|",
    ]
    for r in rows:
        cells = (
            f"{r['model']} {r['device']} {_cache(r)} {r['way'].replace('_', ', ')}",
            r["seed"],
            r["verdict"],
            r.get("looks") or "–",
            ", ".join(dict.fromkeys(r["errors"])) or "–",
            f"{r['degenerate']} / {r['texts']}",
            _span([_stutter(r)], ".1f"),
            _span([r["bits_per_byte"]], ".4f"),
            f"{r['seconds']:.0f}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def _stutter(row: dict[str, Any]) -> float | None:
    """Words said twice, of a thousand."""
    told = re.search(r"([\d.]+) in 1,000", row.get("stutter", ""))
    return float(told[1]) if told else None


def _span(values: Sequence[float | None], form: str) -> str:
    """The value, or the smallest and the largest where they differ."""
    known = sorted({format(v, form) for v in values if v is not None}, key=float)
    return " to ".join(dict.fromkeys((known[0], known[-1]))) if known else "–"


def _again(row: dict[str, Any]) -> str:
    """The verdict by the rules of today and what decided it."""
    if not (again := row.get("again")):
        return "no texts kept"
    return again["verdict"] + (f": {', '.join(again['rules'])}" if again["rules"] else "")


def _cache(row: dict[str, Any]) -> str:
    return "bf16" if row["kv_cache_dtype"] == "auto" else str(row["kv_cache_dtype"])


if __name__ == "__main__":
    main()
