"""What the rows of `assay heads try` and of vLLM say: what a change of the target costs, how well
that is predicted, which head is dead.

    python heads_tables.py NAME=ROWS.json[,MORE.json] ... [--served
    NAME=SERVED.json[,MORE.json] ...] [--keep]

The tables go into lab/docs/heads.md between its marks. Written to results/heads.json (the rows, and
vLLM's own from heads_serve.py; with
--keep those that it has stay) and results/heads_predict.json:

- the fit of `assay.speculation.benefit.BETA` on the simulated rows of the first model, and the
  errors on the simulated rows of the
  others and on all that vLLM served;
- the confusion matrix of `assay spec` on the counts of every row, as vLLM's /metrics would show
  them, without and with the
  temperature of the traffic. What is true is known by construction. The thresholds were set before
  there was a head, but for
  what sampling takes away (`assay.speculation.health.SAMPLED_LOSS`), which is of the first model's
  unchanged target.
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

from assay.runs import write_atomically
from assay.speculation.options import SpecOptions
from assay.speculation.spec import examine
from assay_lab.heads.head_states import WORKING

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[2] / "docs" / "heads.md"
BEGIN, END = (
    "<!-- begin: lab/benchmarks/heads/heads_tables.py -->",
    "<!-- end: lab/benchmarks/heads/heads_tables.py -->",
)
ANSWER = "<!-- begin: the answer -->", "<!-- end: the answer -->"
ROWS = {
    "target and head bf16": "bf16|bf16",
    "target INT8": "int8|bf16",
    "target fp8": "fp8|bf16",
    "KV cache fp8": "bf16+kv-fp8|bf16",
    "KV cache fp8, calibrated": "bf16+kv-fp8-calibrated|bf16",
    "target INT4, groups of 32": "int4-g32|bf16",
    "target INT4, groups of 128": "int4-g128|bf16",
    "target INT4, symmetric, groups of 128": "w4a16-g128|bf16",
    "target INT4 by GPTQ, groups of 128": "gptq4-g128|bf16",
    "head INT4": "bf16|int4",
    "target and head INT4": "int4-g128|int4",
    "target INT3 by GPTQ": "gptq3-g128|bf16",
    "target INT2 (its text is broken too)": "int2-g32|bf16",
    "head loaded with norms of the wrong convention": "bf16|wrong-norm",
    "head with another embedding": "bf16|embedding-swapped",
    "head without its layer": "bf16|missing-layer",
    "head whose scales were ignored": "bf16|scales-ignored",
    "head missing": "bf16|missing",
    "head loaded as zeros": "bf16|zeros",
}
"""The rows of the table at the top of the page."""
BROKEN = 0.5
"""Mean KL from which a target is broken itself, text and all: such rows are shown, and left out of
the fit.
"""


def predicted(positions: list[float], tv: float, beta: float) -> list[float]:
    """As `assay.speculation.benefit.predict`, with a β to be fitted."""
    return [p * max(0.0, 1 - beta * tv) ** (j + 1) for j, p in enumerate(positions)]


def cases(
    model: str, rows: dict[str, Any], simulated: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Rows of working heads in bf16 on changed targets, each beside the unchanged target at its
    temperature.

    Of a served row the distance of its target is that of the simulated one of its name.
    """
    found = []
    for key, row in rows.items():
        target, state, temperature = key.split("|")
        base, far = rows.get(f"bf16|bf16|{temperature}"), (simulated or rows).get(key)
        if (
            state != "bf16"
            or target == "bf16"
            or base is None
            or far is None
            or far["kl"][0] > BROKEN
            or "positions" not in row
        ):
            continue
        found.append(
            {
                "row": f"{model}|{key}",
                "model": model,
                "tv": far["tv"][0],
                "kl": far["kl"][0],
                "flips": far["flips"][0],
                "base": [p["value"] for p in base["positions"]],
                "seen": [p["value"] for p in row["positions"]],
                "half": (row["positions"][0]["hi"] - row["positions"][0]["lo"]) / 2,
            }
        )
    return found


def fit(part: list[dict[str, Any]]) -> float:
    """β with the least squared error over all positions."""

    def loss(beta: float) -> float:
        return float(
            sum(
                np.square(np.subtract(predicted(c["base"], c["tv"], beta), c["seen"])).sum()
                for c in part
            )
        )

    return float(minimize_scalar(loss, bounds=(0, 3), method="bounded").x)


def errors(part: list[dict[str, Any]], beta: float) -> dict[str, Any]:
    """Errors of position 0 and of the tokens per step."""
    first, length = [], []
    for c in part:
        p = predicted(c["base"], c["tv"], beta)
        first.append(p[0] - c["seen"][0])
        length.append(sum(p) - sum(c["seen"]))
    return {
        "rows": len(part),
        "position_0": {
            "max": max(map(abs, first)),
            "rms": float(np.sqrt(np.mean(np.square(first)))),
        },
        "tokens_per_step": {
            "max": max(map(abs, length)),
            "rms": float(np.sqrt(np.mean(np.square(length)))),
        },
        "tv": [min(c["tv"] for c in part), max(c["tv"] for c in part)],
    }


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
    lines += [
        f'{name}_accepted_tokens_per_pos_total{{{label},position="{j}"}} {c}.0'
        for j, c in enumerate(counts)
    ]
    return "".join(f"# TYPE {line.partition('{')[0]} counter\n{line}\n" for line in lines)


def verdict_of(row: dict[str, Any], temperature: float | None = None) -> tuple[str, str]:
    """(health, finding about the head) by `assay spec` from the counts, and the temperature where
    it is given.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.txt"
        path.write_text(page(row))
        report = examine([str(path)], SpecOptions(temperature=temperature))
    head = next(
        (
            f.id.partition(".")[2]
            for f in report.findings
            if f.id.startswith("speculation.head_") or f.id.endswith("low_acceptance")
        ),
        "none",
    )
    works = any(f.title.startswith("the head works") for f in report.findings)
    return report.results["health"], f"{head}, works" if works else head


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
    """The tables of lab/docs/heads.md."""
    models = list(rows)
    text = "### Changed targets, head as trained\n\n"
    names = list(dict.fromkeys(k.split("|")[0] for own in rows.values() for k in own))
    for t in ("0", "0.7"):
        cells = []
        for name in names:
            got = [own.get(f"{name}|bf16|{t}") for own in rows.values()]
            if any(got):
                cells.append(
                    [
                        name,
                        *(
                            (
                                f"{percent(r['positions'][0])}; {number(r['tokens_per_step'])};"
                                f" {100 * (1 - r['tv'][0]):.1f} %; {abs(r['kl'][0]):.4f}"
                                if r
                                else "–"
                            )
                            for r in got
                        ),
                    ]
                )
        if cells:
            text += f"Temperature {t}; position 0, tokens a step, 1 − TV, KL:\n\n"
            text += table(["target", *models], cells)
    text += "### Heads in fp8, int8 and int4, temperature 0\n\nPosition 0 and tokens a step:\n\n"
    cells = [
        [
            name,
            model,
            *(
                (
                    f"{percent(r['positions'][0])}; {number(r['tokens_per_step'])}"
                    if (r := rows[model].get(f"{name}|{h}|0"))
                    else "–"
                )
                for h in WORKING
            ),
        ]
        for name in ("bf16", "int4-g128", "int4-g32")
        for model in models
    ]
    text += table(["target", "model", *WORKING], cells)
    text += (
        "### Heads as loaders leave them\n\nPosition 0, first drafts accepted of all steps, and"
        " what `assay spec` says from the counts:\n\n"
    )
    cells = []
    for model, own in rows.items():
        for key, row in own.items():
            target, state, t = key.split("|")
            if state not in WORKING and t == "0":
                health, finding = verdict_of(row)
                cells.append(
                    [
                        model,
                        target,
                        state,
                        t,
                        percent(row["positions"][0]),
                        f"{row['counts'][0]:,} / {row['steps']:,}",
                        f"{health}, `{finding}`",
                    ]
                )
    text += table(
        ["model", "target", "head", "T", "position 0", "accepted / steps", "`assay spec`"], cells
    )
    for model, own in served.items():
        text += (
            f"### {model} served by vLLM {own['engine']['vllm']} on {own['engine']['device']}\n\n"
        )
        text += (
            "Position 0 (chat, code, prose); tokens a step; what `assay spec` says from log, head's"
            " file and temperature; its test of losslessness:\n\n"
        )
        pairs = dict.fromkeys(tuple(key.split("|")[:2]) for key in own["rows"])
        cells = []
        for target, state in pairs:
            cold, warm = (own["rows"].get(f"{target}|{state}|{t}", {}) for t in ("0", "0.7"))
            cells.append(
                [
                    target,
                    state,
                    served_cell(cold, kinds=True),
                    served_cell(warm),
                    said(cold),
                    said(warm),
                    lossless(cold.get("lossless")),
                ]
            )
        text += table(
            ["target", "head", "T 0", "T 0.7", "`assay spec`", "at T 0.7", "lossless"], cells
        )
        for name, why in own["failed"].items():
            target, _, state = name.removeprefix("speed ").partition("|")
            if f"{target}|{state or 'bf16'}|0" in own["rows"]:
                continue
            said_so = (
                "the run ended first"
                if why.startswith("the process ended")
                else " ".join(why.split())[:200]
            )
            text += f"`{name}` was not measured: {said_so}.\n"
        if own["speed"]:
            text += (
                "\nTokens a second without and with the head, greedy; the quotient is the geometric"
                " mean by prompt, or by batch:\n\n"
            )
            cells = [
                [
                    target,
                    f"{batch} at once",
                    f"{r['off']:.0f}",
                    f"{r['on']:.0f}",
                    number(r["quotient"]),
                ]
                for target, sizes in own["speed"].items()
                for batch, r in sizes.items()
                if batch.isdigit()
            ]
            text += table(["target", "requests", "without", "with the head", "quotient"], cells)
    fitted = result["fitted"]
    text += (
        "### Prediction\n\n`assay spec --predict` multiplies the acceptance of position j (from 0)"
        f" by (1 − β · TV)^(j + 1).\nβ = {result['beta']:.2f}, fitted to the {fitted['rows']}"
        " simulated rows of"
        f" {models[0]}{': the acceptance beside the unchanged target is the best prediction' if result['beta'] < 0.005 else ''}.\nErrors"  # noqa: E501
        " on rows that were not fitted:\n\n"
    )
    cells = [
        [
            name,
            str(e["rows"]),
            f"{100 * e['tv'][0]:.1f} to {100 * e['tv'][1]:.1f} %",
            (
                f"{100 * e['position_0']['rms']:.1f} points, at most"
                f" {100 * e['position_0']['max']:.1f}"
            ),
            f"{e['tokens_per_step']['rms']:.2f}, at most {e['tokens_per_step']['max']:.2f}",
        ]
        for name, e in (("(fitted)", fitted), *result["not_fitted"].items())
    ]
    text += table(
        ["rows", "number", "total variation", "position 0, rms", "tokens per step, rms"], cells
    )
    text += (
        "### `assay spec` on the counts of all rows\n\nSimulated and served; *told* is with"
        " `--temperature`:\n\n"
    )
    cells = [
        [c["truth"], c["T"], c["told"], c["health"], f"`{c['finding']}`", str(c["rows"])]
        for c in result["confusion"]
    ]
    text += table(["truth", "T", "told", "health", "finding about the head", "rows"], cells)
    return text


def answer(rows: dict[str, Any], served: dict[str, Any]) -> str:
    """The table at the top of the page: greedy, as vLLM served it, or simulated where it did
    not.
    """
    cells = []
    for label, key in ROWS.items():
        line = [label]
        for model in (m for m in rows if "MTP" not in m):
            own, sim = (
                x.get(f"{key}|0", {}) for x in (served.get(model, {}).get("rows", {}), rows[model])
            )
            row, mark = (own, "") if "positions" in own else (sim, " *")
            line.append(
                f"{percent(row['positions'][0])}; {row['tokens_per_step']['value']:.2f}{mark}"
                if "positions" in row
                else "–"
            )
            far = rows[model].get(f"{key.split('|')[0]}|bf16|0")
            line.append(f"{abs(far['kl'][0]):.2g}" if far else "–")
        cells.append(line)
    head = ["greedy, k = 4"]
    for model in (m for m in rows if "MTP" not in m):
        head += [f"{model}: position 0 [95 %, by prompt]; tokens per step", "KL of the target"]
    return table(head, cells)


def served_cell(row: dict[str, Any], kinds: bool = False) -> str:
    """Position 0 and tokens a step of a served row."""
    if "positions" not in row:
        return "–"
    by = [
        f"{100 * row['kinds'][k]['positions'][0]['value']:.0f}"
        for k in ("chat", "code", "prose")
        if k in row["kinds"]
    ]
    each = f" ({', '.join(by)})" if kinds else ""
    return f"{percent(row['positions'][0])}{each}; {number(row['tokens_per_step'])}"


def said(row: dict[str, Any]) -> str:
    """The health, and what `assay spec` finds about the head."""
    if "spec" not in row:
        return "–"
    heads = [
        f.partition(".")[2]
        for f in row["spec"]["findings"]
        if f.startswith(("speculation.head_", "speculation.low_", "checkpoint."))
    ]
    return ", ".join([row["spec"]["health"], *(f"`{f}`" for f in heads if f != "head_file")][:2])


def lossless(found: dict[str, Any] | None) -> str:
    """The test of `assay spec --lossless` in a few words."""
    if not found:
        return "–"
    return (
        f"{found['verdict']}: {found['identical']} of {found['prompts']} the same, {found['ties']}"
        f" part at ties, {found['real']} else; p = {found['sampled_p_value']:.2f}"
    )


def confusion(
    sources: dict[str, dict[str, Any]], far: dict[str, dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """(the matrix, the rows that are called what they are not): by truth, temperature, and whether
    it was told.
    """
    matrix: Counter[tuple[str, ...]] = Counter()
    wrong = []
    for source, own in sources.items():
        for key, row in own.items():
            target, state, t = key.split("|")
            if "positions" not in row:
                continue
            kl = far[source].get(f"{target}|bf16|{t}", {}).get("kl", [0])[0]
            truth = (
                "dead head"
                if state not in WORKING
                else "working head, broken target"
                if kl > BROKEN
                else "working head"
            )
            for told in (None, float(t)) if float(t) else (None,):
                health, head = verdict_of(row, told)
                matrix[truth, t, "no" if told is None else "yes", health, head] += 1
                accused = truth == "working head" and (
                    head in ("head_dead", "head_noise", "head_diverged")
                    or (told is not None and head != "none")
                )
                if accused or (
                    truth == "dead head"
                    and (head == "none" or head.endswith("works"))
                    and health != "broken"
                ):
                    wrong.append(f"{source}|{key}, told {told}: {health}, {head}")
    names = ("truth", "T", "told", "health", "finding")
    return [
        dict(zip(names, k, strict=True)) | {"rows": n} for k, n in sorted(matrix.items())
    ], wrong


def main(arguments: list[str]) -> None:
    """Read rows, write both results, print the tables."""
    rows: dict[str, dict[str, Any]] = {}
    served: dict[str, Any] = {}
    if "--keep" in arguments:
        kept = json.loads((RESULTS / "heads.json").read_text())
        rows, served = kept["rows"], kept["served"]
    into = rows
    for argument in arguments:
        if argument == "--served":
            into = served
        name, _, files = argument.partition("=")
        for file in filter(None, files.split(",")):
            held = json.loads(Path(file).read_text())
            if into is rows:
                rows.setdefault(name, {}).update(held["rows"])
                continue
            own = served.setdefault(
                name, {"engine": held["engine"], "rows": {}, "speed": {}, "failed": {}}
            )
            for part in ("rows", "speed", "failed"):
                own[part] |= held[part]
    by = {name: cases(name, own) for name, own in rows.items()}
    first = next(iter(rows))
    beta = fit(by[first])
    rest = {f"{name}, simulated": by[name] for name in rows if name != first}
    rest |= {
        f"{name}, served": cases(name, own["rows"], rows[name]) for name, own in served.items()
    }
    result: dict[str, Any] = {
        "beta": beta,
        "fitted": errors(by[first], beta),
        "not_fitted": {k: errors(v, beta) for k, v in rest.items() if v},
    }
    every = [c for part in (*by.values(), *rest.values()) for c in part]
    kl, tv = np.array([c["kl"] for c in every]), np.array([c["tv"] for c in every])
    result["tv_over_sqrt_half_kl"] = float(np.median(tv[kl > 0] / np.sqrt(kl[kl > 0] / 2)))
    t0, t7 = (rows[first][f"bf16|bf16|{t}"]["positions"][0]["value"] for t in ("0", "0.7"))
    result["sampled_loss"] = (1 - t7 / t0) / 0.7
    sources = rows | {f"{name} served": own["rows"] for name, own in served.items()}
    far = rows | {f"{name} served": rows[name] for name in served}
    result["confusion"], result["confusion_wrong"] = confusion(sources, far)
    result["cases"] = every
    write_atomically(RESULTS / "heads_predict.json", json.dumps(result, indent=1) + "\n")
    write_atomically(
        RESULTS / "heads.json", json.dumps({"rows": rows, "served": served}, indent=1) + "\n"
    )
    print(json.dumps({k: v for k, v in result.items() if k != "cases"}, indent=1))
    page_text = PAGE.read_text(encoding="utf-8")
    begin, end = page_text.index(ANSWER[0]) + len(ANSWER[0]), page_text.index(ANSWER[1])
    page_text = page_text[:begin] + "\n" + answer(rows, served) + page_text[end:]
    begin, end = page_text.index(BEGIN) + len(BEGIN), page_text.index(END)
    page_text = page_text[:begin] + "\n" + tables(rows, served, result) + page_text[end:]
    write_atomically(PAGE, page_text)


if __name__ == "__main__":
    main(sys.argv[1:])
