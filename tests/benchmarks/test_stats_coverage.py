"""The intervals that assay's own are compared with."""

from __future__ import annotations

import math

import numpy as np
import pytest

from assay.stats import Resampling, cluster_ratio, resampled_counts
from stats_coverage import percentile_ratio, studentised_ratio


def test_studentised_interval_is_that_of_the_drawn_t() -> None:
    rng = np.random.default_rng(6)
    y, w = rng.exponential(size=8), rng.integers(3, 6, 8).astype(float)
    resampling = Resampling(300, 2)
    found = studentised_ratio(y, w, resampling, 0.9)
    whole = cluster_ratio(y, w)
    t = []
    for row in np.concatenate(list(resampled_counts(8, resampling))).astype(int):
        drawn = cluster_ratio(np.repeat(y, row), np.repeat(w, row))
        if drawn.se > 1e-9 * whole.se:
            t.append((drawn.value - whole.value) / drawn.se)
    lo, hi = np.quantile(t, [0.05, 0.95], method="inverted_cdf")
    assert found.lo == pytest.approx(whole.value - hi * whole.se)
    assert found.hi == pytest.approx(whole.value - lo * whole.se)


def test_studentised_interval_of_equal_windows_claims_nothing() -> None:
    found = studentised_ratio(np.ones(3), np.ones(3), Resampling())
    assert (found.lo, found.hi) == (-math.inf, math.inf)


def test_percentiles_are_those_of_the_drawn_ratios() -> None:
    rng = np.random.default_rng(5)
    y, w = rng.normal(size=7), rng.integers(1, 9, 7).astype(float)
    resampling = Resampling(200, 9)
    found = percentile_ratio(y, w, resampling)
    drawn = [(c @ y) / (c @ w) for c in np.concatenate(list(resampled_counts(7, resampling)))]
    assert found.lo == pytest.approx(np.quantile(drawn, 0.025, method="inverted_cdf"))
    assert found.hi == pytest.approx(np.quantile(drawn, 0.975, method="inverted_cdf"))
