"""From a decomposition to verdict, findings, JSON and pictures."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from synthetic import configurations, observed, sums

from assay.engines.scoring import Engagement
from assay.errors import AssayError
from assay.fidelity.budget import Budget
from assay.report import console, html, markdown
from assay.verdict import Chart, Report, Severity, Table, Verdict
from assay_lab.gap import gap as run
from assay_lab.gap.buckets import decompose, effect
from assay_lab.gap.checks import check_step, check_sum
from assay_lab.gap.floors import Floors, repeated, repeated_nll
from assay_lab.gap.plan import GapPlan
from assay_lab.gap.report import blocks, headline
from assay_lab.gap.result import CodecGap, GapResult
from assay_lab.gap.verdict import findings_of, verdict_of
from assay_lab.kv.measured import Measured


def outcome(
    *,
    total: float = 0.01,
    left: float = 0.0,
    engine: float = 0.002,
    windows: int = 16,
    **changed: Any,
) -> GapResult:
    """A gap of `total` nats in both currencies, of which `engine` is the engine's and `left` is not
    explained.
    """
    spread = np.linspace(-0.001, 0.001, windows)
    e, whole = (
        sums(spread / 10 + engine, spread / 10 + engine),
        sums(spread + total, spread + total),
    )
    codec = sums(spread + (total - left - engine), spread + (total - left - engine))
    both = sums(spread + total - left, spread + total - left)
    plan = GapPlan(
        "hf:m?dtype=float32", "vllm:m", codec="hadamard(bits=4)", windows=windows, fresh=0
    )
    layers = [("codec.layers.00-01", codec * 0.5), ("codec.layers.02-03", codec * 0.4)]
    steps = [("engine.rounding", e * 0.5), ("engine.kernels", e)]
    d = decompose(steps, codec, both, whole, layers=layers)
    tiny = effect(sums(spread / 1000, np.full(windows, 1e-4)))
    floors = Floors(tiny, tiny, tiny)
    settings: dict[str, Any] = {
        "plan": plan, "decomposition": d, "floors": floors,
        "codec_gap": CodecGap(effect(codec), effect(both - e), effect(both - e - codec)),
        "repeats_kl": repeated(d.repeatability.kl, d.total.kl, floors.repeat_kl),
        "repeats_nll": repeated_nll(d.repeatability.dnll, d.total.dnll, floors.repeat_dnll),
        "same": False, "setup": {}, "text": {"windows_available": 99}, "engines": {},
    }  # fmt: skip
    return GapResult(**settings | changed)


def ids(found: GapResult) -> dict[str, Severity]:
    return {f.id: f.severity for f in findings_of(found)}


def test_an_explained_gap_within_the_margin_passes() -> None:
    found = outcome()
    assert verdict_of(found) is Verdict.PASS
    assert Severity.ERROR not in ids(found).values()
    assert found.causes[0] == "codec"  # the largest comes first
    assert [c for c in found.causes if c.startswith("engine")][:2] == ["engine", "engine.rounding"]
    assert "interaction" not in found.causes and "harness" not in found.causes


def test_a_total_outside_the_margin_fails_and_says_what_caused_it() -> None:
    found = outcome(total=0.3)
    assert verdict_of(found) is Verdict.FAIL
    (finding,) = [f for f in findings_of(found) if f.severity is Severity.ERROR]
    assert finding.id == "gap.outside_margin"
    assert "codec" in finding.causes
    assert "+34.99 %" in finding.title  # e^0.3 − 1


def test_what_does_not_repeat_or_is_undecided_is_inconclusive() -> None:
    found = outcome(left=0.004)
    assert verdict_of(found) is Verdict.INCONCLUSIVE
    assert ids(found)["gap.not_repeated"] is Severity.WARNING
    few = outcome(windows=6)
    assert verdict_of(few) is Verdict.INCONCLUSIVE
    assert "gap.undecided" in ids(few)


def test_other_settings_of_the_model_fail_where_they_show() -> None:
    differences = {"rope": ({"rope_theta": 1e4}, {"rope_theta": 5e3})}
    shown = outcome(setup=differences)
    assert verdict_of(shown) is Verdict.FAIL
    (finding,) = [f for f in findings_of(shown) if f.id == "gap.setup_difference"]
    assert finding.severity is Severity.ERROR and "rope" in finding.title
    hidden = outcome(engine=1e-4, setup=differences)
    assert verdict_of(hidden) is Verdict.PASS
    assert ids(hidden)["gap.setup_difference"] is Severity.WARNING


def test_engines_that_differ_by_more_than_rounding_are_named() -> None:
    assert (
        ids(outcome(engine=0.004)).get("gap.engine_above_floor") is None
    )  # rounding explains half of it
    spread = np.linspace(-1e-5, 1e-5, 16)
    rounding, engine = (sums(spread + x, spread + x) for x in (0.0002, 0.005))
    steps = [("engine.rounding", rounding), ("engine.kernels", engine)]
    base = outcome()
    found = replace(base, decomposition=decompose(steps, engine, engine * 2, engine * 2))
    assert ids(found)["gap.engine_above_floor"] is Severity.WARNING


def test_too_little_text_is_said() -> None:
    assert ids(outcome(text={"windows_available": 3}))["gap.fewer_windows"] is Severity.WARNING


def test_a_report_can_be_drawn_everywhere_and_is_plain_json() -> None:
    found = outcome()
    report = Report(
        "gap", verdict_of(found), findings=findings_of(found), results=found.to_json(),
        headline=headline(found), blocks=blocks(found),
    )  # fmt: skip
    body = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert set(body["results"]["buckets"][0]) >= {"name", "dnll", "lo", "hi", "share"}
    assert set(body["results"]["total"]) >= {"value", "lo", "hi"}
    assert set(body["results"]["repeatability"]) >= {"value", "lo", "hi"}
    assert body["results"]["closure"] == body["results"]["repeatability"]  # the name of version 0.1
    assert sum(b["share"] for b in body["results"]["buckets"]) == pytest.approx(1, abs=1e-6)
    stream = io.StringIO()
    console.print_report(report, file=stream, verbose=True)
    for text in (stream.getvalue(), html.render(report), markdown.render(report)):
        assert "codec.together" in text and "interaction" in text
    (waterfall,) = [b for b in report.blocks if isinstance(b, Chart) and b.kind == "waterfall"]
    assert [p.x for p in waterfall.series[0].points] == [
        "engine", "codec", "interaction", "harness", "repeatability",
    ]  # fmt: skip
    assert sum(p.y for p in waterfall.series[0].points) == pytest.approx(
        waterfall.series[1].points[0].y
    )


def test_the_tables_of_either_engine_are_set_side_by_side() -> None:
    def entry(kl: float) -> dict[str, Any]:
        bounds = {"value": kl, "lo": kl - 0.01, "hi": kl + 0.01}
        return {**bounds, "kl": bounds}

    found = {
        "reference": entry(0.05),
        "candidate": entry(0.06),
        "candidate_minus_reference": entry(0.01),
    }
    report = blocks(outcome(calibration={"reference": found, "candidate": found}))
    (table,) = [b for b in report if isinstance(b, Table) and "tables of either" in b.title]
    assert [row[:3] for row in table.rows[:3]] == [
        ["reference", "the reference's", "0.05 [0.04, 0.06]"],
        ["reference", "the candidate's", "0.06 [0.05, 0.07]"],
        ["reference", "difference of both", "0.01 [0, 0.02]"],
    ]
    assert len(table.rows) == 6
    assert not [
        b for b in blocks(outcome()) if isinstance(b, Table) and "tables of either" in b.title
    ]


def test_a_small_or_negative_share_is_no_cause() -> None:
    spread = np.linspace(-1e-5, 1e-5, 16)
    engine, codec = (sums(spread + x, spread + x) for x in (-0.002, 0.1))
    found = outcome()
    d = decompose([("engine.kernels", engine)], codec, engine + codec, engine + codec)
    assert d.bucket("engine").separated
    assert replace(found, decomposition=d).causes == ["codec"]
    small = sums(spread + 0.004, spread + 0.004)
    d = decompose([("engine.kernels", small)], codec, small + codec, small + codec)
    assert d.bucket("engine").separated and d.bucket("engine").share_kl == pytest.approx(
        0.04, abs=0.005
    )
    assert replace(found, decomposition=d).causes == ["codec"]


def test_two_engines_without_a_codec_have_parts_of_one_bucket() -> None:
    spread = np.linspace(-1e-4, 1e-4, 16)
    rounding, whole = (sums(spread + x, spread + x) for x in (0.001, 0.005))
    d = decompose([("engine.rounding", rounding), ("engine.kernels", whole)], total=whole)
    plan = GapPlan("hf:m", "vllm:m", windows=16, fresh=0)
    found = outcome(plan=plan, decomposition=d, codec_gap=None)
    assert [b.name for b in d.buckets] == ["engine"]
    assert [p.name for p in d.bucket("engine").parts] == ["engine.rounding", "engine.kernels"]
    assert sum(p.effect.kl.value for p in d.bucket("engine").parts) == pytest.approx(
        d.total.kl.value
    )
    body = json.loads(json.dumps(Report("gap", Verdict.PASS, results=found.to_json()).to_json()))[
        "results"
    ]
    assert (body["codec_gap"], body["orders"], body["bytes"]) == (None, {}, None)
    titles = [b.title for b in blocks(found)]
    assert "Both orders" not in titles and "Where the difference comes from" in titles
    assert "codec, candidate − reference" not in [m.name for m in headline(found)]
    assert all("with " not in f.title for f in findings_of(found))


def seen_of(name: str, scale: float, count: int = 12) -> list[Any]:
    """Windows whose distributions are moved from the reference towards another by `scale`."""
    found, reference, gold = configurations([name], windows=count)
    moved = [r + scale * (q - r) for r, q in zip(reference, found[name], strict=True)]
    moved = [m - np.log(np.exp(m).sum(-1, keepdims=True)) for m in moved]
    return [observed(i, *w) for i, w in enumerate(zip(reference, moved, gold, strict=True))]


def test_the_sum_can_fail_on_fresh_windows() -> None:
    found = outcome()
    total = (
        found.decomposition.bucket("engine").effect.kl.value
        + found.decomposition.bucket("codec").effect.kl.value
    )
    for factor, holds in ((1.0, True), (1.1, True), (2.0, False), (0.3, False)):
        fresh = seen_of("a", 1.0)
        for window in fresh:
            window.kl[:] = total * factor
        check = check_sum(found.decomposition, fresh, found.floors)
        assert check.holds is holds
        assert check.measured.value == pytest.approx(total * factor)
    failed = replace(found, checks=[check])
    assert (
        verdict_of(failed) is Verdict.INCONCLUSIVE
        and ids(failed)["gap.not_foretold"] is Severity.WARNING
    )
    assert any("foretell" in b.title for b in blocks(failed))


def test_a_step_that_was_measured_directly_can_fail_the_bucket() -> None:
    found = outcome()
    before, after = seen_of("a", 0.1), seen_of("a", 0.4)
    direct = seen_of("a", 0.4)
    for window, start in zip(direct, before, strict=True):
        window.nll_ref[:] = start.nll_cand
    assert check_step(
        "engine.kernels", direct, before, after, found.decomposition, found.floors
    ).holds
    wrong = seen_of("a", 0.4)  # against the reference, not against the engine before
    for window in wrong:
        window.nll_cand[:] += 0.1
    check = check_step("engine.kernels", wrong, before, after, found.decomposition, found.floors)
    assert not check.holds and check.quantity == "dnll"


def test_repeatability_sees_a_run_that_drifts_and_the_checks_see_a_bucket_that_is_wrong() -> None:
    right = outcome()
    assert right.repeats and verdict_of(right) is Verdict.PASS
    drifted = outcome(left=0.002)  # the second run comes out 20 % lower than the path
    assert not drifted.repeats and verdict_of(drifted) is Verdict.INCONCLUSIVE

    # A codec bucket of twice its size: the interaction takes it back, and the total repeats as
    # before.
    spread = np.linspace(-0.001, 0.001, 16)
    e, codec, whole = (sums(spread / 10 + x, spread / 10 + x) for x in (0.002, 0.016, 0.01))
    wrong = replace(right, decomposition=decompose([("engine.kernels", e)], codec, whole, whole))
    assert wrong.repeats and wrong.decomposition.repeatability.kl.value == pytest.approx(0)
    assert wrong.decomposition.bucket("interaction").effect.kl.value == pytest.approx(-0.008)
    fresh = seen_of("a", 1.0)
    for window in fresh:
        window.kl[:] = 0.01
    caught = replace(wrong, checks=[check_sum(wrong.decomposition, fresh, wrong.floors)])
    assert verdict_of(wrong) is Verdict.PASS and verdict_of(caught) is Verdict.INCONCLUSIVE


class Scripted:
    """Runs that answers from a script and is interrupted or fails before its `last` measurement."""

    def __init__(self, plan: GapPlan, last: int, failure: BaseException) -> None:
        self.plan, self.left, self.failure = plan, last, failure
        self.facts: dict[str, Any] = {}
        self.budget = Budget()
        self.measured: dict[str, Measured] = {}
        self.windows = {"main": [0] * 12, "fresh": []}
        self.text = {"windows_available": 99}

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def affords(self, *_: object) -> bool:
        return True

    def anchor(self, *_: object) -> None:
        pass

    def states(self, spec: str) -> bool:
        return True

    def notices(self) -> list[Any]:
        return []

    def engine(self, *_: object) -> Any:
        return SimpleNamespace(ability=SimpleNamespace(hooks=False))

    def between(self, anchor: Any, other: Any) -> Measured:
        return Measured(seen_of("a", 0.1))

    def measure(self, config: Any, anchor: Any, windows: str = "main") -> Measured:
        if not self.left:
            raise self.failure
        self.left -= 1
        notes = {"kv": {"cache": {"layers": 2}, "streams": {}}}
        found = Measured(seen_of("a", 0.5 if config.codec else 0.1), Engagement(notes=notes))
        self.measured[config.label] = found
        return found


@pytest.mark.parametrize("last", [1, 4, 6])
@pytest.mark.parametrize(
    "failure", [KeyboardInterrupt(), AssayError("it broke", finding_id="gap.nonfinite")]
)
def test_what_was_measured_is_shown_however_a_run_ends(
    last: int, failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "RunCache", lambda plan, progress: Scripted(plan, last, failure))
    monkeypatch.setattr(run.Corners, "preflight", lambda self: None)
    report = run.run_gap(
        GapPlan("hf:m", "hf:m?attention=eager", codec="fp8", phases=(1,), windows=12, fresh=0)
    )
    interrupted = isinstance(failure, KeyboardInterrupt)
    assert report.exit_code == (130 if interrupted else 2)
    assert report.verdict is (Verdict.INCONCLUSIVE if interrupted else Verdict.ERROR)
    assert report.findings[0].id == ("gap.interrupted" if interrupted else "gap.nonfinite")
    body = report.to_json()["results"]
    if last == 1:  # the codec on the reference alone
        assert list(body["measured"]) == ["hf:m, fp8, inforward"]
        assert report.blocks[0].rows[0][0] == "hf:m, fp8, inforward"
    else:  # the path is known
        assert [b["name"] for b in body["buckets"]] == ["engine", "codec", "interaction", "harness"]
        assert body["repeatability"] is None and body["total"]["measured_apart"] is False
        assert all(b["lo"] < b["hi"] for b in body["buckets"][:2])
        assert (body["floors"]["candidate"] is not None) == (last > 4)
        assert report.headline and report.blocks
