"""How fast an engine scores, measured on the first tokens of the text."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from assay.engines.scoring import ScoreJob, ScoringEngine, ScoringPath
from assay.fidelity.budget import LEAST_LENGTH
from assay.fidelity.metrics.token_statistics import window_statistics
from assay.fidelity.plan import Plan
from assay.fidelity.windows import cut_windows

WORTH_MEASURING = 8192
"""Tokens of all sides together from which on the time of a run without a budget is told: it takes a
while.
"""


@dataclass(frozen=True)
class Pace:
    """What a token of a window costs in seconds: to score it by one engine, and to compare two rows
    of it.
    """

    score: float
    compare: float


def measure_pace(engine: ScoringEngine, plan: Plan, text: str) -> Pace:
    """The engine's own speed, on short windows of the text; the first call, which warms up, is not
    counted.

    Windows that are fed token by token run together, as they will: one at a time would seem too
    slow.
    """
    prefill, tokenizer = plan.path == ScoringPath.PREFILL, engine.tokenizer
    together = 1 if prefill else plan.batch or 8
    length = min(plan.length, LEAST_LENGTH if prefill else LEAST_LENGTH // 2)
    cut = replace(plan.cut, length=length)
    windows = cut_windows(
        tokenizer.encode(text[: 40 * length * (together + 2)]), cut, tokenizer.bos_id
    )
    job = ScoreJob(
        ScoringPath(plan.path),
        scored_from=cut.scored_from,
        chunk=min(plan.chunk, length),
        batch=together,
    )
    warm = list(engine.score_windows(windows[:1], job))
    some = windows[:together]
    began = time.perf_counter()
    rows = list(engine.score_windows(some, job))
    scored = time.perf_counter()
    window_statistics(warm[0], rows[0])
    compared = time.perf_counter()
    side_by_side = getattr(engine, "workers", 1)
    return Pace(
        (scored - began) / (length * len(some)) / side_by_side,
        (compared - scored) / length / side_by_side,
    )
