"""assay and llama.cpp's own `llama-perplexity --kl-divergence` on the same GGUF pairs and windows.

    bash benchmarks/build/build_llama_cpp.sh && bash benchmarks/build/build_llama_cpp_python.sh
    PYTHONPATH=CACHE/llama-cpp-python python benchmarks/compare/llama_perplexity_agreement.py --text
    WIKI_TEST [--windows 24]

The reference is SmolLM2 in F16, written out by llama.cpp's quantiser from the Q4_1 file; candidates
are its own Q8_0 to Q2_K. Three ways to the same figures: llama-perplexity alone; assay with
llama-perplexity's base file as the reference (`run:FILE`) and llama.cpp in process as the
candidate; assay with llama.cpp in process on both sides (no file, whole vocabulary). Both programs
come from one release of llama.cpp with the same flags.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
from pathlib import Path
from typing import Any

from assay.cli.progress import show
from assay.environment import describe
from assay.fidelity.compare import run_compare
from assay.fidelity.plan import Plan
from assay.runs import cache_dir

RESULTS = Path(__file__).parent / "results"
TYPES = ("Q8_0", "Q5_K_M", "Q4_K_M", "Q2_K")
LENGTH = 512


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--types", nargs="+", default=TYPES)
    parser.add_argument("--out", type=Path, default=RESULTS / "llama_perplexity_agreement.json")
    arguments = parser.parse_args()
    source = next(cache_dir("gguf").glob("smollm2/*.gguf"))
    folder = cache_dir("gguf") / "smollm2-quantised"
    reference = quantise(source, folder, "F16")
    base = folder / f"base-{arguments.windows}.kld"
    if not base.exists():
        part = base.with_suffix(".part")
        chunks = ("--chunks", str(arguments.windows))
        perplexity(reference, "-f", str(arguments.text), *chunks, "--kl-divergence-base", str(part))
        part.rename(base)
    rows = []
    for kind in arguments.types:
        candidate = quantise(source, folder, kind)
        theirs = parse(perplexity(candidate, "--kl-divergence-base", str(base), "--kl-divergence"))
        rows.append({"type": kind, "bytes": candidate.stat().st_size, "llama_perplexity": theirs})
        print(kind, theirs, flush=True)
    from_file = ours(f"run:{base}", folder, arguments)
    in_process = ours(f"gguf:{reference}", folder, arguments, text=(str(arguments.text),))
    for row, one, other in zip(rows, from_file, in_process, strict=True):
        row |= {"assay_base_file": one, "assay_in_process": other}
        row["agrees"] = agrees(row["llama_perplexity"], one)
    document = {
        "reference": reference.name,
        "length": LENGTH,
        "windows": arguments.windows,
        "scored": "second-half",
        "tokens": arguments.windows * (LENGTH - 1 - LENGTH // 2),
        "text": arguments.text.name,
        "environment": describe(),
        "rows": rows,
    }
    arguments.out.write_text(
        json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    arguments.out.with_suffix(".md").write_text(table(document), encoding="utf-8")
    print(table(document))


def quantise(source: Path, folder: Path, kind: str) -> Path:
    """The model in another type, made once."""
    out = folder / f"SmolLM2-135M-Instruct.{kind}.gguf"
    if not out.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = out.with_suffix(".part")
        program = cache_dir("llama.cpp") / "bin" / "llama-quantize"
        command = [str(program), "--allow-requantize", str(source), str(part), kind]
        subprocess.run(command, check=True, capture_output=True)
        part.rename(out)
    return out


def perplexity(model: Path, *arguments: str) -> str:
    program = cache_dir("llama.cpp") / "bin" / "llama-perplexity"
    command = [str(program), "-m", str(model), "-c", str(LENGTH), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return done.stdout + done.stderr


def parse(printed: str) -> dict[str, float]:
    """The means of llama-perplexity's summary."""
    number = r"\s*:?\s*(-?[\d.]+)"
    patterns = {
        "kld": r"Mean\s+KLD" + number,
        "ln_ratio": r"Mean ln\(PPL\(Q\)/PPL\(base\)\)" + number,
        "same_top_pct": r"Same top p:\s*(-?[\d.]+)",
        "median": r"Median\s+KLD" + number,
        "p99": r"99\.0%\s+KLD" + number,
        "max": r"Maximum KLD" + number,
    }
    return {name: float(re.search(pattern, printed)[1]) for name, pattern in patterns.items()}


def ours(
    reference: str, folder: Path, arguments: argparse.Namespace, text: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    candidates = tuple(f"gguf:{quantise(folder, folder, kind)}" for kind in arguments.types)
    plan = Plan(
        reference,
        candidates,
        text=text,
        windows=arguments.windows,
        length=LENGTH,
        scored="second-half",
        batch=4,
        floors=False,
    )
    body = run_compare(plan, show).to_json()["results"]
    return [
        {
            "kld": r["kld"]["mean"],
            "kld_interval": [r["kld"]["lo"], r["kld"]["hi"]],
            "ln_ratio": math.log1p(r["dppl_pct"]["value"] / 100),
            "dppl_pct": r["dppl_pct"],
            "same_top_pct": r["top1_pct"]["value"],
            "top1_pct": r["top1_pct"],
            "median": (
                r["kld"]["median"]["value"]
                if isinstance(r["kld"]["median"], dict)
                else r["kld"]["median"]
            ),
            "max": r["kld"]["max"],
            "grade": r["grade"],
            "tokens": r["tokens"],
        }
        for r in body.get("candidates") or [body]
    ]


def agrees(theirs: dict[str, float], mine: dict[str, Any]) -> dict[str, bool]:
    """The bounds: mean KLD within 2 % or 2e-5, mean log ratio within 2e-4, same top within 0.1
    points.
    """
    apart = abs(theirs["kld"] - mine["kld"])
    return {
        "kld": apart <= max(0.02 * theirs["kld"], 2e-5),
        "ln_ratio": abs(theirs["ln_ratio"] - mine["ln_ratio"]) <= 2e-4,
        "same_top_pct": abs(theirs["same_top_pct"] - mine["same_top_pct"]) <= 0.1,
    }


def table(document: dict[str, Any]) -> str:
    lines = [
        (
            f"{document['windows']} windows of {LENGTH} tokens, second half scored"
            f" ({document['tokens']:,} tokens), {document['text']}; KL in nats, ln = mean log ratio"
            " of perplexities, top = same likeliest token."
        ),
        "",
        (
            "| candidate | MiB | llama-perplexity: KL, ln, top | assay on its base file | assay,"
            " both in process | 95 % of KL |"
        ),
        "|---|---:|---|---|---|---|",
    ]
    for row in document["rows"]:
        cells = [
            f"{r['kld']:.6f}, {r['ln_ratio']:+.6f}, {r['same_top_pct']:.3f} %"
            for r in (row["llama_perplexity"], row["assay_base_file"], row["assay_in_process"])
        ]
        lo, hi = row["assay_in_process"]["kld_interval"]
        lines.append(
            f"| {row['type']} | {row['bytes'] / 2**20:.1f} | {' | '.join(cells)} | {lo:.5f} to"
            f" {hi:.5f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
