"""Bootstrap by window against draws that are carried out one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from assay.stats.bootstrap import (
    Resampling,
    bootstrap_quantiles,
    bootstrap_ratio,
    bootstrap_t_ratio,
    resampled_counts,
)
from assay.stats.cluster import cluster_ratio


def all_counts(clusters: int, resampling: Resampling) -> np.ndarray:
    return np.concatenate(list(resampled_counts(clusters, resampling)))


def test_counts_are_multinomial_and_follow_from_the_seed() -> None:
    counts = all_counts(6, Resampling(20_000, seed=3))
    assert counts.shape == (20_000, 6)
    assert (counts.sum(axis=1) == 6).all()
    np.testing.assert_allclose(counts.mean(axis=0), 1.0, atol=0.03)
    np.testing.assert_allclose(counts.var(axis=0), 6 * (1 / 6) * (5 / 6), atol=0.03)
    assert (counts == all_counts(6, Resampling(20_000, seed=3))).all()
    assert (counts != all_counts(6, Resampling(20_000, seed=4))).any()


@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    distinct=st.sampled_from([2, 5, 10_000]),
    p=st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_quantiles_are_those_of_the_drawn_observations(
    seed: int, sizes: list[int], distinct: int, p: float
) -> None:
    rng = np.random.default_rng(seed)
    groups = [rng.integers(0, distinct, n).astype(float) for n in sizes]
    resampling = Resampling(50, seed)
    found = bootstrap_quantiles(groups, [p], 0.9, resampling)[0]
    drawn = [
        np.quantile(
            np.concatenate([np.tile(g, int(c)) for g, c in zip(groups, row, strict=True)]),
            p,
            method="inverted_cdf",
        )
        for row in all_counts(len(sizes), resampling)
    ]
    assert found.value == np.quantile(np.concatenate(groups), p, method="inverted_cdf")
    assert found.lo == np.quantile(drawn, 0.05, method="inverted_cdf")
    assert found.hi == np.quantile(drawn, 0.95, method="inverted_cdf")


def test_quantiles_of_many_tokens_take_little_memory() -> None:
    import tracemalloc

    rng = np.random.default_rng(0)
    groups = [rng.lognormal(-6, 2, 1023) for _ in range(64)]
    tracemalloc.start()
    bootstrap_quantiles(groups, [0.5, 0.9, 0.99])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 150e6


def test_infinite_divergences_have_a_rank() -> None:
    groups = [[0.1, 0.2, math.inf], [0.3, math.inf, math.inf]]
    median, top = bootstrap_quantiles(groups, [0.5, 1.0])
    assert median.value == 0.3
    assert top.value == top.hi == math.inf


@pytest.mark.parametrize(
    ("groups", "p"), [([[1.0, math.nan]], 0.5), ([[]], 0.5), ([[1.0]], 0.0), ([[1.0]], 1.1)]
)
def test_what_has_no_quantile_is_refused(groups: list[list[float]], p: float) -> None:
    with pytest.raises(ValueError):
        bootstrap_quantiles(groups, [p])


def test_ratio_agrees_with_scipy_on_equal_windows() -> None:
    rng = np.random.default_rng(1)
    y = rng.gamma(2.0, size=30)
    found = bootstrap_ratio(y, np.ones(30), resampling=Resampling(20_000, 1))
    reference = stats.bootstrap(
        (y,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(2)
    ).confidence_interval
    assert found.value == pytest.approx(y.mean())
    assert found.lo == pytest.approx(reference.low, abs=0.02)
    assert found.hi == pytest.approx(reference.high, abs=0.02)


def test_ratio_is_that_of_the_drawn_sums() -> None:
    rng = np.random.default_rng(5)
    y, w = rng.normal(size=7), rng.integers(1, 9, 7).astype(float)
    resampling = Resampling(200, 9)
    found = bootstrap_ratio(y, w, 0.8, resampling)
    drawn = [(c @ y) / (c @ w) for c in all_counts(7, resampling)]
    assert found.lo == pytest.approx(np.quantile(drawn, 0.1, method="inverted_cdf"))
    assert found.hi == pytest.approx(np.quantile(drawn, 0.9, method="inverted_cdf"))


def test_studentised_interval_is_that_of_the_drawn_t() -> None:
    rng = np.random.default_rng(6)
    y, w = rng.exponential(size=8), rng.integers(3, 6, 8).astype(float)
    resampling = Resampling(300, 2)
    found = bootstrap_t_ratio(y, w, 0.9, resampling)
    whole = cluster_ratio(y, w)
    t = []
    for row in all_counts(8, resampling).astype(int):
        drawn = cluster_ratio(np.repeat(y, row), np.repeat(w, row))
        if drawn.se > 1e-9 * whole.se:
            t.append((drawn.value - whole.value) / drawn.se)
    lo, hi = np.quantile(t, [0.05, 0.95], method="inverted_cdf")
    assert found.lo == pytest.approx(whole.value - hi * whole.se)
    assert found.hi == pytest.approx(whole.value - lo * whole.se)


def test_studentised_interval_of_equal_windows_claims_nothing() -> None:
    found = bootstrap_t_ratio([1.0, 1.0, 1.0], [1, 1, 1])
    assert (found.lo, found.hi) == (-math.inf, math.inf)


@given(scale=st.floats(0.01, 100), shift=st.floats(-5, 5), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_ratio_moves_with_the_data(scale: float, shift: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    y, w = rng.normal(size=9), rng.integers(1, 5, 9).astype(float)
    plain = bootstrap_ratio(y, w, resampling=Resampling(100, seed))
    moved = bootstrap_ratio(scale * y + shift * w, w, resampling=Resampling(100, seed))
    for a, b in ((plain.value, moved.value), (plain.lo, moved.lo), (plain.hi, moved.hi)):
        assert b == pytest.approx(scale * a + shift, abs=1e-6 * (1 + scale))
