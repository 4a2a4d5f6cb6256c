"""How often does `assay grade` find what is broken, and how often does it cry wolf?

    python benchmarks/grade/detector_roc.py [--jobs 2] python benchmarks/grade/detector_roc.py
    --stutter       # measures stutter again, and keeps the other results

Legitimate text from `legit_texts.py`, outputs of broken and healthy models from `corpus/`, labelled
by rules of their own (`broken_outputs.py`). Everything was tuned on the tune half of the sources;
the figures are of the report half. The six regular expressions of the field's tool run on the same
texts. `results/detector_roc_before.json` keeps what the detectors of commit ba7355e gave, for a
comparison side by side. Stutter is judged over all texts of a cause.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from assay.coherence.detectors.stutter import Counts, judge_stutter, stutter_counts
from assay.coherence.grading import Grade, Label, grade
from assay.coherence.record import CheckRecord
from assay.environment import describe
from assay.stats import wilson
from broken_outputs import Output, broken
from check_models import read_runs
from legit_texts import Legit, documents, left_out, legitimate
from split import is_tune

LABELS = ("loop", "flood", "salad", "subtle", "empty")
RESULTS = Path(__file__).parent / "results"

# Re-written from a description of the field's coherence check, case-sensitive as there.
FIELD = {
    "asterisk_attractor": re.compile(r"(?:\*\s*){5,}"),
    "the_the_the": re.compile(r"(?:\bthe\s+){5,}"),
    "a_a_a": re.compile(r"(?:\ba\s+){5,}"),
    "delimiter_loop": re.compile(r"(?:\*\*:\s*){3,}"),
    "newline_loop": re.compile(r"\n{6,}"),
    "single_token_loop": re.compile(r"\b(\w+)(\s+)(?:\1\2){4,}"),
}


def field_flags(text: str) -> bool:
    stripped = text.strip()
    return not stripped or any(pattern.search(stripped) for pattern in FIELD.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that grade at once")
    parser.add_argument(
        "--stutter",
        action="store_true",
        help="measure stutter over all texts of a kind, and no more",
    )
    given = parser.parse_args()
    jobs = given.jobs
    all_legit, all_outputs = list(legitimate()), list(broken())
    legit = [item for item in all_legit if not is_tune(item.source)]
    outputs = [item for item in all_outputs if not is_tune(item.source)]
    healthy = [o for o in outputs if o.label == "ok"]
    if given.stutter:
        result = json.loads((RESULTS / "detector_roc.json").read_text(encoding="utf-8"))
        write({**result, "stutter": stutter(legit, outputs)})
        return
    grade_all(((item.text, reason) for reason in (None, "length") for item in legit), jobs=jobs)
    grade_all(((item.text, None) for item in documents()), jobs=jobs)
    grade_all(((o.text, o.finish_reason) for o in outputs), jobs=jobs)
    result = {
        "left_out": left_out(),
        "machine": describe(),
        "legitimate": alarms(legit, healthy),
        "documents": flagged_documents(),
        "recall": {label: recall([o for o in outputs if o.label == label]) for label in LABELS},
        "unsure": sum(o.label == "unsure" for o in outputs),
        "by_cause": by_cause(outputs),
        "kinds": kinds(outputs),
        "stutter": stutter(legit, outputs),
        "tune": {
            "legitimate": sum(is_tune(i.source) for i in all_legit),
            "outputs": sum(is_tune(o.source) for o in all_outputs),
        },
    }
    write(result)


def write(result: dict[str, Any]) -> None:
    """The results as JSON and Markdown."""
    (RESULTS / "detector_roc.json").write_text(
        json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    (RESULTS / "detector_roc.md").write_text(markdown(result), encoding="utf-8")
    print(markdown(result))


GRADES: dict[tuple[str, str | None], Grade] = {}
"""By text and finish reason."""


def grade_all(texts: Iterable[tuple[str, str | None]], *, jobs: int) -> None:
    """Grade the texts in so many processes."""
    new = list(dict.fromkeys(texts))
    with ProcessPoolExecutor(jobs) as pool:
        GRADES.update(zip(new, pool.map(_grade, new, chunksize=16), strict=True))


def _grade(text: tuple[str, str | None]) -> Grade:
    return grade(text[0], finish_reason=text[1])


def graded(output: Output) -> Grade:
    return GRADES[output.text, output.finish_reason]


def alarms(legit: list[Legit], healthy: list[Output]) -> dict[str, Any]:
    """False alarms of assay and of the field's patterns, by category."""
    rows: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    wrong = []
    for item in legit:
        result = GRADES[item.text, None]
        rows[item.category].append((result.label is not Label.OK, field_flags(item.text)))
        if result.label is not Label.OK:
            wrong.append({"source": item.source, "kind": result.kind, "onset": result.onset_char})
    for output in healthy:
        result = graded(output)
        rows["model outputs"].append((result.label is not Label.OK, field_flags(output.text)))
        if result.label is not Label.OK:
            wrong.append({"source": output.id, "kind": result.kind, "onset": result.onset_char})
    everything = [pair for pairs in rows.values() for pair in pairs]
    table = {name: rates(pairs) for name, pairs in sorted(rows.items())}
    cut = [
        (GRADES[item.text, "length"].label is Label.DEGENERATE, field_flags(item.text))
        for item in legit
    ]
    return {
        "all": rates(everything),
        "said_to_be_cut": rates(cut),
        "by_category": table,
        "false_alarms": wrong,
    }


def flagged_documents() -> dict[str, Any]:
    """False alarms on documents, of this repository and of packages, with the kinds that
    are named.
    """
    groups: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    named: Counter[str] = Counter()
    for item in documents():
        found = GRADES[item.text, None]
        of = "packages" if item.source.startswith("package/") else "this repository"
        groups[of].append((found.label is not Label.OK, field_flags(item.text)))
        named[found.kind or "-"] += found.label is not Label.OK
    table = {name: rates(pairs) for name, pairs in sorted(groups.items())}
    return {"by_origin": table, "kinds": {kind: n for kind, n in named.most_common() if n}}


def recall(outputs: list[Output]) -> dict[str, Any]:
    pairs = [
        (graded(o).label in {Label.DEGENERATE, Label.EMPTY}, field_flags(o.text)) for o in outputs
    ]
    missed = [o.id for o, (found, _) in zip(outputs, pairs, strict=True) if not found]
    return {**rates(pairs), "missed": missed[:40]}


def stutter(legit: list[Legit], outputs: list[Output]) -> dict[str, Any]:
    """Stutters for 1,000 words of all texts of a kind together, and how often runs of its texts are
    judged to stutter.

    Texts of real runs that lie in the tune half are left out, as those of the other sources are
    already.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for item in legit:
        groups[item.category].append(item.text)
    for output in outputs:
        whole = output.cause.startswith("healthy") and output.label == "ok"
        groups["whole models, ok" if whole else f"{output.cause.partition('.')[0]} (model)"].append(
            output.text
        )
    for run in read_runs():
        cache = "bf16" if run["kv_cache_dtype"] == "auto" else run["kv_cache_dtype"]
        for side, how in (
            ("server", f"served by vLLM, {cache} cache"),
            ("reference", "run by transformers"),
        ):
            record = CheckRecord.from_json(run[side]) if run.get(side) else CheckRecord()
            for n, sample in enumerate(record.samples):
                sane = not sample.degenerate or sample.kind == "stutter"
                if sane and not is_tune(f"stutter/{run['model']}/{side}/{cache}/{sample.seed}/{n}"):
                    groups[f"{run['model']}, {how} ({run['device']})"].append(sample.text_head)
    rows = []
    for name, texts in sorted(groups.items()):
        counts = [stutter_counts(text) for text in dict.fromkeys(texts)]
        found = judge_stutter(counts)
        if found.words < 300:
            continue
        scaled = {k: 1000 * getattr(found, k) for k in ("rate", "lo", "hi")}
        rows.append(
            {
                "texts": name,
                "n": len(counts),
                "words": found.words,
                "stutters": found.stutters,
                **scaled,
                "verdict": found.verdict,
                "runs_bad": stutter_roc(name, counts),
            }
        )
    return {"runs": RUNS, "texts_a_run": TEXTS_A_RUN, "times": TIMES, "rows": rows}


RUNS, TEXTS_A_RUN, TIMES = 200, 45, (1.5, 2.0, 3.0, 5.0, 8.0)
"""Simulated runs of each kind, texts of one, and multiples of the healthy rate that a run's lower
bound may not exceed.
"""


def stutter_roc(name: str, counts: list[Counts]) -> list[int]:
    """How many of `RUNS` runs, drawn from these texts, are judged to stutter at each of `TIMES` the
    healthy rate.
    """
    rng = random.Random(name)
    runs = [rng.choices(counts, k=TEXTS_A_RUN) for _ in range(RUNS)]
    return [
        sum(judge_stutter(run, times=times).verdict == "bad" for run in runs) for times in TIMES
    ]


def rates(pairs: list[tuple[bool, bool]]) -> dict[str, Any]:
    n = len(pairs)
    ours, field = sum(a for a, _ in pairs), sum(b for _, b in pairs)
    return {"n": n, "assay": interval(ours, n), "field": interval(field, n)}


def interval(count: int, n: int) -> dict[str, Any]:
    if n == 0:
        return {"count": 0, "rate": None, "lo": None, "hi": None}
    found = wilson(count, n)
    return {"count": count, "rate": count / n, "lo": found.lo, "hi": found.hi}


def by_cause(outputs: list[Output]) -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = {}
    for cause in sorted({o.cause for o in outputs}):
        mine = [o for o in outputs if o.cause == cause]
        flagged = sum(graded(o).label is not Label.OK for o in mine)
        table[cause] = {
            "n": len(mine),
            "flagged": flagged,
            "labels": dict(Counter(o.label for o in mine)),
        }
    return table


def kinds(outputs: list[Output]) -> dict[str, dict[str, int]]:
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for output in outputs:
        table[output.label][graded(output).kind or "-"] += 1
    return {label: dict(counts.most_common()) for label, counts in sorted(table.items())}


def markdown(result: dict[str, Any]) -> str:
    lines = ["# Detectors on text that they were not tuned on", ""]
    if result["left_out"]:
        lines += [
            (
                "**Left out, so that these figures are of fewer texts:"
                f" {'; '.join(result['left_out'])}.**"
            ),
            "",
        ]
    lines += [
        "| texts | n | assay | 95 % | six patterns of the field | 95 % |",
        "|---|---:|---:|---|---:|---|",
    ]
    everything = result["legitimate"]["all"]
    lines.append(row("legitimate, flagged", everything))
    lines.append(
        row("the same, with finish_reason `length`", result["legitimate"]["said_to_be_cut"])
    )
    lines += [row(f"{label}, found", result["recall"][label]) for label in LABELS]
    lines += ["", *side_by_side(result)]
    lines += [
        "",
        f"Left out because the label is unsure: {result['unsure']}.",
        "",
        "## False alarms by kind of text",
        "",
    ]
    lines += [
        "| texts | n | assay | 95 % | six patterns of the field | 95 % |",
        "|---|---:|---:|---|---:|---|",
    ]
    lines += [row(name, rates_) for name, rates_ in result["legitimate"]["by_category"].items()]
    lines += [
        "",
        (
            "Documents dense with links, code, names and figures, whole and in pieces, counted"
            " apart since packages differ from machine to machine:"
        ),
        "",
        "| documents of | n | assay | 95 % | six patterns of the field | 95 % |",
        "|---|---:|---:|---|---:|---|",
        *(row(name, rates_) for name, rates_ in result["documents"]["by_origin"].items()),
    ]
    lines += ["", "## By cause", "", "| cause | n | flagged | labels |", "|---|---:|---:|---|"]
    lines += [
        f"| {cause} | {r['n']} | {r['flagged']} |"
        f" {', '.join(f'{k} {v}' for k, v in sorted(r['labels'].items()))} |"
        for cause, r in result["by_cause"].items()
    ]
    lines += [
        "",
        "## Stutter over all texts of a kind",
        "",
        (
            f"Then how many of {result['stutter']['runs']} runs of"
            f" {result['stutter']['texts_a_run']} texts each, drawn from these, stutter by the"
            " rule, if it allows so many times the healthy rate."
        ),
        "",
        "| texts | n | words | for 1,000 words | 95 % | verdict | "
        + " | ".join(f"× {times:g}" for times in result["stutter"]["times"])
        + " |",
    ]
    lines.append("|---|---:|---:|---:|---|---|" + "---:|" * len(result["stutter"]["times"]))
    lines += [
        f"| {r['texts']} | {r['n']} | {r['words']} | {r['rate']:.2f} | {r['lo']:.2f} to"
        f" {r['hi']:.2f} | {r['verdict']} | " + " | ".join(map(str, r["runs_bad"])) + " |"
        for r in result["stutter"]["rows"]
    ]
    lines += ["", "## Kinds named, by label", "", "| label | kinds |", "|---|---|"]
    lines += [
        f"| {label} | {', '.join(f'{k} {v}' for k, v in counts.items())} |"
        for label, counts in result["kinds"].items()
    ]
    return "\n".join(lines) + "\n"


def side_by_side(result: dict[str, Any]) -> list[str]:
    """The detectors of commit ba7355e and these."""
    before = json.loads((RESULTS / "detector_roc_before.json").read_text(encoding="utf-8"))
    lines = ["## Before and now", "", "| texts | ba7355e | now |", "|---|---:|---:|"]
    for name, path in (
        ("legitimate, flagged", ("legitimate", "all")),
        ("the same, with finish_reason `length`", ("legitimate", "said_to_be_cut")),
        *((f"{label}, found", ("recall", label)) for label in LABELS),
    ):
        old, new = before[path[0]][path[1]], result[path[0]][path[1]]
        lines.append(
            f"| {name} | {old['assay']['count']} of {old['n']} | {new['assay']['count']} of"
            f" {new['n']} |"
        )
    return lines


def row(name: str, rates_: dict[str, Any]) -> str:
    cells = []
    for who in ("assay", "field"):
        r = rates_[who]
        if r["rate"] is None:
            cells += ["-", "-"]
        else:
            cells += [
                f"{r['count']} ({100 * r['rate']:.2f} %)",
                f"{100 * r['lo']:.2f} to {100 * r['hi']:.2f} %",
            ]
    return f"| {name} | {rates_['n']} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
