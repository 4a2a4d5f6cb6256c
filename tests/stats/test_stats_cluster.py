import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from assay.stats import cluster_mean, cluster_ratio, mean_interval, student_t


def windows(
    rng: np.random.Generator, clusters: int, between: float, within: float, mean: float = 0.0
) -> list[np.ndarray]:
    """Windows of unequal length whose tokens share a window effect."""
    sizes = rng.integers(5, 40, clusters)
    return [mean + between * rng.normal() + within * rng.normal(size=n) for n in sizes]


def sandwich(groups: list[np.ndarray]) -> float:
    """CR1 standard error of a regression on a constant, from the textbook's matrices."""
    y = np.concatenate(groups)
    x = np.ones((y.size, 1))
    ids = np.repeat(np.arange(len(groups)), [g.size for g in groups])
    bread = np.linalg.inv(x.T @ x)
    residual = y - x @ (bread @ x.T @ y)
    meat = np.zeros((1, 1))
    for g in range(len(groups)):
        score = x[ids == g].T @ residual[ids == g]
        meat += np.outer(score, score)
    n, k, c = y.size, 1, len(groups)
    correction = c / (c - 1) * (n - 1) / (n - k)
    return float(np.sqrt(correction * (bread @ meat @ bread)[0, 0]))


@given(st.integers(0, 10_000), st.integers(2, 30))
def test_agrees_with_the_regression_form(seed: int, clusters: int) -> None:
    groups = windows(np.random.default_rng(seed), clusters, 1.0, 0.5)
    estimate = cluster_mean(groups)
    assert estimate.value == pytest.approx(float(np.concatenate(groups).mean()), abs=1e-12)
    assert estimate.se == pytest.approx(sandwich(groups), rel=1e-9)
    half = student.ppf(0.975, clusters - 1) * estimate.se
    assert estimate.interval.hi - estimate.value == pytest.approx(half, rel=1e-9)
    assert estimate.value - estimate.interval.lo == pytest.approx(half, rel=1e-9)


def test_clusters_of_one_are_the_ordinary_standard_error() -> None:
    values = np.random.default_rng(1).normal(size=50)
    estimate = cluster_mean([[v] for v in values])
    assert estimate.se == pytest.approx(float(values.std(ddof=1)) / math.sqrt(50), rel=1e-12)
    assert estimate.design_effect == pytest.approx(1.0)


def test_copies_of_one_value_count_once() -> None:
    """Repeating each observation m times adds no information: the design effect is about m."""
    values = np.random.default_rng(2).normal(size=40)
    once, often = cluster_mean([[v] for v in values]), cluster_mean([[v] * 25 for v in values])
    assert often.se == pytest.approx(once.se, rel=1e-12)
    assert often.design_effect == pytest.approx(25, rel=0.03)
    assert often.effective_n == pytest.approx(40, rel=0.03)


def test_a_ratio_agrees_with_the_jackknife() -> None:
    rng = np.random.default_rng(3)
    w = rng.uniform(50, 400, 60)
    y = w * (0.2 + 0.05 * rng.normal(size=60))
    estimate = cluster_ratio(y, w)
    leave_one_out = (y.sum() - y) / (w.sum() - w)
    jackknife = math.sqrt(59 / 60 * ((leave_one_out - leave_one_out.mean()) ** 2).sum())
    assert estimate.value == pytest.approx(y.sum() / w.sum())
    assert estimate.se == pytest.approx(jackknife, rel=0.05)


@pytest.mark.parametrize("clusters", [8, 40])
def test_coverage(clusters: int) -> None:
    """95 % intervals hold the truth in about 95 % of 1,500 simulated runs; treating tokens as
    independent does not.
    """
    rng = np.random.default_rng(4)
    hits = naive = 0
    for _ in range(1500):
        groups = windows(rng, clusters, 0.7, 1.0, mean=0.3)
        hits += 0.3 in cluster_mean(groups).interval
        y = np.concatenate(groups)
        naive += abs(y.mean() - 0.3) < 1.96 * y.std(ddof=1) / math.sqrt(y.size)
    assert 0.925 < hits / 1500 < 0.97
    assert naive / 1500 < 0.75


def test_one_window_tells_nothing_about_the_error() -> None:
    estimate = cluster_mean([[1.0, 2.0, 3.0]])
    assert estimate.value == 2.0
    assert math.isnan(estimate.se)
    assert (estimate.interval.lo, estimate.interval.hi) == (-math.inf, math.inf)


def test_no_difference_at_all_has_no_error() -> None:
    estimate = cluster_mean([[0.0] * 5, [0.0] * 3, [0.0]])
    assert (estimate.value, estimate.se, estimate.interval.lo, estimate.interval.hi) == (
        0.0,
        0.0,
        0.0,
        0.0,
    )
    assert math.isnan(estimate.design_effect)


def test_empty_windows_are_left_out() -> None:
    assert cluster_ratio([1.0, 0.0, 3.0], [2.0, 0.0, 2.0]).clusters == 2


def test_students_t() -> None:
    for df in (1, 5, 63, 1000):
        assert student_t(df, 0.95) == pytest.approx(student.ppf(0.975, df))


@pytest.mark.parametrize(
    ("y", "w"),
    [
        ([], []),
        ([1.0], [0.0]),
        ([1.0, 2.0], [1.0]),
        ([math.nan, 1.0], [1, 1]),
        ([1.0, 2.0], [1, -1]),
        ([1.0, 2.0], [1, math.inf]),
    ],
)
def test_sums_that_make_no_sense(y: list[float], w: list[float]) -> None:
    with pytest.raises(ValueError):
        cluster_ratio(y, w)


def test_a_plain_mean_is_the_mean_of_clusters_of_one() -> None:
    values = np.random.default_rng(5).normal(size=12).tolist()
    plain, clustered = mean_interval(values), cluster_mean([[v] for v in values]).interval
    assert (plain.value, plain.lo, plain.hi) == pytest.approx(
        (clustered.value, clustered.lo, clustered.hi)
    )
    with pytest.raises(ValueError, match="at least two"):
        mean_interval([1.0])
