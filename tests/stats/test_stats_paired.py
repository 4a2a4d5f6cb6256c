"""Differences on the same windows or questions: against scipy, and by simulation of what the
verdicts promise.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from assay.stats import cluster_ratio
from assay.stats.answers import counted_answers, mcnemar, paired_answers
from assay.stats.non_inferiority import NonInferiority, Standing, non_inferiority, paired_difference


def test_paired_difference_is_the_paired_t_test_on_equal_windows() -> None:
    rng = np.random.default_rng(0)
    common = rng.normal(0, 5, 20)
    a, b = common + rng.normal(0.3, 0.1, 20), common + rng.normal(0, 0.1, 20)
    found = paired_difference(a * 100, b * 100, np.full(20, 100.0))
    reference = stats.ttest_rel(a, b)
    assert found.difference.value == pytest.approx((a - b).mean())
    assert found.p_value == pytest.approx(reference.pvalue)
    # Two intervals side by side would see nothing: they are dominated by what the windows have in
    # common.
    assert cluster_ratio(a, np.ones(20)).interval.lo < b.mean()
    assert found.difference.interval.lo > 0


def test_paired_difference_of_equal_candidates() -> None:
    assert paired_difference([1.0, 2.0], [1.0, 2.0], [5, 5]).p_value == 1.0
    with pytest.raises(ValueError, match="same windows"):
        paired_difference([1.0], [1.0, 2.0], [5, 5])


WINDOWS, TOKENS = 64, 500.0


def on_windows(rng: np.random.Generator, ratio: float, windows: int = WINDOWS) -> NonInferiority:
    """A candidate whose mean is `ratio` times the control's, on windows of which some are hard for
    both.
    """
    control = 0.02 * rng.lognormal(-0.08, 0.4, windows)
    candidate = ratio * control * rng.lognormal(-0.02, 0.2, windows)
    return non_inferiority(
        candidate * TOKENS, control * TOKENS, np.full(windows, TOKENS), share=0.1
    )


def test_non_inferiority_is_the_one_sided_paired_t_test_of_scipy() -> None:
    """Against ttest_rel of the candidate and 1.1 times the control, with the same bound as its
    one-sided interval.
    """
    rng = np.random.default_rng(3)
    control = rng.gamma(4.0, 0.005, 40)
    candidate = control * rng.normal(1.02, 0.1, 40)
    found = non_inferiority(candidate * TOKENS, control * TOKENS, np.full(40, TOKENS), share=0.1)
    reference = stats.ttest_rel(candidate, 1.1 * control, alternative="less")
    bound = reference.confidence_interval(0.975).high
    assert found.difference.value == pytest.approx((candidate - control).mean())
    assert found.margin == pytest.approx(0.1 * control.mean())
    assert found.difference.hi - found.margin == pytest.approx(bound)
    assert (found.standing is Standing.NO_WORSE) == (reference.pvalue < 0.025)


def test_one_on_the_margin_is_seldom_called_no_worse_or_worse() -> None:
    """At the margin each verdict has an error of 2.5 %; without a difference most are no worse, at
    twice the margin worse.
    """
    rng = np.random.default_rng(4)

    def shares(ratio: float) -> dict[Standing, float]:
        found = [on_windows(rng, ratio).standing for _ in range(1500)]
        return {standing: found.count(standing) / len(found) for standing in Standing}

    at_margin = shares(1.1)
    assert at_margin[Standing.NO_WORSE] < 0.045 and at_margin[Standing.WORSE] < 0.045
    assert shares(1.0)[Standing.NO_WORSE] > 0.8
    assert shares(1.3)[Standing.WORSE] > 0.95


def test_power_and_windows_needed_are_what_happens() -> None:
    rng = np.random.default_rng(5)
    equal = [on_windows(rng, 1.0, 24) for _ in range(1500)]
    shown = np.mean([f.standing is Standing.NO_WORSE for f in equal])
    assert np.mean([f.power for f in equal]) == pytest.approx(shown, abs=0.06)
    pilot = next(
        f for f in equal if f.standing is Standing.UNDECIDED and abs(f.difference.value) < 0.0004
    )
    assert pilot.windows_needed is not None and pilot.windows_needed > 24
    needed = round(np.median([f.windows_needed for f in equal if f.windows_needed]))
    decided = np.mean(
        [on_windows(rng, 1.0, needed).standing is Standing.NO_WORSE for _ in range(600)]
    )
    assert 0.65 < decided < 0.95


def test_a_margin_of_perplexity_has_a_least_size() -> None:
    """A control without any difference leaves no room to a tenth of nothing; `least` does."""
    rng = np.random.default_rng(6)
    d = rng.normal(0.0004, 0.0005, 30)
    n = np.full(30, TOKENS)
    assert non_inferiority(d * TOKENS, 0 * n, n, share=0.1).standing is Standing.WORSE
    found = non_inferiority(d * TOKENS, 0 * n, n, share=0.1, least=0.01)
    assert found.margin == pytest.approx(0.001) and found.standing is Standing.NO_WORSE
    # A control that is better than the reference leaves the same room above it.
    better = non_inferiority((d - 0.05) * TOKENS, -0.05 * n, n, share=0.1, least=0.01)
    assert better.margin == pytest.approx(0.005) and better.standing is Standing.NO_WORSE


def test_few_windows_are_undecided_and_equal_ones_are_no_worse() -> None:
    n = np.full(7, TOKENS)
    assert non_inferiority(0.5 * n, n, n, share=0.1).standing is Standing.UNDECIDED
    n = np.full(8, TOKENS)
    same = non_inferiority(n, n, n, share=0.0)
    assert same.standing is Standing.NO_WORSE and same.power == 1.0
    with pytest.raises(ValueError, match="same windows"):
        non_inferiority(n[:7], n, n, share=0.1)
    with pytest.raises(ValueError, match="negative"):
        non_inferiority(n, n, n, share=-0.1)


@given(st.integers(0, 24), st.integers(0, 24))
def test_mcnemar_is_the_mid_p_of_a_sign_test(ours: int, theirs: int) -> None:
    n, k = ours + theirs, min(ours, theirs)
    exact = min(1.0, 2 * stats.binom.cdf(k, n, 0.5)) if n else 1.0
    point = stats.binom.pmf(k, n, 0.5)
    mid = (exact - point if ours != theirs else 1 - point / 2) if n else 1.0
    assert mcnemar(ours, theirs) == pytest.approx(mid, abs=1e-12)
    assert mcnemar(ours, theirs) == mcnemar(theirs, ours)
    assert mcnemar(40 * ours, 40 * theirs) <= 1.0  # large counts do not overflow


@pytest.mark.parametrize("only_theirs", [0, 1, 5, 20, 41])
def test_109_of_150_against_107_is_undecided_whichever_they_were(only_theirs: int) -> None:
    found = paired_answers(only_theirs + 2, only_theirs, 150)
    assert found.standing is Standing.UNDECIDED and found.p_value > 0.2
    assert found.difference.value == pytest.approx(2 / 150)
    assert found.questions_needed is not None and found.questions_needed > 500
    alone = counted_answers(109, 150, 107, 150)
    assert alone.standing is Standing.UNDECIDED and alone.questions_needed > 10_000


def test_answers_that_differ_are_told_apart_and_margins_count() -> None:
    assert paired_answers(2, 20, 150).standing is Standing.WORSE
    assert paired_answers(20, 2, 150).standing is Standing.NO_WORSE
    assert paired_answers(10, 12, 150).standing is Standing.UNDECIDED
    assert paired_answers(10, 12, 150, margin=0.1).standing is Standing.NO_WORSE
    assert (
        paired_answers(0, 0, 150).standing is Standing.UNDECIDED
    )  # equal answers: nothing is shown either way
    assert counted_answers(140, 150, 100, 150).standing is Standing.NO_WORSE
    for impossible in ((3, 4, 6), (-1, 0, 5), (0, 0, 0)):
        with pytest.raises(ValueError, match="not possible"):
            paired_answers(*impossible)


def test_the_questions_that_are_named_decide_four_times_in_five_and_intervals_cover() -> None:
    rng = np.random.default_rng(7)
    gain, loss = 0.16, 0.10
    needed = paired_answers(round(1000 * gain), round(1000 * loss), 1000).questions_needed
    found = [
        paired_answers(*rng.multinomial(needed, [gain, loss, 1 - gain - loss])[:2], needed)
        for _ in range(2000)
    ]
    assert np.mean([f.standing is Standing.NO_WORSE for f in found]) == pytest.approx(0.8, abs=0.05)
    few = [
        paired_answers(*rng.multinomial(48, [gain, loss, 1 - gain - loss])[:2], 48)
        for _ in range(2000)
    ]
    for answers in (found, few):
        assert np.mean([f.difference.lo <= gain - loss <= f.difference.hi for f in answers]) > 0.93


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 100))
def test_the_interval_of_paired_answers_is_that_of_the_score_test(
    ours: int, theirs: int, same: int
) -> None:
    asked = ours + theirs + same
    if not asked:
        return
    found = paired_answers(ours, theirs, asked, margin=0.01).difference
    assert -1 <= found.lo <= found.value <= found.hi <= 1
    other = paired_answers(theirs, ours, asked).difference
    assert (found.lo, found.hi) == pytest.approx((-other.hi, -other.lo), abs=1e-9)
    for end in (found.lo, found.hi):
        if 1e-6 < abs(end) < 1 - 1e-6:
            # Against the likelihood itself: the cells that make the counts likeliest where the
            # difference is `end`.
            grid = np.linspace(max(0.0, -end), (1 - end) / 2, 200_001)[1:-1]
            likely = (
                ours * np.log(grid + end)
                + theirs * np.log(grid)
                + same * np.log(1 - 2 * grid - end)
            )
            q = grid[np.nanargmax(likely)]
            z = (ours - theirs - asked * end) / np.sqrt(asked * (2 * q + end - end**2))
            assert abs(z) == pytest.approx(1.96, abs=0.02)


def test_equal_answers_are_no_worse_once_there_are_enough_of_them() -> None:
    few = paired_answers(0, 0, 48, margin=0.01)
    assert few.standing is Standing.UNDECIDED and few.questions_needed == 381
    assert paired_answers(0, 0, 381, margin=0.01).standing is Standing.NO_WORSE
    assert paired_answers(0, 0, 380, margin=0.01).standing is Standing.UNDECIDED
    for lost in (0, 1, 5, 20):
        assert paired_answers(lost + 2, lost, 150, margin=0.01).standing is Standing.UNDECIDED
