"""Grades by interval: every region, the edges, the windows that would decide."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from assay.stats import ClusterEstimate, Interval, cluster_proportion, cluster_ratio, percent_change
from assay.stats.equivalence import (
    Grade,
    Margins,
    at_confidence,
    grade_intervals,
    grade_point,
    judge,
    tost_p,
)


def interval(lo: float, hi: float) -> Interval:
    return Interval((lo + hi) / 2, lo, hi)


def both(
    dppl: tuple[float, float], top1: tuple[float, float], **more: Interval
) -> dict[str, Interval]:
    return {"dppl": interval(*dppl), "top1": interval(*top1), **more}


@pytest.mark.parametrize(
    ("dppl", "top1", "grade"),
    [
        ((-0.9, 0.9), (95.0, 97.0), Grade.ACCEPT),
        ((-1.0, 1.0), (95.0, 97.0), Grade.ACCEPT),
        ((-0.9, 1.1), (96.0, 97.0), Grade.MARGINAL),  # ACCEPT undecided by perplexity
        ((-0.9, 0.9), (94.9, 97.0), Grade.MARGINAL),  # … by top-1
        ((1.2, 2.9), (86.0, 94.0), Grade.MARGINAL),
        ((-3.0, -1.5), (85.0, 90.0), Grade.MARGINAL),
        ((2.0, 3.1), (90.0, 92.0), Grade.INCONCLUSIVE),
        ((-4.0, 4.0), (96.0, 98.0), Grade.INCONCLUSIVE),
        ((0.1, 0.2), (84.0, 86.0), Grade.INCONCLUSIVE),
        ((3.1, 9.0), (99.0, 99.5), Grade.REJECT),
        ((-9.0, -3.1), (99.0, 99.5), Grade.REJECT),  # a candidate may not be better either
        ((-0.1, 0.1), (70.0, 84.9), Grade.REJECT),
        ((2.0, 4.0), (70.0, 80.0), Grade.REJECT),  # either metric is enough
    ],
)
def test_every_region(dppl: tuple[float, float], top1: tuple[float, float], grade: Grade) -> None:
    assert grade_intervals(both(dppl, top1), 8) is grade
    assert grade_intervals(both(dppl, top1), 7) is Grade.INCONCLUSIVE


@pytest.mark.parametrize(
    ("kl", "grade"),
    [
        ((0.004, 0.010), Grade.ACCEPT),
        ((0.009, 0.011), Grade.MARGINAL),
        ((0.011, 0.030), Grade.MARGINAL),
        ((0.020, 0.040), Grade.INCONCLUSIVE),
        ((0.031, 0.040), Grade.REJECT),
    ],
)
def test_kl_is_a_metric_of_its_own(kl: tuple[float, float], grade: Grade) -> None:
    assert grade_intervals(both((-0.1, 0.1), (97, 98), kl=interval(*kl)), 64) is grade


def test_margins_can_be_set() -> None:
    wide = Margins(dppl_accept=5, dppl_marginal=10, top1_accept=80, top1_marginal=70)
    assert grade_intervals(both((3.1, 4.9), (81, 84)), 64, wide) is Grade.ACCEPT
    assert grade_point(4.0, 82.0, wide) is Grade.ACCEPT


@pytest.mark.parametrize(
    "bad",
    [
        {"dppl_accept": 4.0},
        {"dppl_accept": 0.0},
        {"top1_accept": 101.0},
        {"top1_marginal": 96.0},
        {"kl_accept": 0.1},
        {"kl_accept": 0.0},
    ],
)
def test_margins_that_contradict_each_other(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        Margins(**bad)


@pytest.mark.parametrize(
    ("dppl", "top1", "grade"),
    [
        (1.0, 95.0, Grade.ACCEPT),
        (-1.0, 99.0, Grade.ACCEPT),
        (1.01, 99.0, Grade.MARGINAL),
        (0.0, 94.9, Grade.MARGINAL),
        (3.0, 85.0, Grade.MARGINAL),
        (3.01, 99.0, Grade.REJECT),
        (0.0, 84.9, Grade.REJECT),
        (math.nan, 99.0, Grade.REJECT),
    ],
)
def test_old_point_rule(dppl: float, top1: float, grade: Grade) -> None:
    assert grade_point(dppl, top1) is grade


@given(
    centre=st.floats(-6, 6), half=st.floats(0, 6), top=st.floats(80, 100), top_half=st.floats(0, 5)
)
@settings(max_examples=300)
def test_a_narrower_interval_never_contradicts(
    centre: float, half: float, top: float, top_half: float
) -> None:
    """Halving both errors around the same estimates turns no ACCEPT into REJECT and decides, never
    undecides.
    """

    def graded(share: float) -> Grade:
        around = (
            (centre - share * half, centre + share * half),
            (top - share * top_half, top + share * top_half),
        )
        return grade_intervals(both(*around), 20)

    wide, narrow = graded(1.0), graded(0.5)
    order = {Grade.ACCEPT: 0, Grade.MARGINAL: 1, Grade.REJECT: 2}
    if wide is Grade.REJECT:
        assert narrow is Grade.REJECT
    elif wide is not Grade.INCONCLUSIVE:
        assert order[narrow] <= order[wide]


def windows(mean: float, sd: float, count: int) -> ClusterEstimate:
    """An estimate with exactly this mean and standard deviation of its (equal) windows."""
    z = np.random.default_rng(count).normal(size=count)
    z = (z - z.mean()) / z.std(ddof=1)
    return cluster_ratio((mean + sd * z) * 1000, np.full(count, 1000.0))


GOOD_TOP1 = cluster_proportion(np.full(64, 990.0) + np.arange(64) % 3, np.full(64, 1000.0))


def test_perplexity_interval_comes_from_the_log_ratio() -> None:
    estimate = windows(0.004, 0.01, 64)
    judged = judge(estimate, GOOD_TOP1)
    half = stats.t.ppf(0.975, 63) * 0.01 / 8
    assert judged.dppl_pct.value == pytest.approx(100 * (math.exp(0.004) - 1))
    assert judged.dppl_pct.lo == pytest.approx(100 * (math.exp(0.004 - half) - 1))
    assert judged.dppl_pct.hi == pytest.approx(100 * (math.exp(0.004 + half) - 1))
    assert (judged.grade, judged.windows_needed) == (Grade.ACCEPT, None)


def test_windows_that_would_decide() -> None:
    estimate = windows(0.004, 0.04, 64)
    judged = judge(estimate, GOOD_TOP1)
    half = stats.t.ppf(0.975, 63) * 0.04 / 8
    expected = math.ceil(64 * (half / (math.log(1.01) - 0.004)) ** 2)
    assert (judged.grade, judged.aim, judged.windows_needed) == (
        Grade.MARGINAL,
        Grade.ACCEPT,
        expected,
    )
    assert expected > 64


def test_windows_needed_keep_what_they_promise() -> None:
    """With the promised number of windows and the same spread the case is decided; with fewer it is
    not.
    """
    undecided = judge(windows(-0.005, 0.03, 16), GOOD_TOP1)
    assert undecided.aim is Grade.ACCEPT
    assert undecided.windows_needed is not None
    assert judge(windows(-0.005, 0.03, undecided.windows_needed), GOOD_TOP1).grade is Grade.ACCEPT
    assert (
        judge(windows(-0.005, 0.03, undecided.windows_needed // 2), GOOD_TOP1).grade
        is not Grade.ACCEPT
    )


def test_no_number_of_windows_brings_in_what_lies_outside() -> None:
    outside_accept = judge(windows(0.0105, 0.01, 16), GOOD_TOP1)
    assert (outside_accept.grade, outside_accept.aim) == (Grade.MARGINAL, Grade.ACCEPT)
    assert outside_accept.windows_needed is None
    outside = judge(windows(0.031, 0.01, 16), GOOD_TOP1)
    assert (outside.grade, outside.windows_needed) == (Grade.INCONCLUSIVE, None)
    ruled_out = judge(windows(0.02, 0.004, 16), GOOD_TOP1)
    assert (ruled_out.grade, ruled_out.aim, ruled_out.windows_needed) == (
        Grade.MARGINAL,
        None,
        None,
    )


def test_an_inconclusive_case_between_the_margins_aims_at_the_outer_one() -> None:
    judged = judge(windows(0.02, 0.05, 16), GOOD_TOP1)
    half = stats.t.ppf(0.975, 15) * 0.05 / 4
    assert (judged.grade, judged.aim) == (Grade.INCONCLUSIVE, Grade.MARGINAL)
    assert judged.windows_needed == math.ceil(16 * (half / (math.log(1.03) - 0.02)) ** 2)


def test_an_excluded_accept_is_said_even_where_the_rest_is_open() -> None:
    judged = judge(windows(0.025, 0.05, 64), GOOD_TOP1)
    assert (judged.grade, judged.aim, judged.accept_excluded) == (
        Grade.INCONCLUSIVE,
        Grade.MARGINAL,
        True,
    )
    assert not judge(windows(0.004, 0.04, 64), GOOD_TOP1).accept_excluded


def test_a_stricter_confidence_widens_what_decides_and_not_what_is_shown() -> None:
    estimate = windows(0.006, 0.013, 64)
    usual, strict = judge(estimate, GOOD_TOP1), judge(estimate, GOOD_TOP1, confidence=0.99)
    assert usual.dppl_pct == strict.dppl_pct
    assert (usual.grade, strict.grade) == (Grade.ACCEPT, Grade.MARGINAL)
    half = stats.t.ppf(0.995, 63) * 0.013 / 8
    assert at_confidence(estimate, 0.99).hi == pytest.approx(0.006 + half)


def test_windows_are_counted_where_several_make_one_cluster() -> None:
    one = judge(windows(0.004, 0.04, 16), GOOD_TOP1, windows=64)
    other = judge(windows(0.004, 0.04, 16), GOOD_TOP1)
    assert one.windows_needed == pytest.approx(4 * other.windows_needed, abs=4)


def test_seven_clear_windows_need_one_more() -> None:
    judged = judge(windows(0.0, 0.0001, 7), cluster_proportion([999.0] * 6 + [998], [1000] * 7))
    assert (judged.grade, judged.windows_needed) == (Grade.INCONCLUSIVE, 8)


def test_one_window_says_nothing() -> None:
    judged = judge(cluster_ratio([0.1], [10]), cluster_proportion([10], [10]))
    assert (judged.grade, judged.windows_needed) == (Grade.INCONCLUSIVE, None)


def test_tost_agrees_with_two_t_tests() -> None:
    y = np.random.default_rng(0).normal(0.2, 1, 25)
    estimate = cluster_ratio(y, np.ones(25))
    expected = max(
        stats.ttest_1samp(y, -0.5, alternative="greater").pvalue,
        stats.ttest_1samp(y, 0.5, alternative="less").pvalue,
    )
    assert tost_p(estimate, -0.5, 0.5) == pytest.approx(expected)


def test_tost_at_5_percent_is_the_90_percent_interval_inside() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        y = rng.normal(rng.uniform(-1, 1), 1, 12)
        inside = cluster_ratio(y, np.ones(12), 0.9).interval.within(-0.8, 0.8)
        assert (tost_p(cluster_ratio(y, np.ones(12)), -0.8, 0.8) <= 0.05) == inside


def test_percent_change_of_something_huge_is_infinite() -> None:
    assert percent_change(Interval(1.0, -math.inf, 1e6)) == Interval(
        pytest.approx(100 * (math.e - 1)), -100.0, math.inf
    )


def test_the_mean_kl_is_graded_by_its_upper_bound() -> None:
    """A mean inside the margin proves nothing: with it alone a wide KL would be accepted."""
    tokens = np.full(16, 100.0)
    same = cluster_ratio(np.tile([0.01, -0.01], 8), tokens)
    top1 = cluster_proportion([99] * 16, [100] * 16)
    for spread, grade in ((0.001, Grade.ACCEPT), (0.008, Grade.MARGINAL)):
        per_window = 0.009 + spread * np.tile([1.0, -1.0], 8)
        kl = cluster_ratio(per_window * tokens, tokens)
        assert kl.value == pytest.approx(0.009)
        assert (kl.interval.hi <= 0.010) is (grade is Grade.ACCEPT)
        assert judge(same, top1, kl).grade is grade
    narrow = cluster_ratio((0.009 + 0.0017 * np.tile([1.0, -1.0], 8)) * tokens, tokens)
    assert judge(same, top1, narrow).grade is Grade.ACCEPT
    # At a later interim analysis the interval is wider, and the same windows no longer decide.
    assert judge(same, top1, narrow, confidence=0.995).grade is Grade.MARGINAL
