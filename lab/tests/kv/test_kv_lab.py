"""One lab for all commands: a reference that is scored once, measurements that go on, reports of
what was cut short.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from assay.engines.hf.scorer import HfScorer
from assay.engines.hf.spec import HfSpec
from assay.engines.scoring import ScoreJob, TokenizerFacts, Window, WindowRows
from assay.errors import AssayError
from assay.fidelity.budget import Budget, OutOfTime
from assay.fidelity.pace import Pace
from assay.fidelity.plan import Plan
from assay.verdict import Severity, Verdict
from assay_lab.kv import evaluator as evaluator_module
from assay_lab.kv import opening
from assay_lab.kv import sweep as sweep_module
from assay_lab.kv.allocate import run_allocate
from assay_lab.kv.attribute import run_attribute
from assay_lab.kv.cache_shape import cache_shape
from assay_lab.kv.eval import run_eval
from assay_lab.kv.evaluator import CodecEvaluator, Fitting, Passages, ScoringSetup, memory_is_enough
from assay_lab.kv.hook_plan import Mode
from assay_lab.kv.interruption import Unfinished
from assay_lab.kv.layer_coders import LayerCoders
from assay_lab.kv.noise import run_noise
from assay_lab.kv.opening import Work
from assay_lab.kv.rotary import Rotary
from assay_lab.kv.sweep import run_sweep
from assay_lab.options import AllocationPlan, AttributionPlan, EvalPlan, NoisePlan, SweepPlan
from kv.test_kv_hook import LAYERS, LENGTH, model, windows

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))


class Tiny(HfScorer):
    """A model that is built, not loaded. It notes what it scores, and is interrupted after `last`
    windows.
    """

    scored: list[tuple[str, int]]

    def __init__(self) -> None:
        net = model()
        with torch.no_grad():
            for weight in net.parameters():
                weight.mul_(4.0 if weight.ndim > 1 else 1.0)
        facts = lambda: {"engine": "hf"}  # noqa: E731
        super().__init__(
            cast(
                Any,
                SimpleNamespace(
                    model=net, spec=HfSpec("small"), describe=facts, close=lambda: None
                ),
            )
        )
        self.scored, self.last, self.failure = [], 10**9, cast(BaseException, KeyboardInterrupt())

    @property
    def tokenizer(self) -> TokenizerFacts:
        return TokenizerFacts(
            "0" * 64, 100, None, lambda text: [1 + ord(c) % 99 for c in text], str
        )

    def score_windows(self, windows: Sequence[Window], job: ScoreJob) -> Iterator[WindowRows]:
        for rows in super().score_windows(windows, job):
            if len(self.scored) >= self.last:
                raise self.failure
            self.scored.append(("codec" if job.hook else "exact", rows.window.index))
            yield rows


def set_pace(monkeypatch: pytest.MonkeyPatch, measure: Any) -> None:
    """`measure` in place of what finds the speed of a model."""
    for module in (opening, evaluator_module):
        monkeypatch.setattr(module, "measure_pace", measure)


def lab(
    engine: Tiny, mode: Mode = Mode.INFORWARD, count: int = 6, block: int = 1
) -> CodecEvaluator:
    net = engine.engine.model
    layer_coders = LayerCoders(cache_shape(net), Rotary(net, LENGTH))
    return CodecEvaluator(
        engine,
        ScoringSetup("hf:small", mode, 2, block),
        Passages(windows(count)),
        Fitting(layer_coders),
    )


def numbers(measured: Any) -> Any:
    return np.concatenate([w.kl for w in measured.seen]).tolist()


def test_the_exact_cache_is_scored_once_for_all_codecs_and_commands() -> None:
    first, second = Tiny(), Tiny()
    one = lab(first)
    fp8 = one.measure("fp8")
    one.measure("hadamard(bits=4)")
    assert [w for what, w in first.scored if what == "exact"] == [0, 1, 2, 3, 4, 5]
    again = lab(second)
    assert numbers(again.measure("fp8")) == numbers(fp8) and second.scored == []
    assert again.measure("fp8").bytes == fp8.bytes
    again.measure("int(bits=4)")
    assert {what for what, _ in second.scored} == {"codec"}
    # Another mode, and windows in other company, are other numbers.
    lab(second, Mode.DECODE).measure("fp8")
    assert second.scored[6:12] == [("exact", i) for i in range(6)]
    assert numbers(lab(second).measure("identity")) == [0.0] * (6 * (LENGTH - 1))


def test_tokens_that_are_fed_together_give_the_numbers_of_one_at_a_time() -> None:
    engine = Tiny()
    alone = lab(engine, Mode.DECODE).measure("hadamard(bits=3)")
    blocks = lab(engine, Mode.DECODE, block=7)
    together = blocks.measure("hadamard(bits=3)")
    np.testing.assert_allclose(numbers(together), numbers(alone), rtol=1e-3, atol=1e-6)
    assert together.bytes == alone.bytes
    # Nothing of the other path was read: exact and coded windows were scored by each.
    assert len(engine.scored) == 4 * 6
    assert numbers(blocks.measure("identity")) == [0.0] * len(numbers(alone))


def test_a_codec_on_another_text_is_measured_and_sized_by_that_text_alone() -> None:
    def facts(of: CodecEvaluator) -> Any:
        found = of.measure("int(bits=4)", measure_windows=6)
        return (
            found.bytes,
            found.windows,
            found.engagement.fires,
            found.engagement.notes["kv"]["streams"],
        )

    one = lab(Tiny())
    first = facts(one)
    # Numbered anew, as the windows of another text are.
    others = [Window(i, tuple(reversed(w.tokens))) for i, w in enumerate(one.windows)]
    second = facts(one.on(others))
    alone = one.on(others)
    alone._kept = alone._kept.within("apart")
    assert second == facts(alone)
    assert second != first == facts(one)


def test_an_interrupted_measurement_goes_on_by_whole_batches_with_the_same_numbers(
    tmp_path: Path,
) -> None:
    whole = lab(Tiny()).measure("hadamard(bits=4)", measure_windows=6)
    for file in tmp_path.rglob("*"):
        file.unlink() if file.is_file() else None
    engine = Tiny()
    engine.last = 6 + 3  # the exact cache, one batch, and half of another
    one = lab(engine)
    with pytest.raises(KeyboardInterrupt):
        one.measure("hadamard(bits=4)", measure_windows=6)
    assert one.partial is not None and [w.index for w in one.partial.seen] == [0, 1, 2]
    engine.last = 10**9
    engine.scored.clear()
    rest = one.measure("hadamard(bits=4)", measure_windows=6)
    assert engine.scored == [("codec", i) for i in (2, 3, 4, 5)]
    assert numbers(rest) == numbers(whole)
    assert rest.engagement.fires is not None and rest.engagement.fires >= (
        whole.engagement.fires or 0
    )
    assert rest.bytes is not None and whole.bytes is not None
    assert rest.bytes.ratio == pytest.approx(whole.bytes.ratio)


def test_a_damaged_state_is_scored_again(tmp_path: Path) -> None:
    one = lab(Tiny())
    one.measure("fp8")
    for file in (tmp_path / "states").iterdir():
        file.write_bytes(file.read_bytes()[:-9])
    engine = Tiny()
    again = lab(engine)
    again.measure("int(bits=4)")
    assert [w for what, w in engine.scored if what == "exact"] == [0, 1, 2, 3, 4, 5]
    assert [f.id for f in again.notices()] == ["kv.kept_damaged"]


# Commands that are cut short.

RUNS: dict[str, tuple[Callable[..., Any], Any]] = {
    "eval": (run_eval, EvalPlan("hf:small", "hadamard(bits=4)", windows=8, length=LENGTH, batch=2)),
    "attribute": (
        run_attribute,
        AttributionPlan("hf:small", "hadamard(bits=4)", windows=4, length=LENGTH, batch=2),
    ),
    "noise": (run_noise, NoisePlan("hf:small", windows=4, length=LENGTH, batch=2)),
    "sweep": (
        run_sweep,
        SweepPlan(
            "hf:small", codecs=("fp8", "int(bits=4)"), windows=4, fresh=4, length=LENGTH, batch=2
        ),
    ),
    "allocate": (
        run_allocate,
        AllocationPlan(
            "hf:small", "hadamard(bits=4)", 4.0, windows=4, fresh=8, length=LENGTH, batch=2
        ),
    ),
}
PARTS = {
    "attribute": "parts",
    "noise": "curves",
    "sweep": "rows",
    "allocate": "parts",
    "eval": "per_window",
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Tiny:
    engine = Tiny()
    monkeypatch.setattr(opening, "open_scorer", lambda spec: engine)
    return engine


@pytest.mark.parametrize("name", RUNS)
def test_an_interrupt_shows_what_there_is_and_the_same_command_goes_on(
    name: str, tiny: Tiny
) -> None:
    run, plan = RUNS[name]
    tiny.last = 3 if name != "eval" else 8 + 3
    empty = run(plan)
    if name != "eval":  # nothing was measured yet
        assert (empty.exit_code, empty.verdict) == (130, Verdict.INCONCLUSIVE)
        assert not empty.results.get(PARTS[name])
        tiny.last = len(tiny.scored) + (4 if name == "sweep" else 4 * 3) + 3
    cut = run(plan)
    assert (cut.exit_code, cut.verdict) == (130, Verdict.INCONCLUSIVE)
    assert "kv.interrupted" in [f.id for f in cut.findings]
    assert cut.results[PARTS[name]] and cut.headline and cut.blocks
    tiny.last, before = 10**9, len(tiny.scored)
    whole = run(plan)
    assert whole.exit_code != 130 and len(whole.results[PARTS[name]]) >= len(
        cut.results[PARTS[name]]
    )
    before, done = len(tiny.scored), len(tiny.scored) - before
    assert done > 0
    assert (
        run(plan).to_json()["results"] == whole.to_json()["results"] and len(tiny.scored) == before
    )  # all of it is kept


def test_an_error_half_way_shows_what_there_is(tiny: Tiny) -> None:
    run, plan = RUNS["attribute"]
    tiny.last, tiny.failure = 4 + 4 * 3, RuntimeError("DefaultCPUAllocator: can't allocate memory")
    report = run(plan)
    assert (report.exit_code, report.verdict) == (2, Verdict.ERROR)
    assert (
        "out of memory" in report.findings[0].title
        and report.findings[0].severity is Severity.ERROR
    )
    assert (
        len(report.results["parts"]) == 2
        and report.results["joint"]
        and report.results["additivity_ratio"] is None
    )


def test_a_budget_that_ends_names_the_parts_that_it_left_out(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_pace(monkeypatch, lambda *_: Pace(1e-6, 1e-6))
    monkeypatch.setattr(
        Budget, "left", lambda self: 17.0 - len(tiny.scored)
    )  # the exact cache, all parts, two alone
    run, plan = RUNS["attribute"]
    report = run(replace(plan, budget=5.0))
    assert (report.exit_code, report.verdict) == (3, Verdict.INCONCLUSIVE)
    assert report.results["joint"] and len(report.results["parts"]) == 3
    missing = f"{2 * LAYERS - 3} of {2 * LAYERS} parts, those behind 1.k"
    assert [f.id for f in report.findings] == ["fidelity.budget"] and missing in report.findings[
        0
    ].title
    assert report.results["times"]["left_out"][0]["what"] == missing
    run, plan = RUNS["allocate"]
    tiny.scored.clear()
    report = run(replace(plan, budget=5.0))
    assert (report.exit_code, report.results["bits"], report.results["fresh_windows"]) == (
        3,
        [],
        None,
    )
    assert report.results["parts"] and "and what comes after it" in report.findings[0].title


def test_a_sweep_without_a_grade_chooses_nothing(tiny: Tiny) -> None:
    report = run_sweep(
        SweepPlan(
            "hf:small",
            codecs=("fp8", "hadamard(bits=3)"),
            windows=4,
            fresh=4,
            length=LENGTH,
            batch=2,
        )
    )
    assert (report.exit_code, report.results["winner"]) == (3, None)
    assert [m.name for m in report.headline] == ["least KL"]
    assert report.findings[0].id == "kv.undecided"
    rejected = run_sweep(
        SweepPlan(
            "hf:small", codecs=("noise(sigma=8)",), windows=8, fresh=0, length=LENGTH, batch=8
        )
    )
    assert rejected.results["rows"][0]["grade"] == "REJECT"
    assert (rejected.exit_code, rejected.findings[0].id) == (1, "kv.none_accepted")


def test_intervals_of_kl_do_not_go_below_zero(tiny: Tiny) -> None:
    plan = AttributionPlan("hf:small", "hadamard(bits=2)", windows=2, length=LENGTH, batch=2)
    parts = run_attribute(plan).results["parts"]
    assert len(parts) == 2 * LAYERS
    assert all(0 <= p["kld"]["lo"] <= p["kld"]["value"] <= p["kld"]["hi"] for p in parts)


def test_a_sweep_whose_time_ends_behind_the_exact_cache_says_what_it_left_out(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_pace(monkeypatch, lambda *_: Pace(1e-6, 1e-6))
    plan = SweepPlan(
        "hf:small", codecs=("fp8",), windows=8, fresh=8, length=LENGTH, batch=8, budget=5.0
    )
    for ends_after, rows in (
        (2 * 8 + 4, 1),
        (4, 0),
    ):  # within the exact cache of the fresh windows, and of the others
        for kept in Path(os.environ["ASSAY_CACHE"]).iterdir():
            shutil.rmtree(kept)
        tiny.scored.clear()
        monkeypatch.setattr(Budget, "left", lambda self, n=ends_after: float(n - len(tiny.scored)))
        monkeypatch.setattr(sweep_module, "_fresh_that_fit", lambda row, count, budget: count)
        if not rows:
            with pytest.raises(OutOfTime, match="scoring the exact cache took it"):
                run_sweep(plan)
            continue
        report = run_sweep(plan)
        assert report.exit_code in (0, 3) and len(report.results["rows"]) == 1
        assert report.results["winner"] is None or report.results["winner"]["fresh_windows"] is None
        assert "fresh windows" in report.findings[0].title


def test_where_one_token_at_a_time_does_not_fit_some_are_fed_together(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    paces = {"decode": Pace(1.0, 1e-6), "chunked": Pace(1e-6, 1e-6)}
    set_pace(monkeypatch, lambda engine, plan, text: paces[plan.path])
    plan = SweepPlan(
        "hf:small", codecs=("fp8",), windows=8, fresh=0, length=LENGTH, batch=8, budget=1.0
    )
    report = run_sweep(plan)
    assert report.subject["plan"]["block"] == 16 and len(report.results["rows"]) == 1
    assert report.findings[0].title == "the budget of 60 s left out feeding tokens one at a time"
    evaluated = run_eval(EvalPlan("hf:small", "fp8", windows=8, length=LENGTH, batch=8, budget=1.0))
    assert evaluated.results["block"] == 16
    for codec in ("int(bits=4)", "recent(n=8)+fp8", "mean(of=block)+hadamard(bits=4)"):
        with pytest.raises(OutOfTime, match="too small for any answer"):
            run_eval(EvalPlan("hf:small", codec, windows=8, length=LENGTH, batch=8, budget=1.0))
    paces["chunked"] = paces["decode"]
    with pytest.raises(OutOfTime, match="too small for any answer"):
        run_eval(
            EvalPlan("hf:small", "hadamard(bits=4)", windows=8, length=LENGTH, batch=8, budget=1.1)
        )


def test_as_many_fresh_windows_are_measured_as_there_is_time_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget, row = Budget(100.0), {"score_s": 20.0, "windows": 10}
    budget.took["the exact cache"] = 10.0  # three seconds a window
    for left, many in ((100.0, 16), (47.0, 15), (36.0, 12), (23.0, 0), (-1.0, 0), (math.inf, 16)):
        monkeypatch.setattr(Budget, "left", lambda self, left=left: left)
        assert sweep_module._fresh_that_fit(row, 16, budget) == many


def test_only_a_lack_of_memory_is_called_one() -> None:
    for error in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    ):
        with pytest.raises(AssayError, match="out of memory") as caught, memory_is_enough("hf:m"):
            raise error
        assert "--batch" in caught.value.remedy
    with pytest.raises(RuntimeError, match="other"), memory_is_enough("hf:m"):
        raise RuntimeError("other")


def test_an_error_before_anything_was_measured_is_not_held_back() -> None:
    with pytest.raises(AssayError, match="no"), Unfinished(lambda: False):
        raise AssayError("no", finding_id="kv.usage")
    with Unfinished(lambda: True) as cut:
        raise AssayError("no", finding_id="kv.usage")
    assert cut.verdict(Verdict.PASS) is Verdict.ERROR and cut.verdict(Verdict.FAIL) is Verdict.FAIL


def test_where_not_all_codecs_fit_the_first_ones_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A budget of 3 minutes, and the speed of Qwen2.5 0.5B by decode on two busy cores."""
    pace = Pace(score=0.012, compare=0.0015)
    set_pace(monkeypatch, lambda *_: pace)
    plan = Plan("hf:small", ("hf:small",), windows=16, length=1024)
    engine = cast(Any, None)
    sizes = {
        n: opening._that_fit(plan, 16, engine, Work(Budget(180.0), n, 1))[:2] for n in (1, 2, 3, 20)
    }
    assert sizes[1] == (16, 256) and sizes[2] == sizes[3] == sizes[20]
    assert sizes[2][0] >= 8 and sizes[2][1] == 256
    with pytest.raises(OutOfTime, match="too small for any answer"):
        opening._that_fit(plan, 16, engine, Work(Budget(60.0), 20, 1))
    with pytest.raises(
        OutOfTime, match="too small for any answer"
    ):  # a control is no use if it is left out
        opening._that_fit(plan, 16, engine, Work(Budget(180.0), 20, 20))
