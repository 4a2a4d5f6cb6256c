"""The core against a stand-in engine: every path gives the model's own states, whatever the batch
does meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from vllm_stand_in import VOCAB, Engine, install

from assay.engines.scoring import LogitRows, ScoreJob, ScoringPath, StateRows, Window, WindowRows
from assay.engines.vllm.core import VllmCore
from assay.engines.vllm.scorer import VllmScorer
from assay.engines.vllm.spec import VllmSpec
from assay.errors import AssayError, UsageError

LENGTH = 24
WINDOWS = [Window(i, tuple((7 * i + 3 * j * j) % VOCAB for j in range(LENGTH))) for i in range(5)]


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(monkeypatch)
    yield


def scorer(**engine: Any) -> tuple[VllmScorer, Engine]:
    spec = VllmSpec("toy", max_num_batched_tokens=engine.get("budget", 8192))
    stand_in = Engine(**engine)
    return VllmScorer(spec, VllmCore(spec, stand_in)), stand_in


JOBS = [
    ScoreJob(batch=5),
    ScoreJob(scored_from=10, batch=2),
    ScoreJob(ScoringPath.CHUNKED, scored_from=10, chunk=4, batch=3),
    ScoreJob(ScoringPath.CHUNKED, scored_from=1, chunk=5, batch=2),
    ScoreJob(ScoringPath.DECODE, scored_from=10, batch=5),
    ScoreJob(ScoringPath.DECODE, scored_from=1, batch=2),
    ScoreJob(ScoringPath.DECODE, scored_from=23, batch=4),
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.path}-{job.scored_from}")
def test_every_path_gives_the_models_states(job: ScoreJob) -> None:
    engine, stand_in = scorer()
    found = list(engine.score_windows(WINDOWS, job))
    assert [rows.window for rows in found] == WINDOWS
    for rows in found:
        torch.testing.assert_close(
            rows.states,
            stand_in.model.states(rows.window.tokens)[job.scored_from - 1 : -1],
            rtol=0,
            atol=0,
        )
        assert rows.logits(0, 2).shape == (min(2, LENGTH - job.scored_from), VOCAB)


def test_each_path_runs_in_its_own_steps() -> None:
    engine, stand_in = scorer()
    for job, steps in zip(JOBS, (1, 3, 2 * 5, 3 * 5, 15, 3 * 23, 2 * 2), strict=True):
        stand_in.steps.clear()
        list(engine.score_windows(WINDOWS, job))
        assert len(stand_in.steps) == steps, job


def test_bytes_read_are_those_of_the_cache_before_each_step() -> None:
    engine, _ = scorer()
    list(engine.score_windows(WINDOWS, JOBS[4]))
    # 10 bytes a token; the steps of tokens 9 … 22 read what came before each.
    assert engine.engagement().bytes_read == 5 * 10 * sum(range(9, 23))
    list(engine.score_windows(WINDOWS, JOBS[0]))
    assert engine.engagement().bytes_read == 0


def test_a_small_cache_or_step_makes_small_batches() -> None:
    engine, stand_in = scorer(cache_tokens=64)
    list(engine.score_windows(WINDOWS, JOBS[0]))
    assert [len(step) for step in stand_in.steps] == [2, 2, 1]
    engine, stand_in = scorer(budget=23)
    list(engine.score_windows(WINDOWS, JOBS[0]))
    assert [len(step) for step in stand_in.steps] == [1] * 5


def test_no_window_fits() -> None:
    engine, _ = scorer(budget=22)
    with pytest.raises(AssayError, match="not one window of 24 tokens fits: a step holds 22"):
        list(engine.score_windows(WINDOWS, JOBS[0]))
    engine, _ = scorer(max_model_len=20)
    with pytest.raises(UsageError, match="max_model_len=20"):
        list(engine.score_windows(WINDOWS, JOBS[0]))


def test_out_of_memory_halves_the_batch_and_goes_on() -> None:
    engine, stand_in = scorer()

    def full(requests: int) -> None:
        if requests > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    stand_in.runner.before_step = full
    found = list(engine.score_windows(WINDOWS, JOBS[4]))
    assert max(len(step) for step in stand_in.steps[1:]) == 2
    for rows in found:
        torch.testing.assert_close(rows.states, stand_in.model.states(rows.window.tokens)[9:-1])
    stand_in.runner.before_step = lambda requests: full(9)
    with pytest.raises(AssayError, match="out of memory"):
        list(engine.score_windows(WINDOWS, JOBS[4]))


def test_an_unforced_token_is_found_out_and_the_engine_can_go_on() -> None:
    engine, stand_in = scorer()
    stand_in.force = False
    with pytest.raises(AssayError, match="other tokens than its own"):
        list(engine.score_windows(WINDOWS, JOBS[4]))
    stand_in.force = True
    assert len(list(engine.score_windows(WINDOWS, JOBS[4]))) == 5


def test_a_scheduler_that_cuts_prompts_is_found_out() -> None:
    engine, stand_in = scorer()
    stand_in.budget = 40
    with pytest.raises(AssayError, match="steps instead of 1"):
        list(engine.score_windows(WINDOWS, JOBS[0]))


def test_a_head_that_is_not_the_engines_is_found_out() -> None:
    engine, stand_in = scorer()
    stand_in.model.compute_logits = lambda states: (
        1.5 * (states @ stand_in.model.lm_head.weight.T)[:, :VOCAB]
    )
    with pytest.raises(AssayError, match="cannot be rebuilt"):
        list(engine.score_windows(WINDOWS, JOBS[0]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: setattr(m.lm_head, "quant_method", object()), "quantised or packed"),
        (lambda m: delattr(m, "logits_processor"), "no lm_head"),
        (lambda m: vars(m.logits_processor).update(soft_cap=30.0, scale=0.5), "caps and scales"),
    ],
)
def test_a_head_without_plain_numbers_is_refused(change: Any, said: str) -> None:
    engine, stand_in = scorer()
    change(stand_in.model)
    with pytest.raises(AssayError, match=said):
        list(engine.score_windows(WINDOWS, JOBS[0]))


def test_a_capped_or_scaled_head_is_rebuilt() -> None:
    for facts in ({"soft_cap": 2.0}, {"scale": 0.25}):
        engine, stand_in = scorer()
        vars(stand_in.model.logits_processor).update(facts)
        plain = stand_in.model.compute_logits
        stand_in.model.compute_logits = (
            (lambda s, f=plain: torch.tanh(f(s) / 2) * 2)
            if "soft_cap" in facts
            else (lambda s, f=plain: f(s) / 4)
        )
        rows = next(iter(engine.score_windows(WINDOWS, JOBS[0])))
        torch.testing.assert_close(
            rows.logits(0, 5), stand_in.model.compute_logits(rows.states[:5])
        )


def test_the_reduction_is_what_the_function_says_of_the_rows() -> None:
    engine, _ = scorer()
    job = ScoreJob(scored_from=10, batch=2)
    rows = list(engine.score_windows(WINDOWS, job))
    references = [StateRows(r.window, r.first, r.states + 0.1, r.head) for r in rows]
    reduced = list(
        engine.reduce_windows(
            [r.window for r in references],
            iter(references),
            job,
            "assay.fidelity.metrics.token_statistics:batch_statistics",
        )
    )
    assert [window for window, _ in reduced] == WINDOWS
    for row, reference, (_, found) in zip(rows, references, reduced, strict=True):
        p = reference.logits(0, 14).double().log_softmax(-1)
        q = row.logits(0, 14).double().log_softmax(-1)
        torch.testing.assert_close(found["kl"], (p.exp() * (p - q)).sum(-1), atol=1e-6, rtol=1e-5)
        gold = torch.tensor(row.window.tokens[10:])[:, None]
        torch.testing.assert_close(
            found["nll_cand"], -q.gather(1, gold)[:, 0], atol=1e-6, rtol=1e-5
        )
        assert math.isfinite(float(found["conf"].sum()))


class Stored:
    """A reference's rows that are there already; says for which windows it was asked."""

    def __init__(self, rows: list[StateRows], as_logits: bool = False) -> None:
        self._rows = {r.window.index: r for r in rows}
        self._as_logits = as_logits
        self.asked: list[int] = []

    def rows(self, windows: Sequence[Window]) -> Iterator[WindowRows]:
        for window in windows:
            self.asked.append(window.index)
            row = self._rows[window.index]
            yield LogitRows(window, row.first, row.logits(0, 99)) if self._as_logits else row


def test_a_comparison_reduces_where_the_engine_is_and_goes_on_after_a_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from assay.fidelity.score import observe
    from assay.runs import Kept

    engine, _ = scorer()
    monkeypatch.setattr(engine, "describe", lambda: {"engine": "vllm"})
    job = ScoreJob(scored_from=10, batch=2)
    rows = list(engine.score_windows(WINDOWS, job))
    reference = Stored([StateRows(r.window, r.first, r.states + 0.1, r.head) for r in rows])
    by_rows = observe(Stored(list(reference._rows.values()), as_logits=True), engine, WINDOWS, job)
    monkeypatch.setattr(engine, "score_windows", None)  # states must not travel any more
    seen: list[int] = []

    def cut(found: Any) -> None:
        seen.append(found.index)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        observe(reference, engine, WINDOWS, job, kept=Kept(tmp_path), on_window=cut)
    reference.asked.clear()
    reduced = observe(reference, engine, WINDOWS, job, kept=Kept(tmp_path))
    assert reference.asked == [2, 3, 4]  # batches are kept whole
    assert [w.index for w in reduced] == [0, 1, 2, 3, 4]
    for one, other in zip(reduced, by_rows, strict=True):
        for name in ("kl", "nll_ref", "nll_cand", "top1", "conf"):
            np.testing.assert_allclose(
                getattr(one, name), getattr(other, name), rtol=1e-5, atol=1e-7
            )
