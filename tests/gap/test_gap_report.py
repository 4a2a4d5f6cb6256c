"""From a decomposition to verdict, findings, JSON and pictures."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from synthetic import configurations, observed, sums

from assay.engines.scoring import Engagement
from assay.lab.gap import gap as run
from assay.lab.gap.bench import Bench
from assay.lab.gap.buckets import decompose, effect
from assay.lab.gap.outcome import CodecGap, Floors, Outcome, closed, closed_nll
from assay.lab.gap.plan import GapPlan
from assay.lab.gap.report import blocks, findings_of, headline, verdict_of
from assay.lab.kv.lab import Measured
from assay.report import console, html, markdown
from assay.verdict import Chart, Report, Severity, Table, Verdict


def outcome(
    *, total: float = 0.01, left: float = 0.0, engine: float = 0.002, windows: int = 16, **changed: Any
) -> Outcome:
    """A gap of `total` nats in both currencies, of which `engine` is the engine's and `left` is not explained."""
    spread = np.linspace(-0.001, 0.001, windows)
    e, whole = sums(spread / 10 + engine, spread / 10 + engine), sums(spread + total, spread + total)
    codec = sums(spread + (total - left - engine), spread + (total - left - engine))
    both = sums(spread + total - left, spread + total - left)
    plan = GapPlan("hf:m?dtype=float32", "vllm:m", "hadamard(bits=4)", windows=windows, fresh=0)
    layers = [("codec.layers.00-01", codec * 0.5), ("codec.layers.02-03", codec * 0.4)]
    steps = [("engine.rounding", e * 0.5), ("engine.kernels", e)]
    d = decompose(steps, codec, both, whole, layers=layers)
    tiny = effect(sums(spread / 1000, np.full(windows, 1e-4)))
    floors = Floors(tiny, tiny, tiny)
    settings: dict[str, Any] = {
        "plan": plan, "decomposition": d, "floors": floors,
        "codec_gap": CodecGap(effect(codec), effect(both - e), effect(both - e - codec)),
        "closed_kl": closed(d.closure.kl, d.total.kl, floors.repeat_kl),
        "closed_nll": closed_nll(d.closure.dnll, d.total.dnll, floors.repeat_dnll),
        "same": False, "setup": {}, "text": {"windows_available": 99}, "engines": {},
    }  # fmt: skip
    return Outcome(**settings | changed)


def ids(found: Outcome) -> dict[str, Severity]:
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


def test_what_does_not_close_or_is_undecided_is_inconclusive() -> None:
    found = outcome(left=0.004)
    assert verdict_of(found) is Verdict.INCONCLUSIVE
    assert ids(found)["gap.not_closed"] is Severity.WARNING
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
    assert ids(outcome(engine=0.004)).get("gap.engine_above_floor") is None  # rounding explains half of it
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
    assert set(body["results"]["closure"]) >= {"value", "lo", "hi"}
    assert sum(b["share"] for b in body["results"]["buckets"]) == pytest.approx(1, abs=1e-6)
    stream = io.StringIO()
    console.print_report(report, file=stream, verbose=True)
    for text in (stream.getvalue(), html.render(report), markdown.render(report)):
        assert "codec.together" in text and "interaction" in text
    (waterfall,) = [b for b in report.blocks if isinstance(b, Chart) and b.kind == "waterfall"]
    assert [p.x for p in waterfall.series[0].points] == [
        "engine", "codec", "interaction", "harness", "left over",
    ]  # fmt: skip
    assert sum(p.y for p in waterfall.series[0].points) == pytest.approx(waterfall.series[1].points[0].y)


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
    assert not [b for b in blocks(outcome()) if isinstance(b, Table) and "tables of either" in b.title]


def test_an_interrupted_run_prints_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    found, reference, gold = configurations(["a"])
    seen = [observed(i, *w) for i, w in enumerate(zip(reference, found["a"], gold, strict=True))]

    class Interrupted(Bench):
        def __enter__(self) -> Bench:
            self.measured["hf:m, fp8, inforward | against hf:m"] = Measured(seen, Engagement())
            raise KeyboardInterrupt

    monkeypatch.setattr(run, "Bench", Interrupted)
    report = run.run_gap(GapPlan("hf:m", "hf:m", "fp8"))
    assert report.exit_code == 130
    (entry,) = report.results["measured"].values()
    assert entry["kl"]["value"] == pytest.approx(np.concatenate([w.kl for w in seen]).mean())
