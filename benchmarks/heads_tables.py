"""What the rows of `assay heads try` say: what a change of the target costs, how well that is predicted, which head is dead.

    python benchmarks/heads_tables.py NAME=ROWS.json[,MORE.json] ... [--served NAME=SERVED.json]

The tables go into docs/heads.md between its marks. Written to results/heads.json (the rows, and vLLM's own from heads_serve.py) and results/heads_predict.json:

- the fit of `assay.speculation.benefit.BETA` on every second row, and the errors on the others;
- the confusion matrix of `assay spec` on the counts of every row, as vLLM's /metrics would show them. Its thresholds were set
  before there was a head, so no row was fitted. What is true is known by construction.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

from assay.lab.heads.experiment import WORKING
from assay.runs import write_atomically
from assay.speculation.spec import SpecOptions, examine

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "heads.md"
BEGIN, END = "<!-- begin: benchmarks/heads_tables.py -->", "<!-- end: benchmarks/heads_tables.py -->"
BROKEN = 0.5
"""Mean KL from which a target is broken itself, text and all: such rows are shown, and left out of the fit."""


def predicted(positions: list[float], tv: float, beta: float) -> list[float]:
    """As `assay.speculation.benefit.predict`, with a β to be fitted."""
    return [p * max(0.0, 1 - beta * tv) ** (j + 1) for j, p in enumerate(positions)]


def cases(model: str, rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of working heads in bf16 on changed targets, each beside the unchanged target at its temperature."""
    found = []
    for key, row in rows.items():
        target, state, temperature = key.split("|")
        base = rows.get(f"bf16|bf16|{temperature}")
        if state != "bf16" or target == "bf16" or row["kl"][0] > BROKEN or base is None:
            continue
        found.append({
            "row": f"{model}|{key}", "model": model, "tv": row["tv"][0], "kl": row["kl"][0], "flips": row["flips"][0],
            "base": [p["value"] for p in base["positions"]], "seen": [p["value"] for p in row["positions"]],
            "half": (row["positions"][0]["hi"] - row["positions"][0]["lo"]) / 2,
        })  # fmt: skip
    return found


def fit(part: list[dict[str, Any]]) -> float:
    """β with the least squared error over all positions."""

    def loss(beta: float) -> float:
        return float(sum(np.square(np.subtract(predicted(c["base"], c["tv"], beta), c["seen"])).sum() for c in part))

    return float(minimize_scalar(loss, bounds=(0, 3), method="bounded").x)


def errors(part: list[dict[str, Any]], beta: float) -> dict[str, Any]:
    """Errors of position 0 and of the tokens per step."""
    first, length = [], []
    for c in part:
        p = predicted(c["base"], c["tv"], beta)
        first.append(p[0] - c["seen"][0])
        length.append(sum(p) - sum(c["seen"]))
    return {
        "rows": len(part), "position_0": {"max": max(map(abs, first)), "rms": float(np.sqrt(np.mean(np.square(first))))},
        "tokens_per_step": {"max": max(map(abs, length)), "rms": float(np.sqrt(np.mean(np.square(length))))},
        "tv": [min(c["tv"] for c in part), max(c["tv"] for c in part)],
    }  # fmt: skip


def page(row: dict[str, Any]) -> str:
    """The counters of a row as vLLM's /metrics shows them."""
    counts, steps = row["counts"], row["steps"]
    label = 'engine="0",model_name="m"'
    name = "vllm:spec_decode_num"
    lines = [
        f"{name}_drafts_total{{{label}}} {steps}.0",
        f"{name}_draft_tokens_total{{{label}}} {steps * len(counts)}.0",
    ]
    lines += [f"{name}_accepted_tokens_total{{{label}}} {sum(counts)}.0"]
    lines += [f'{name}_accepted_tokens_per_pos_total{{{label},position="{j}"}} {c}.0' for j, c in enumerate(counts)]
    return "".join(f"# TYPE {line.partition('{')[0]} counter\n{line}\n" for line in lines)


def verdict_of(row: dict[str, Any]) -> tuple[str, str]:
    """(health, finding about the head) by `assay spec` from the counts alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.txt"
        path.write_text(page(row))
        report = examine([str(path)], SpecOptions())
    head = next(
        (
            f.id.partition(".")[2]
            for f in report.findings
            if f.id.startswith("speculation.head_") or f.id.endswith("low_acceptance")
        ),
        "none",
    )
    return report.results["health"], head


def percent(i: dict[str, float] | list[float]) -> str:
    """A share with its interval."""
    value, lo, hi = i.values() if isinstance(i, dict) else i
    return f"{100 * value:.1f} % [{100 * max(0, lo):.1f}, {100 * min(1, hi):.1f}]"


def number(i: dict[str, float] | list[float]) -> str:
    """A figure with its interval."""
    value, lo, hi = i.values() if isinstance(i, dict) else i
    return f"{value:.2f} [{lo:.2f}, {hi:.2f}]"


def table(head: list[str], cells: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *cells]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines) + "\n"


def tables(rows: dict[str, Any], served: dict[str, Any], result: dict[str, Any]) -> str:
    """The tables of docs/heads.md."""
    models = list(rows)
    text = "### Changed targets, head as trained\n\n"
    names = list(dict.fromkeys(k.split("|")[0] for own in rows.values() for k in own))
    for t in ("0", "0.7"):
        cells = []
        for name in names:
            got = [own.get(f"{name}|bf16|{t}") for own in rows.values()]
            if any(got):
                cells.append([name, *(
                    f"{percent(r['positions'][0])}; {number(r['tokens_per_step'])}; {100 * (1 - r['tv'][0]):.1f} %; {abs(r['kl'][0]):.4f}"
                    if r else "–" for r in got
                )])  # fmt: skip
        if cells:
            text += f"Temperature {t}; position 0, tokens a step, 1 − TV, KL:\n\n"
            text += table(["target", *models], cells)
    text += "### Heads in fp8, int8 and int4, temperature 0\n\nPosition 0 and tokens a step:\n\n"
    cells = [
        [name, model, *(
            f"{percent(r['positions'][0])}; {number(r['tokens_per_step'])}" if (r := rows[model].get(f"{name}|{h}|0")) else "–"
            for h in WORKING
        )]
        for name in ("bf16", "int4-g128", "int4-g32") for model in models
    ]  # fmt: skip
    text += table(["target", "model", *WORKING], cells)
    text += "### Heads as loaders leave them\n\nPosition 0, first drafts accepted of all steps, and what `assay spec` says from the counts:\n\n"
    cells = []
    for model, own in rows.items():
        for key, row in own.items():
            target, state, t = key.split("|")
            if state not in WORKING and t == "0":
                health, finding = verdict_of(row)
                cells.append([
                    model, target, state, t, percent(row["positions"][0]), f"{row['counts'][0]:,} / {row['steps']:,}", f"{health}, `{finding}`"
                ])  # fmt: skip
    text += table(["model", "target", "head", "T", "position 0", "accepted / steps", "`assay spec`"], cells)
    if served:
        text += "### The same in vLLM 0.25.1\n\nCounts of /metrics, greedy but where the name says otherwise:\n\n"
        cells = []
        for own in served.values():
            for label, row in own.items():
                if not row.get("started"):
                    cells.append([label, f"refused: {row.get('error', '')[-160:]}", "", "", ""])
                    continue
                kinds = row["kinds"]
                each = ", ".join(f"{k} {100 * kinds[k]['positions'][0][0]:.0f} %" for k in kinds if k != "all")
                lossless = row.get("lossless", {}).get("verdict", "–")
                cells.append([
                    label, f"{percent(kinds['all']['positions'][0])} ({each})", number(kinds["all"]["tokens_per_step"]),
                    f"{row['spec']['health']}, {', '.join(f'`{f.partition(chr(46))[2]}`' for f in row['spec']['findings'][:3])}", str(lossless),
                ])  # fmt: skip
        text += table(["row", "position 0", "tokens per step", "`assay spec`", "lossless"], cells)
    fitted, rest = result["fitted"], result["not_fitted"]
    text += (
        "### Prediction\n\n`assay spec --predict` multiplies the acceptance of position j (from 0) by (1 − β · TV)^(j + 1).\n"
        f"β = {result['beta']:.2f}, fitted to {fitted['rows']} rows"
        f"{': the acceptance beside the unchanged target is the best prediction' if result['beta'] < 0.005 else ''}.\n"
        f"On the {rest['rows']} others, with total variations of {100 * rest['tv'][0]:.1f} to {100 * rest['tv'][1]:.1f} %, position 0 is off by "
        f"{100 * rest['position_0']['rms']:.1f} points (rms; at most {100 * rest['position_0']['max']:.1f}), tokens a step by "
        f"{rest['tokens_per_step']['rms']:.2f} (at most {rest['tokens_per_step']['max']:.2f}).\n"
    )
    for name in models if len(models) > 1 else ():
        own = result[f"other_model:{name}"]
        text += (
            f"Fitted to the other model only (β = {own['beta']:.2f}), {name}'s position 0 is off by at most "
            f"{100 * own['position_0']['max']:.1f} points.\n"
        )
    text += "\n### `assay spec` on the counts of all rows\n\n"
    cells = [[c["truth"], c["health"], f"`{c['finding']}`", str(c["rows"])] for c in result["confusion"]]
    text += table(["truth", "health", "finding about the head", "rows"], cells)
    return text


def main(arguments: list[str]) -> None:
    """Read rows, write both results, print the tables."""
    rows: dict[str, dict[str, Any]] = {}
    served: dict[str, Any] = {}
    into = rows
    for argument in arguments:
        if argument == "--served":
            into = served
            continue
        name, _, files = argument.partition("=")
        for file in files.split(","):
            held = json.loads(Path(file).read_text())
            into.setdefault(name, {}).update(held.get("rows", held))
    every = [c for name, own in rows.items() for c in cases(name, own)]
    fitted, rest = every[::2], every[1::2]
    beta = fit(fitted)
    result: dict[str, Any] = {"beta": beta, "fitted": errors(fitted, beta), "not_fitted": errors(rest, beta)}
    for model in rows if len(rows) > 1 else ():
        one = fit([c for c in every if c["model"] != model])
        result[f"other_model:{model}"] = {"beta": one} | errors([c for c in every if c["model"] == model], one)
    kl, tv = np.array([c["kl"] for c in every]), np.array([c["tv"] for c in every])
    result["tv_over_sqrt_half_kl"] = float(np.median(tv[kl > 0] / np.sqrt(kl[kl > 0] / 2)))
    matrix: Counter[tuple[str, str, str]] = Counter()
    wrong = []
    for model, own in rows.items():
        for key, row in own.items():
            _, state, _ = key.split("|")
            truth = "dead head" if state not in WORKING else (
                "working head, broken target" if row["kl"][0] > BROKEN else "working head"
            )  # fmt: skip
            health, head = verdict_of(row)
            matrix[truth, health, head] += 1
            if (truth == "working head" and head in ("head_dead", "head_noise")) or (
                truth == "dead head" and head in ("none", "head_diverged")
            ):
                wrong.append(f"{model}|{key}: {health}, {head}")
    result["confusion"] = [
        {"truth": t, "health": h, "finding": f, "rows": n} for (t, h, f), n in sorted(matrix.items())
    ]
    result["confusion_wrong"] = wrong
    result["cases"] = every
    write_atomically(RESULTS / "heads_predict.json", json.dumps(result, indent=1) + "\n")
    write_atomically(RESULTS / "heads.json", json.dumps({"rows": rows, "served": served}, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "cases"}, indent=1))
    page_text = PAGE.read_text(encoding="utf-8")
    begin, end = page_text.index(BEGIN) + len(BEGIN), page_text.index(END)
    page_text = page_text[:begin] + "\n" + tables(rows, served, result) + page_text[end:]
    write_atomically(PAGE, page_text)


if __name__ == "__main__":
    main(sys.argv[1:])
