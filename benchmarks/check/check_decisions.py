"""How often `assay check` passes a whole server and fails a damaged one: real runs, and runs
simulated from kept texts and scores.

    python benchmarks/check/check_decisions.py --scores           # scores the fixed texts:
    results/check_scores.json python benchmarks/check/check_decisions.py [--runs 2000]      # writes
    results/check_decisions.json and .md

Real runs (results/check_models_runs.jsonl.xz, made by check_models.py) are judged again by the
rules as they are now, and so are ten older ones, of which results/server_faults.json keeps counts
and no texts.

Simulated runs draw texts from those runs and from the corpus (benchmarks/grade/corpus): the
server's from those of a healthy or of a damaged model, the reference's from those of the healthy
one. Texts of a whole server and of its reference are one source: both were written by the same
model. The texts of each source are split into two halves by their ids; the rules were chosen on the
tune half, and the figures are of the report half (`--half`). A text stands for an answer to the
question that it is drawn for, so only texts that answered several questions of their source word
for word count as the same answer. Fixed texts were scored once with the whole model and with each
damage, in this process; a server differs from that by rounding, which is drawn as it was measured
on real servers (results/server_faults.json). Each run is judged by the real rules, extended as
`check` extends it, and judged again; the older procedure, one look and no help of the fixed texts,
is judged on the same draws.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from assay.coherence.detectors.stutter import stutter_counts
from assay.coherence.grading import grade
from assay.coherence.judge import judge
from assay.coherence.passages import passages, score_alone, score_in_context
from assay.coherence.record import CheckRecord, GradedReply, PassageScore, ProbeResult
from assay.coherence.rules.rule import interval_json
from assay.coherence.run import asks_for_texts
from assay.coherence.stages import EXTENSIONS, MAX_ANALYSES
from assay.demo.damage import DAMAGES, damage_checkpoint
from assay.demo.models import build_smollm2
from assay.engines.hf.engine import HfEngine
from assay.environment import describe
from assay.stats import wilson
from assay.stats.multiplicity import confidence_of_analysis
from assay.verdict import Verdict
from check_models import RUN, read_runs

sys.path.insert(0, str(Path(__file__).parents[1] / "grade"))
from split import is_tune

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "check_decisions.json"
SCORES = HERE / "results" / "check_scores.json"
FAULTS = HERE / "results" / "server_faults.json"
CONTEXT = 2016
ROUNDING = 0.0026
"""Spread over texts of the bits per byte that ten whole servers lost: intervals of ±0.0012 over 20
scores.
"""
PROBES = ("france", "story", "fibonacci", "json_list", "spanish", "second_turn")
GREEDY, PLANNED, SINGLE = 6, 18, 17
"""Texts of the plan: greedy ones, sampled ones, and those of needles and the burst, greedy too."""
LN2 = math.log(2.0)

Pool = dict[str, list[GradedReply]]
"""Texts of one source, `greedy` and `sampled`."""


def pools(half: str) -> dict[str, Pool]:
    """Graded texts of the corpus and of real healthy runs by source, of one half."""
    found: dict[str, list[tuple[str, str, GradedReply]]] = defaultdict(list)
    with gzip.open(
        HERE.parent / "grade" / "corpus" / "outputs.jsonl.gz", "rt", encoding="utf-8"
    ) as lines:
        for row in map(json.loads, lines):
            text, heat = row["text"], row["sampling"]["temperature"]
            result, said = grade(text, finish_reason=row["finish_reason"]), stutter_counts(text)
            sample = GradedReply(
                label=result.label.value,
                kind=result.kind,
                onset_char=result.onset_char,
                finish_reason=row["finish_reason"],
                completion_tokens=row.get("completion_tokens") or len(text) // 4,
                text_head=text,
                text_chars=len(text),
                coherent_chars=result.coherent_chars,
                temperature=heat,
                seed=0,
                words=said.words,
                stutters=said.total,
            )
            found[row["source"]].append((row["prompt_id"], row["id"], sample))
    for run in read_runs():
        if "tools" not in run["way"]:
            for side in ("server", "reference"):
                whole = run["kv_cache_dtype"] == "auto" or side == "reference"
                source = (
                    f"healthy {run['model']}"
                    if whole
                    else f"{run['kv_cache_dtype']} cache {run['model']}"
                )
                record = CheckRecord.from_json(run[side]) if run.get(side) else CheckRecord()
                for probe in record.probes:
                    for n, sample in enumerate(probe.samples):
                        where = f"{probe.name} {sample.variant}"
                        key = f"{source}/{side}/{where}/{sample.temperature}/{sample.seed}/{n}"
                        plain = replace(
                            sample, checks=(), prompt_tokens=None, variant="", tool_form=""
                        )
                        found[source].append((where, key, plain))
    return {name: pool for name, rows in found.items() if (pool := _half(rows, half))["sampled"]}


def _half(rows: Sequence[tuple[str, str, GradedReply]], half: str) -> Pool:
    """One half of the texts; those that answered several questions of the source keep their words
    alone as a head.
    """
    asked: dict[str, set[str]] = defaultdict(set)
    for question, _, sample in rows:
        asked[sample.text_head].add(question)
    pool: Pool = {"greedy": [], "sampled": []}
    for key, sample in {key: sample for _, key, sample in rows}.items():
        if is_tune(f"decisions/{key}") == (half == "tune"):
            mark = "same" if len(asked[sample.text_head]) > 1 else "own"
            kept = replace(sample, variant=mark, text_head=sample.text_head[:200])
            pool["sampled" if sample.temperature else "greedy"].append(kept)
    return pool


def texts(rng: random.Random, pool: Pool, sampled: int, greedy: int) -> list[GradedReply]:
    """Texts drawn from a pool."""
    cold = pool["greedy"] or pool["sampled"]
    return [rng.choice(pool["sampled"]) for _ in range(sampled)] + [
        rng.choice(cold) for _ in range(greedy)
    ]


def score_all_damages() -> None:
    """Score the fixed texts with the whole model and with each damage; what is there is not scored
    again.
    """
    known: dict[str, Any] = (
        json.loads(SCORES.read_text(encoding="utf-8")) if SCORES.exists() else {}
    )
    whole = build_smollm2()
    for name in ("healthy", *DAMAGES):
        if name in known:
            continue
        with tempfile.TemporaryDirectory() as folder:
            model = (
                whole
                if name == "healthy"
                else damage_checkpoint(name, whole, Path(folder) / "model")
            )
            with HfEngine.load(f"hf:{model}") as engine:
                found = [*score_alone(engine, len(passages())), *score_in_context(engine, CONTEXT)]
        known[name] = [[s.passage, s.depth, round(s.nats, 4), s.bytes] for s in found]
        SCORES.write_text(json.dumps(known) + "\n", encoding="utf-8")
        print(name, sum(s.bits_per_byte for s in found) / len(found), flush=True)


def scores(rng: random.Random, kept: list[list[Any]], spread: float) -> tuple[PassageScore, ...]:
    """Kept scores with rounding; that of one text at several depths is alike in part."""
    own: dict[str, float] = defaultdict(lambda: rng.gauss(0.0, 0.8 * spread))
    noise = [
        (own[passage] + rng.gauss(0.0, 0.6 * spread)) * LN2 * size for passage, _, _, size in kept
    ]
    return tuple(
        PassageScore(passage, depth, nats + extra, size)
        for (passage, depth, nats, size), extra in zip(kept, noise, strict=True)
        if math.isfinite(nats)
    )


def record(drawn: Sequence[GradedReply], passages: tuple[PassageScore, ...]) -> CheckRecord:
    """A record of these texts: the sampled ones dealt to the probes, of the greedy ones each an
    answer to a question of its own.
    """
    asked: dict[str, list[GradedReply]] = defaultdict(list)
    for n, sample in enumerate(s for s in drawn if s.temperature):
        asked[PROBES[n % len(PROBES)]].append(sample)
    for n, sample in enumerate(s for s in drawn if not s.temperature):
        asked[PROBES[n] if n < GREEDY else f"burst {n}"].append(sample)
    return CheckRecord(
        probes=tuple(
            ProbeResult(
                name,
                name,
                tuple(
                    replace(
                        s,
                        variant="",
                        text_head=s.text_head if s.variant == "same" else f"{name} {s.text_head}",
                    )
                    for s in samples
                ),
            )
            for name, samples in asked.items()
        ),
        passages=passages,
    )


def run(
    rng: random.Random, server: Side, model: Side | None
) -> tuple[Verdict, int, Verdict, tuple[str, ...]]:
    """The verdict, the looks it took, the verdict of the older procedure, and the rules that
    decided; `model`: the reference.
    """
    ours = texts(rng, server.pool, PLANNED, GREEDY + SINGLE)
    theirs = texts(rng, model.pool, PLANNED, GREEDY + SINGLE) if model else []
    served = scores(rng, server.scores, ROUNDING)
    whole = scores(rng, model.scores, 0.0) if model else ()

    def judged(confidence: float, *, fixed: bool = True) -> Any:
        reference = record(theirs, whole if fixed else ()) if model else None
        return judge(record(ours, served if fixed else ()), reference, confidence)

    # Before, the fixed texts failed a server too, but never helped the rates.
    before = judged(0.95, fixed=False).verdict
    if any(r.state == "bad" and r.rule in ("bits_per_byte", "depth") for r in judged(0.95).rulings):
        before = Verdict.FAIL
    for look in range(1, MAX_ANALYSES + 1):
        judgement = judged(confidence_of_analysis(look))
        if look == MAX_ANALYSES or not asks_for_texts(judgement):
            why = tuple(r.rule for r in judgement.rulings if r.state in ("bad", "unclear"))
            return judgement.verdict, look, before, why
        more = EXTENSIONS[look - 1] * len(PROBES)
        ours += texts(rng, server.pool, more, 0)
        if model:
            theirs += texts(rng, model.pool, more, 0)
    raise AssertionError("the last look returns")


@dataclass(frozen=True)
class Side:
    """Where the texts and the scores of one side come from."""

    pool: Pool
    scores: list[list[Any]]


def scores_of_caches() -> dict[str, tuple[list[list[Any]], list[list[Any]]]]:
    """Scores of the fixed texts that a real server with a cache that damages it gave, and its
    model, by the name of the pool.
    """
    served: dict[str, list[list[Any]]] = {}
    own: dict[str, list[list[Any]]] = {}
    for run in read_runs():
        for side, found in (("server", served), ("reference", own)):
            record = CheckRecord.from_json(run[side]) if run.get(side) else CheckRecord()
            name = f"{run['kv_cache_dtype']} cache {run['model']}"
            if len(record.passages) >= 8 and (side == "reference" or name in DAMAGING):
                kept = [[p.passage, p.depth, p.nats, p.bytes] for p in record.passages]
                found[run["model"] if side == "reference" else name] = kept
    return {
        name: (kept, own[model])
        for name, kept in served.items()
        if (model := name.split()[-1]) in own
    }


DAMAGING = ("fp8 cache qwen15",)
"""Caches of which docs/check.md shows that they damage the model."""


def real_runs() -> list[dict[str, Any]]:
    """Checks of real servers with a reference, judged again by the rules as they are now."""
    rows = []
    for kept in read_runs():
        if kept.get("reference") and "tools" not in kept["way"]:
            sides = [CheckRecord.from_json(kept[side]) for side in ("server", "reference")]
            rows.append({key: kept[key] for key in RUN} | _judged_again(*sides, kept="texts"))
    for row in json.loads(FAULTS.read_text(encoding="utf-8"))["healthy"].values():
        run = {
            "model": "smollm2",
            "device": row["machine"]["accelerator"],
            "kv_cache_dtype": "auto",
            "seed": row["seed"],
        }
        rows.append(run | _judged_again(*rebuilt(row), kept="counts"))
    return rows


def _judged_again(record: CheckRecord, reference: CheckRecord, kept: str) -> dict[str, Any]:
    texts = len(record.samples)
    look = 1 + sum(texts > planned for planned in (60, 110, 150, 200, 280))
    judgement = judge(record, reference, confidence_of_analysis(look))
    decided = [r.rule for r in judgement.rulings if r.state in ("bad", "unclear")]
    return {"kept": kept, "texts": texts, "verdict": str(judgement.verdict), "rules": decided}


def rebuilt(row: dict[str, Any]) -> tuple[CheckRecord, CheckRecord]:
    """Both records of an older real run from the counts that were kept of it: its texts were not,
    nor their words.
    """
    says = {rule["rule"]: rule["says"] for rule in row["rules"]}
    hard = re.match(r"(\d+) of .*reference (\d+) of", says["hard_texts"])
    loss = re.search(r"([+-][\d.]+) \[([+-][\d.]+), ([+-][\d.]+)\]", says["bits_per_byte"])
    assert hard and loss, says
    value, lo, hi = map(float, loss.groups())
    spread = (hi - lo) / 2 * math.sqrt(11) / 2.201  # of twelve values that give this interval

    def side(bad: int, floods: int, bits: Sequence[float]) -> CheckRecord:
        kinds = ["single_char_flood"] * floods + ["sentence_loop"] * (bad - floods)
        samples = tuple(
            GradedReply(
                label="degenerate" if kind else "ok",
                kind=kind,
                onset_char=None,
                finish_reason="stop",
                completion_tokens=99,
                text_head=str(n),
                text_chars=400,
                coherent_chars=400,
                temperature=0.7,
                seed=n,
            )
            for n, kind in enumerate([*kinds, *[None] * (row["texts"] - bad)])
        )
        scores = tuple(PassageScore(str(n), 0, b * 600 * LN2, 600) for n, b in enumerate(bits))
        return CheckRecord(probes=(ProbeResult("all", "all", samples),), passages=scores)

    base = row["reference_bits_per_byte"]
    ours = [base + value + (spread if n % 2 else -spread) for n in range(12)]
    return (
        side(row["degenerate"], int(hard[1]), ours),
        side(row["reference_degenerate"], int(hard[2]), [base] * 12),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--scores", action="store_true", help="score the fixed texts, and no more")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes that simulate at once")
    parser.add_argument("--half", choices=("tune", "report"), default="report")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.scores:
        score_all_damages()
        return
    pool, kept = pools(arguments.half), json.loads(SCORES.read_text(encoding="utf-8"))
    whole = Side(pool["healthy"], kept["healthy"])
    tasks: list[tuple[str, Side, Side | None, str, int]] = []
    for source in sorted(
        name for name in pool if name.startswith("healthy")
    ):  # a whole server writes as its model does
        side = Side(pool[source], kept["healthy"])
        tasks.append((f"{source}, with its reference", side, side, "pass", arguments.runs))
        tasks.append((f"{source}, alone", side, None, "pass", arguments.runs // 4))
    for name in kept:
        if name in pool and name != "healthy":
            side = Side(pool[name], kept[name])
            tasks.append((f"{name}, with a reference", side, whole, "fail", arguments.runs // 10))
            tasks.append((f"{name}, alone", side, None, "fail", arguments.runs // 10))
    for name, (
        served,
        own,
    ) in scores_of_caches().items():  # with the scores of a real run of that cache
        model = name.partition(" cache ")[2]
        if name in pool and f"healthy {model}" in pool:
            side, theirs = Side(pool[name], served), Side(pool[f"healthy {model}"], own)
            tasks.append((f"{name}, with its reference", side, theirs, "fail", arguments.runs // 4))
            tasks.append((f"{name}, alone", side, None, "fail", arguments.runs // 4))
    rows = []
    with ProcessPoolExecutor(arguments.jobs) as jobs:
        for row in jobs.map(simulate, [arguments.seed] * len(tasks), *zip(*tasks, strict=True)):
            rows.append(row)
            print(row, flush=True)
    result = {
        "seed": arguments.seed,
        "half": arguments.half,
        "machine": describe(),
        "rows": rows,
        "real": real_runs(),
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    arguments.out.with_suffix(".md").write_text(table(rows, result["real"]), encoding="utf-8")


def simulate(
    seed: int, name: str, server: Side, model: Side | None, wanted: str, runs: int
) -> dict[str, Any]:
    """One row: how many of `runs` came out as wanted, how often it was looked, and which rules
    decided the others.
    """
    rng = random.Random(f"{seed}/{name}")
    found = [run(rng, server, model) for _ in range(runs)]
    verdicts, older = (Counter(str(r[i]) for r in found) for i in (0, 2))
    other = Counter(rule for r in found if str(r[0]) != wanted for rule in r[3])
    return {
        "name": name,
        "texts": [
            len(side.pool[k]) for side in (server, model or server) for k in ("sampled", "greedy")
        ],
        "runs": runs,
        "reference": model is not None,
        "wanted": wanted,
        "verdicts": dict(verdicts),
        "rate": interval_json(wilson(verdicts[wanted], runs)),
        "older": dict(older),
        "otherwise": dict(other),
        "looks": sum(r[1] for r in found) / runs,
    }


def table(rows: Sequence[dict[str, Any]], real: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        (
            "| texts of | runs | pass | inconclusive | fail | looks | otherwise by | one look,"
            " without fixed texts |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        share = {k: f"{v / row['runs']:.1%}" for k, v in row["verdicts"].items()}
        rate = row["rate"]
        share[row["wanted"]] = (
            share.get(row["wanted"], "0") + f" [{100 * rate['lo']:.1f}, {100 * rate['hi']:.1f}]"
        )
        old = ", ".join(f"{k} {v / row['runs']:.1%}" for k, v in sorted(row["older"].items()))
        cells = (
            row["name"],
            str(row["runs"]),
            *(share.get(k, "0") for k in ("pass", "inconclusive", "fail")),
            f"{row['looks']:.2f}",
            ", ".join(f"{k} {v}" for k, v in sorted(row["otherwise"].items())) or "–",
            old,
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        (
            "| real run | KV cache | on | seed | texts | judged by its | verdict with its reference"
            " | by |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in real:
        cache = "bf16" if row["kv_cache_dtype"] == "auto" else row["kv_cache_dtype"]
        cells = (
            row["model"],
            cache,
            row["device"],
            row["seed"],
            row["texts"],
            row["kept"],
            row["verdict"],
            ", ".join(row["rules"]) or "–",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
