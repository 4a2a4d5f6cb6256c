import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest

from assay.stats import Interval, newcombe, wilson

COUNTS = st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
LEVELS = st.sampled_from([0.5, 0.8, 0.9, 0.95, 0.99])


@given(COUNTS, LEVELS)
def test_agrees_with_scipy(count: tuple[int, int], confidence: float) -> None:
    k, n = count
    ours, theirs = (
        wilson(k, n, confidence),
        binomtest(k, n).proportion_ci(confidence, method="wilson"),
    )
    assert (ours.lo, ours.hi) == pytest.approx((theirs.low, theirs.high), abs=1e-9)
    assert ours.value == k / n
    assert 0.0 <= ours.lo <= ours.value <= ours.hi <= 1.0


def test_known_figures() -> None:
    """12 of 12 right answers do not show more than 76 %, and nothing in n tries not less than about
    3/n.
    """
    assert wilson(12, 12).lo == pytest.approx(0.7575, abs=1e-4)
    assert wilson(0, 1000).hi == pytest.approx(0.0038, abs=1e-4)


@pytest.mark.parametrize(
    ("a", "b", "lo", "hi"),
    # Newcombe (1998), table II, method 10.
    [
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((6, 7), (2, 7), 0.0582, 0.8062),
        ((5, 56), (0, 29), -0.0381, 0.1926),
    ],
)
def test_difference_as_published(
    a: tuple[int, int], b: tuple[int, int], lo: float, hi: float
) -> None:
    interval = newcombe(*a, *b)
    assert (interval.lo, interval.hi) == pytest.approx((lo, hi), abs=5e-5)
    mirrored = newcombe(*b, *a)
    assert (mirrored.lo, mirrored.hi) == pytest.approx((-hi, -lo), abs=5e-5)


@pytest.mark.parametrize("p", [0.02, 0.3, 0.9])
def test_coverage(p: float) -> None:
    """Exact coverage, summed over all outcomes: close to 95 %."""
    n = 60
    covered = sum(float(binom.pmf(k, n, p)) for k in range(n + 1) if p in wilson(k, n))
    assert covered == pytest.approx(0.95, abs=0.035)


def test_nothing_observed_is_nothing_known() -> None:
    interval = wilson(0, 0)
    assert (interval.lo, interval.hi) == (0.0, 1.0) and math.isnan(interval.value)
    assert (newcombe(0, 0, 3, 5).lo, newcombe(0, 0, 3, 5).hi) == (-1.0, 1.0)


def test_effective_counts_need_not_be_whole() -> None:
    wide, narrow = wilson(50 / 4, 100 / 4), wilson(50, 100)
    assert wide.lo < narrow.lo < narrow.hi < wide.hi


@pytest.mark.parametrize(("k", "n"), [(-1, 5), (6, 5), (1, -1), (math.nan, 5), (0, math.inf)])
def test_impossible_counts(k: float, n: float) -> None:
    with pytest.raises(ValueError, match="not possible"):
        wilson(k, n)


@pytest.mark.parametrize("confidence", [0.0, 1.0, -1, 95])
def test_impossible_confidence(confidence: float) -> None:
    with pytest.raises(ValueError, match="confidence"):
        wilson(1, 2, confidence)


def test_interval_relations() -> None:
    interval = Interval(0.3, 0.2, 0.4)
    assert 0.3 in interval
    assert 0.5 not in interval
    assert interval.within(0.2, 0.4)
    assert not interval.within(0.21, 1)
    assert interval.outside(0.41, 1)
    assert not interval.outside(0.4, 1)
