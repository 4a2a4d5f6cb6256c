"""Margins as tests, pairs of candidates, and the power line, on invented windows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from assay.errors import UsageError
from assay.fidelity.breakdown.floors import Floors
from assay.fidelity.compare_report import implausible
from assay.fidelity.control import against_control, control_findings, controlled
from assay.fidelity.engaged import Engaged
from assay.fidelity.findings import findings_of
from assay.fidelity.interim import InterimAnalyses
from assay.fidelity.margin_tests import margin_tests
from assay.fidelity.names import label_of
from assay.fidelity.observation import WindowObservation
from assay.fidelity.pairs import all_pairs
from assay.fidelity.plan import Plan
from assay.fidelity.power import power_of
from assay.fidelity.report import blocks, pareto, short_names
from assay.fidelity.result import CandidateResult, verdict_of
from assay.fidelity.summary import summarise
from assay.stats import Resampling
from assay.stats.equivalence import Grade, Margins
from assay.stats.multiplicity import confidence_of_analysis
from assay.stats.non_inferiority import Standing
from assay.verdict import Chart, Severity, Table, Verdict

TOKENS = 40
PLAN = Plan("hf:a", ("hf:b", "hf:c"))


def window(index: int, shift: float, spread: float, wrong: float, seed: int) -> WindowObservation:
    rng = np.random.default_rng([seed, index])
    own = rng.normal(0, spread) + shift
    nll = rng.exponential(2.0, TOKENS)
    kl = np.abs(rng.normal(0.01 + abs(shift), 0.002, TOKENS))
    return WindowObservation(
        index,
        1,
        rng.integers(0, 90, TOKENS + 1).astype(np.int32),
        nll,
        nll + own + rng.normal(0, 0.02, TOKENS),
        kl,
        kl,
        same := rng.random(TOKENS) >= wrong,
        *(rng.random(TOKENS) for _ in range(3)),
        np.sqrt(kl / 2),
        ~same,
    )


@pytest.fixture
def result() -> Callable[..., CandidateResult]:
    def make(label: str, windows: int = 12, **how: Any) -> CandidateResult:
        settings = {"shift": 0.0, "spread": 0.002, "wrong": 0.02, "seed": 1} | how
        size = settings.pop("size", None)
        zero_share = settings.pop("zero_share", 0.0)
        seen = [window(i, **settings) for i in range(windows)]
        return CandidateResult(
            label=label,
            summary=summarise(seen, Margins(), Resampling(200, 0)),
            engaged=Engaged(True, None, None, zero_share),
            seen=seen,
            self_test=label == "self",
            engine={"weight_bytes": size},
            breakdowns={"depth": [], "confidence": [], "class": []},
            worst=[],
            floors=Floors(0.001),
        )

    return make


def test_p_values_of_margins_are_those_of_scipy(result: Callable[..., CandidateResult]) -> None:
    found = result("a", shift=0.004)
    tests = {(t.metric, t.grade): t for t in margin_tests([found.summary], PLAN)[0]}
    means = np.array([w.dnll.mean() for w in found.seen])
    above = stats.ttest_1samp(means, math.log1p(-0.01), alternative="greater").pvalue
    below = stats.ttest_1samp(means, math.log1p(0.01), alternative="less").pvalue
    assert tests["dppl_pct", "ACCEPT"].p == pytest.approx(max(above, below), rel=1e-9)
    shares = np.array([w.top1.mean() for w in found.seen])
    top1 = stats.ttest_1samp(shares, 0.95, alternative="greater").pvalue
    assert tests["top1_pct", "ACCEPT"].p == pytest.approx(top1, rel=1e-9)
    assert tests["dppl_pct", "MARGINAL"].p < tests["dppl_pct", "ACCEPT"].p


def test_holm_counts_all_margins_of_all_candidates(result: Callable[..., CandidateResult]) -> None:
    rows = margin_tests([result("a").summary, result("b", shift=0.02, seed=2).summary], PLAN)
    flat = [t for tests in rows for t in tests]
    smallest = min(flat, key=lambda t: t.p)
    assert len(flat) == 12
    assert smallest.p_holm == pytest.approx(12 * smallest.p)
    assert all(t.p_holm >= t.p for t in flat)
    assert all(t.p_holm > 0.99 for t in rows[1] if t.metric == "dppl_pct" and t.grade == "ACCEPT")


def test_full_agreement_proves_no_more_than_its_number_of_tokens(
    result: Callable[..., CandidateResult],
) -> None:
    tests = margin_tests([result("a", windows=2, wrong=0.0).summary], PLAN)[0]
    p = next(t.p for t in tests if t.metric == "top1_pct" and t.grade == "ACCEPT")
    assert p == pytest.approx(0.95 ** (2 * TOKENS))


def test_one_window_proves_nothing(result: Callable[..., CandidateResult]) -> None:
    one = result("a", windows=1)
    assert {t.p for t in margin_tests([one.summary], PLAN)[0]} == {1.0}
    text = next(f.detail for f in findings_of(one, allow_marginal=False))
    assert "Fewer than 8 windows" in text
    assert "1 window does not decide" in findings_of(one, allow_marginal=False)[0].title


def test_pairs_are_compared_by_window(result: Callable[..., CandidateResult]) -> None:
    a, b, c = result("a"), result("b", shift=0.01), result("c", seed=1)
    pairs = all_pairs([a, b, c])
    assert [(p.first, p.second) for p in pairs] == [("a", "b"), ("a", "c"), ("b", "c")]
    first = np.array([w.dnll.mean() for w in a.seen])
    second = np.array([w.dnll.mean() for w in b.seen])
    expected = stats.ttest_rel(first, second)
    assert pairs[0].dnll.p_value == pytest.approx(expected.pvalue, rel=1e-6)
    assert pairs[0].to_json()["dnll"]["value"] == pytest.approx((first - second).mean())
    assert pairs[1].to_json()["dnll"] == {"value": 0, "lo": 0, "hi": 0, "p_holm": 1}


def test_a_pair_leaves_out_tokens_that_either_side_lost(
    result: Callable[..., CandidateResult],
) -> None:
    a, b = result("a"), result("b", shift=0.01)
    b.seen[0].nll_cand[3] = np.nan
    a.seen[1].kl[5] = np.inf
    (pair,) = all_pairs([a, b])
    assert pair.kl is not None
    assert pair.kl.difference.n == 12 * TOKENS - 2
    assert math.isfinite(pair.kl.difference.value)


def test_the_power_line_says_what_the_margin_takes(result: Callable[..., CandidateResult]) -> None:
    wide = power_of(result("a", spread=0.05).seen, PLAN, 12)
    assert wide is not None
    assert wide.half_width > 1
    assert wide.enough is not None
    assert wide.enough > 12
    assert f"takes at least {wide.enough:,} windows" in str(wide)
    assert wide.to_json()["windows_for_margin"] == wide.enough
    narrow = power_of(result("a", spread=0.0001).seen, PLAN, 64)
    assert "takes" not in str(narrow)
    assert power_of(result("a", windows=3).seen, PLAN, 64) is None


def test_an_engine_that_does_not_repeat_itself_is_named(
    result: Callable[..., CandidateResult],
) -> None:
    ids = [f.id for f in findings_of(result("self"), allow_marginal=False)]
    assert ids == ["fidelity.self_test", "fidelity.not_repeatable"]
    assert [f.id for f in findings_of(result("self", zero_share=1.0), allow_marginal=False)] == [
        "fidelity.self_test"
    ]


def test_the_front_holds_what_nothing_else_beats(result: Callable[..., CandidateResult]) -> None:
    results = [
        result("hf:m?bits=8", size=800 << 20),
        result("hf:m?bits=4", size=400 << 20, shift=0.3),
        result("hf:m?bits=5", size=900 << 20, shift=0.1),
    ]
    (chart,) = pareto(results)
    assert isinstance(chart, Chart)
    assert {s.name: [p.label for p in s.points] for s in chart.series} == {
        "on the front": ["bits=4", "bits=8"],
        "behind it": ["bits=5"],
    }
    assert chart.bands[0].hi == 0.001


def test_charts_and_tables_of_several_candidates(result: Callable[..., CandidateResult]) -> None:
    results = [result("hf:m?a=1", size=5 << 20), result("hf:m?a=2", size=3 << 20, shift=0.2)]
    tests = margin_tests([r.summary for r in results], PLAN)
    found = {b.title: b for b in blocks(results, PLAN, tests, all_pairs(results))}
    assert {"Change of perplexity", "KL to the reference", "Size against KL"} <= set(found)
    pairs = found["Candidates against each other"]
    assert isinstance(pairs, Table)
    assert len(pairs.rows) == 1
    margins = found["Margins one by one"]
    assert isinstance(margins, Table)
    assert len(margins.rows) == 12
    histogram = found["hf:m?a=1: KL, of single tokens"]
    assert isinstance(histogram, Chart)
    shares = [p.y for p in histogram.series[0].points]
    assert shares[0] > 0
    assert shares[-1] > 0
    assert sum(shares) == pytest.approx(100)


@pytest.mark.parametrize(
    ("labels", "short"),
    [
        (["hf:m?w=4", "hf:m?w=8"], ["w=4", "w=8"]),
        (["hf:m?d=1&w=4", "hf:m?d=1&w=8"], ["w=4", "w=8"]),
        (["hf:m", "hf:m?w=8"], ["hf:m", "hf:m?w=8"]),
        (["hf:m", "vllm:m"], ["hf:m", "vllm:m"]),
        (["hf:m?w=4"], ["hf:m?w=4"]),
    ],
)
def test_what_all_labels_share_is_left_out_in_charts(labels: list[str], short: list[str]) -> None:
    assert short_names(labels) == short


def test_an_excluded_accept_fails_even_where_the_rest_is_open(
    result: Callable[..., CandidateResult],
) -> None:
    open_ = result("a", windows=12, shift=0.008, spread=0.06)
    assert open_.summary.judgement.grade is Grade.INCONCLUSIVE
    assert open_.summary.judgement.accept_excluded
    assert verdict_of(open_, allow_marginal=False) is Verdict.FAIL
    assert verdict_of(open_, allow_marginal=True) is Verdict.INCONCLUSIVE
    assert findings_of(open_, allow_marginal=False)[0].severity is Severity.ERROR


def test_every_interim_analysis_after_an_undecided_one_is_stricter(
    result: Callable[..., CandidateResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    undecided = result("a", spread=0.05).summary
    decided = result("b", shift=0.1).summary

    def analysis(windows: int) -> InterimAnalyses:
        return InterimAnalyses(PLAN, PLAN.candidates[0], windows)

    analysis(64).record(decided)
    assert analysis(128).number == 1
    analysis(64).record(undecided)
    assert (analysis(64).number, analysis(128).number) == (1, 2)
    analysis(128).record(undecided)
    assert (analysis(128).number, analysis(256).number) == (2, 3)
    assert [confidence_of_analysis(k) for k in (1, 2, 3)] == [0.95, 0.99, 0.995]
    next(p for p in tmp_path.glob("looks/*") if p.is_file()).write_text("damaged")
    assert analysis(256).number == 1


@pytest.mark.parametrize(
    ("text", "perplexity", "warned"),
    [
        ({"latin": True, "characters_per_token": 1.05}, 30.0, True),
        ({"latin": True, "characters_per_token": 4.1}, 1580.0, True),
        ({"latin": True, "characters_per_token": 3.9}, 30.0, False),
        ({"latin": False, "characters_per_token": 1.4}, 12.0, False),
        ({}, 30.0, False),
    ],
)
def test_a_tokenizer_that_splits_text_into_characters_is_suspected(
    text: dict[str, Any], perplexity: float, warned: bool
) -> None:
    assert [f.id for f in implausible(text, perplexity)] == [
        "fidelity.implausible_reference"
    ] * warned


def test_a_control_is_judged_by_window_in_kl_and_perplexity(
    result: Callable[..., CandidateResult],
) -> None:
    control = result("q8", windows=24)
    plan = Plan("hf:a", ("hf:b", "hf:c"), control="hf:q8")
    same, worse = result("b", windows=24, seed=3), result("c", windows=24, shift=0.02)
    kept, found = controlled(
        [same, worse, replace(control, label=label_of(plan.control, plan.sides))], plan
    )
    assert [r.label for r in kept] == ["b", "c"] and set(found) == {"b", "c"}
    assert found["b"].standing is Standing.NO_WORSE and found["b"].verdict is Verdict.PASS
    assert found["c"].standing is Standing.WORSE and found["c"].verdict is Verdict.FAIL
    body = found["c"].to_json()
    kl = [np.concatenate([w.kl for w in r.seen]).mean() for r in (worse, control)]
    assert body["verdict"] == "worse" and body["difference"] == pytest.approx(kl[0] - kl[1])
    assert body["margin"] == pytest.approx(0.1 * kl[1]) and body["lo"] > body["margin"]
    assert body["dppl_pct"]["difference"] == pytest.approx(
        100
        * math.expm1(
            np.mean(
                [
                    a.dnll.mean() - b.dnll.mean()
                    for a, b in zip(worse.seen, control.seen, strict=True)
                ]
            )
        )
    )
    (finding,) = control_findings([*found.values()])
    assert finding.id == "fidelity.control_worse" and finding.severity is Severity.ERROR


def test_an_undecided_control_says_how_many_windows_decide(
    result: Callable[..., CandidateResult],
) -> None:
    noisy, control = (
        result("b", windows=9, spread=0.01),
        result("q8", windows=9, spread=0.01, seed=8),
    )
    found = against_control(noisy, control, 0.1, 0.01)
    assert found and found.standing is Standing.UNDECIDED and found.verdict is Verdict.INCONCLUSIVE
    assert found.windows_needed and found.windows_needed > 9
    (finding,) = control_findings([found])
    assert f"--windows {found.windows_needed}" in finding.remedies[0]
    few = against_control(result("b", windows=5), result("q8", windows=5), 0.1, 0.01)
    assert few and few.standing is Standing.UNDECIDED
    bounded = replace(control, summary=replace(control.summary, bounds=object()))  # type: ignore[arg-type]
    unknown = against_control(result("b", windows=9), bounded, 0.1, 0.01)
    assert unknown and unknown.kl is None and unknown.standing is not Standing.NO_WORSE
    assert unknown.to_json()["difference"] is None


def test_a_control_is_an_engine_of_its_own() -> None:
    assert Plan("hf:a", ("hf:b",), control="hf:c").sides == ("hf:b", "hf:c")
    assert Plan("hf:a", ("hf:b", "hf:c"), control="hf:c").sides == ("hf:b", "hf:c")
    assert Plan("hf:a", ("hf:b",)).sides == ("hf:b",)
    with pytest.raises(UsageError, match="candidate itself"):
        Plan("hf:a", ("hf:b",), control="hf:b")
    with pytest.raises(UsageError, match="control-margin"):
        Plan("hf:a", ("hf:b",), control="hf:c", control_margin=-0.1)
