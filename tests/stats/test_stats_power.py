"""Power, Holm, paired differences and proportions by window."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from assay.stats import cluster_mean, cluster_proportion, cluster_ratio, wilson
from assay.stats.multiplicity import holm
from assay.stats.resolution import resolution, windows_for, windows_needed


def test_resolution_of_the_pilot_itself_is_its_own_interval() -> None:
    pilot = cluster_ratio([1.0, 2.0, 4.0, 3.0], [1, 1, 1, 1])
    found = resolution(pilot, 4)
    assert found.half_width == pytest.approx(pilot.interval.hi - pilot.value)
    sd = np.std([1.0, 2.0, 4.0, 3.0], ddof=1)
    lo, hi = (math.sqrt(3 * sd**2 / stats.chi2.ppf(p, 3)) for p in (0.975, 0.025))
    assert found.lo == pytest.approx(found.half_width * lo / sd)
    assert found.hi == pytest.approx(found.half_width * hi / sd)


def test_resolution_predicts_what_more_windows_give() -> None:
    rng = np.random.default_rng(0)
    predicted = [
        resolution(cluster_ratio(rng.normal(size=4), np.ones(4)), 64).half_width
        for _ in range(2000)
    ]
    real = [
        cluster_ratio(y := rng.normal(size=64), np.ones(64)).interval.hi - y.mean()
        for _ in range(200)
    ]
    # The standard deviation of four values is 8 % too small on average.
    assert np.mean(predicted) == pytest.approx(0.921 * np.mean(real), rel=0.03)


def test_pilot_of_three_windows_is_too_small() -> None:
    with pytest.raises(ValueError, match="at least 4"):
        resolution(cluster_ratio([1.0, 2.0, 3.0], [1, 1, 1]), 64)


@given(sd=st.floats(0.001, 5), target=st.floats(0.001, 5))
def test_windows_for_is_the_smallest_number_that_does(sd: float, target: float) -> None:
    y = np.array([-1.0, 1.0, -1.0, 1.0]) * sd
    pilot = cluster_ratio(y, np.ones(4))
    found = windows_for(pilot, target)
    if found is None:
        assert resolution(pilot, 1_000_000).half_width > target
        return
    assert resolution(pilot, found).half_width <= target
    assert found == 8 or resolution(pilot, found - 1).half_width > target


def test_windows_needed_by_hand() -> None:
    # half-width 0.8 at 64 windows, 0.4 from the nearer bound: four times as many.
    assert windows_needed(0.6, 0.8, 64, -1.0, 1.0) == 256
    assert windows_needed(-0.6, 0.8, 64, -1.0, 1.0) == 256
    assert windows_needed(97.0, 4.0, 10, lo=95.0) == 40
    assert windows_needed(0.0, 0.001, 64, -1.0, 1.0) == 8
    assert windows_needed(1.0, 0.8, 64, -1.0, 1.0) is None
    assert windows_needed(1.5, 0.8, 64, -1.0, 1.0) is None
    assert windows_needed(0.0, math.inf, 1, -1.0, 1.0) is None
    assert windows_needed(math.nan, 0.1, 64, -1.0, 1.0) is None


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    with pytest.raises(ValueError):
        holm([1.2])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.001, 0.2))
def test_holm_rejects_what_the_step_down_procedure_rejects(
    p_values: list[float], alpha: float
) -> None:
    order = np.argsort(p_values, kind="stable")
    rejected = set()
    for step, index in enumerate(order):
        if (len(p_values) - step) * p_values[index] > alpha:
            break
        rejected.add(int(index))
    assert {i for i, p in enumerate(holm(p_values)) if p <= alpha} == rejected


def test_proportion_has_the_error_and_design_effect_of_the_mean_of_its_trials() -> None:
    rng = np.random.default_rng(2)
    groups = [(rng.random(200) < rng.uniform(0.8, 0.99)).astype(float) for _ in range(30)]
    found = cluster_proportion([g.sum() for g in groups], [g.size for g in groups])
    reference = cluster_mean(groups)
    assert found.value == pytest.approx(reference.value)
    assert found.interval.lo == pytest.approx(reference.interval.lo)
    assert found.design_effect == pytest.approx(
        reference.design_effect, rel=1e-3
    )  # n against n − 1
    assert found.design_effect > 1


def test_perfect_agreement_is_not_certainty() -> None:
    found = cluster_proportion([100] * 10, [100] * 10)
    assert (found.value, found.interval.hi) == (1.0, 1.0)
    assert found.interval.lo == pytest.approx(wilson(1000, 1000).lo)
    none = cluster_proportion([0] * 10, [100] * 10)
    assert (none.value, none.interval.lo) == (0.0, 0.0)
    assert none.interval.hi == pytest.approx(wilson(0, 1000).hi)


def test_proportion_stays_between_0_and_1() -> None:
    found = cluster_proportion([100, 100, 100, 90], [100] * 4)
    assert found.interval.hi == 1.0
