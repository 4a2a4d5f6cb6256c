"""How often `assay check` passes a whole server and fails a damaged one, simulated from kept texts and kept scores.

    python benchmarks/check_decisions.py --scores           # scores the fixed texts: results/check_scores.json
    python benchmarks/check_decisions.py [--runs 2000]      # writes results/check_decisions.json and .md

Texts are drawn from the corpus (benchmarks/corpus): the server's from those of a healthy or of a damaged model, the
reference's from those of the healthy one. The fixed texts were scored once with the whole model and with each damage,
in this process; a server differs from that by rounding, which is drawn as it was measured on real servers
(results/server_faults.json). Each run is judged by the real rules, extended as `check` extends it, and judged again; the
older procedure, one look and no help of the fixed texts, is judged on the same draws.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from assay.coherence.check import DECIDED_BY_TEXTS
from assay.coherence.detectors.stutter import stutter_counts
from assay.coherence.diagnosis import judge
from assay.coherence.grading import grade
from assay.coherence.passages import passages, score_alone, score_in_context
from assay.coherence.plan import EXTENSION, LOOKS
from assay.coherence.record import CheckRecord, PassageScore, ProbeResult, Sample
from assay.coherence.rules import interval_json
from assay.demo.damage import DAMAGES, damage_checkpoint
from assay.demo.models import build_smollm2
from assay.engines.hf.engine import HfEngine
from assay.stats.equivalence import confidence_of_look
from assay.stats.intervals import wilson
from assay.verdict import Verdict

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "check_decisions.json"
SCORES = HERE / "results" / "check_scores.json"
MODELS = HERE / "results" / "check_models_texts.jsonl.gz"
"""Texts of checks of real servers (benchmarks/check_models.py)."""
CONTEXT = 2016
ROUNDING = 0.0026
"""Spread over texts of the bits per byte that ten whole servers lost: intervals of ±0.0012 over 20 scores."""
PROBES = ("france", "story", "fibonacci", "json_list", "spanish", "second_turn")
GREEDY, PLANNED, SINGLE = 6, 18, 17
"""Texts of the plan: greedy ones, sampled ones, and those of needles and the burst, greedy too."""
LN2 = math.log(2.0)


def pools() -> dict[str, dict[str, list[Sample]]]:
    """Graded texts of the corpus by source and by whether they were decoded greedily."""
    found: dict[str, dict[str, list[Sample]]] = defaultdict(lambda: {"greedy": [], "sampled": []})
    with gzip.open(HERE / "corpus" / "outputs.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            put(found[row["source"]], row, row["sampling"]["temperature"])
    if MODELS.exists():
        with gzip.open(MODELS, "rt", encoding="utf-8") as lines:
            for row in map(json.loads, lines):
                if row["way"] == "alone" and row["probe"] != "speed" and row["kv_cache_dtype"] == "auto":
                    put(found[f"healthy {row['model']}, served by vLLM"], row, row["temperature"])
    return {name: pool for name, pool in found.items() if pool["sampled"]}


def put(pool: dict[str, list[Sample]], row: dict[str, Any], heat: float) -> None:
    """Grade one kept text into a pool."""
    text = row["text"]
    result, said = grade(text, finish_reason=row["finish_reason"]), stutter_counts(text)
    sample = Sample(
        label=result.label.value, kind=result.kind, onset_char=result.onset_char,
        finish_reason=row["finish_reason"], completion_tokens=row.get("completion_tokens") or len(text) // 4,
        text_head=text[:200], text_chars=len(text), coherent_chars=result.coherent_chars,
        temperature=heat, seed=0, words=said.words, stutters=said.total,
    )  # fmt: skip
    pool["sampled" if heat else "greedy"].append(sample)


def texts(rng: random.Random, pool: dict[str, list[Sample]], sampled: int, greedy: int) -> list[Sample]:
    """Texts drawn from a pool."""
    cold = pool["greedy"] or pool["sampled"]
    return [rng.choice(pool["sampled"]) for _ in range(sampled)] + [rng.choice(cold) for _ in range(greedy)]


def score_all_damages() -> None:
    """Score the fixed texts with the whole model and with each damage; what is there is not scored again."""
    known: dict[str, Any] = json.loads(SCORES.read_text(encoding="utf-8")) if SCORES.exists() else {}
    whole = build_smollm2()
    for name in ("healthy", *DAMAGES):
        if name in known:
            continue
        with tempfile.TemporaryDirectory() as folder:
            model = whole if name == "healthy" else damage_checkpoint(name, whole, Path(folder) / "model")
            with HfEngine.load(f"hf:{model}") as engine:
                found = [*score_alone(engine, len(passages())), *score_in_context(engine, CONTEXT)]
        known[name] = [[s.passage, s.depth, round(s.nats, 4), s.bytes] for s in found]
        SCORES.write_text(json.dumps(known) + "\n", encoding="utf-8")
        print(name, sum(s.bits_per_byte for s in found) / len(found), flush=True)


def scores(rng: random.Random, kept: list[list[Any]], spread: float) -> tuple[PassageScore, ...]:
    """Kept scores with rounding; that of one text at several depths is alike in part."""
    own: dict[str, float] = defaultdict(lambda: rng.gauss(0.0, 0.8 * spread))
    noise = [(own[passage] + rng.gauss(0.0, 0.6 * spread)) * LN2 * size for passage, _, _, size in kept]
    return tuple(
        PassageScore(passage, depth, nats + extra, size)
        for (passage, depth, nats, size), extra in zip(kept, noise, strict=True)
        if math.isfinite(nats)
    )


def record(drawn: Sequence[Sample], passages: tuple[PassageScore, ...]) -> CheckRecord:
    """A record of these texts, dealt to the probes."""
    # A text may be drawn for several questions; that these got the same answer says nothing of a server here.
    probes = tuple(
        ProbeResult(n, n, tuple(replace(s, text_head=f"{n} {s.text_head}") for s in drawn[i :: len(PROBES)]))
        for i, n in enumerate(PROBES)
    )
    return CheckRecord(probes=probes, passages=passages)


def run(rng: random.Random, server: Side, model: Side | None) -> tuple[Verdict, int, Verdict]:
    """The verdict, the looks it took, and the verdict of the older procedure; `model` is the reference."""
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
    for look in range(1, LOOKS + 1):
        judgement = judged(confidence_of_look(look))
        unclear = {r.rule for r in judgement.rulings if r.state == "unclear"}
        if not unclear or not unclear <= DECIDED_BY_TEXTS or look == LOOKS:
            return judgement.verdict, look, before
        ours += texts(rng, server.pool, EXTENSION * len(PROBES), 0)
        if model:
            theirs += texts(rng, model.pool, EXTENSION * len(PROBES), 0)
    raise AssertionError("the last look returns")


@dataclass(frozen=True)
class Side:
    """Where the texts and the scores of one side come from."""

    pool: dict[str, list[Sample]]
    scores: list[list[Any]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--scores", action="store_true", help="score the fixed texts, and no more")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.scores:
        score_all_damages()
        return
    rng, pool = random.Random(arguments.seed), pools()
    kept = json.loads(SCORES.read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = []

    def simulate(name: str, server: Side, model: Side | None, wanted: str, runs: int) -> None:
        found = [run(rng, server, model) for _ in range(runs)]
        verdicts, older = (Counter(str(r[i]) for r in found) for i in (0, 2))
        rows.append({
            "name": name, "runs": runs, "reference": model is not None, "wanted": wanted, "verdicts": dict(verdicts),
            "rate": interval_json(wilson(verdicts[wanted], runs)), "older": dict(older),
            "looks": sum(look for _, look, _ in found) / runs,
        })  # fmt: skip
        print(rows[-1], flush=True)

    for source in [name for name in pool if name.startswith("healthy")]:
        side = Side(pool[source], kept["healthy"])
        simulate(f"{source}, with its reference", side, side, "pass", arguments.runs)
        simulate(f"{source}, alone", side, None, "pass", arguments.runs)
    whole = Side(pool["healthy"], kept["healthy"])
    for name in kept:
        if name in pool and name != "healthy":
            side = Side(pool[name], kept[name])
            simulate(f"{name}, with a reference", side, whole, "fail", arguments.runs // 10)
            simulate(f"{name}, alone", side, None, "fail", arguments.runs // 10)
    RESULTS.write_text(json.dumps({"seed": arguments.seed, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    RESULTS.with_suffix(".md").write_text(table(rows), encoding="utf-8")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| texts of | runs | pass | inconclusive | fail | looks | one look, without fixed texts |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        share = {k: f"{v / row['runs']:.1%}" for k, v in row["verdicts"].items()}
        old = ", ".join(f"{k} {v / row['runs']:.1%}" for k, v in sorted(row["older"].items()))
        cells = (
            row["name"],
            str(row["runs"]),
            *(share.get(k, "0") for k in ("pass", "inconclusive", "fail")),
            f"{row['looks']:.2f}",
            old,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
