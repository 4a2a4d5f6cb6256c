"""Slope and quadratic range of sensitivity curves, on curves that are known."""

from __future__ import annotations

import numpy as np
import pytest

from assay.errors import UsageError
from assay.stats import Resampling
from assay_lab.kv.noise_growth import longest_run, noise_growth
from assay_lab.options import NoisePlan

SIGMAS = [0.003, 0.01, 0.03, 0.1, 0.3]


def curve(power: float, spread: float = 0.2, scale: float = 7.0) -> list[list[float]]:
    level = np.exp(spread * np.random.default_rng(0).standard_normal(24))
    return [(scale * s**power * level * 100).tolist() for s in SIGMAS]


@pytest.mark.parametrize("power", [1.0, 2.0, 2.4])
def test_a_power_law_has_its_power(power: float) -> None:
    found = noise_growth(SIGMAS, curve(power), [100] * 24, Resampling(500))
    assert found.slope is not None and found.slope.value == pytest.approx(power)
    # All windows scale alike, so resampling them moves the level and not the slope.
    assert found.slope.hi - found.slope.lo < 1e-9


def test_the_quadratic_range_ends_where_the_model_saturates_and_where_rounding_begins() -> None:
    sums = np.array(curve(2.0))
    sums[0] = sums[1] / 2  # a floor of rounding
    sums[4] = sums[3] * 1.3  # saturated
    found = noise_growth(SIGMAS, sums.tolist(), [100] * 24, Resampling(500))
    assert found.lo == pytest.approx(0.01) and found.hi == pytest.approx(0.1)
    assert found.coefficient is not None
    level = np.exp(0.2 * np.random.default_rng(0).standard_normal(24)).mean()
    assert found.coefficient.value == pytest.approx(7 * level)
    assert found.coefficient.lo < found.coefficient.value < found.coefficient.hi


def test_the_interval_covers_a_slope_that_windows_disagree_on() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(60):
        powers = 2 + 0.3 * rng.standard_normal(40)
        sums = [(s**powers).tolist() for s in (0.5, 1.0, 2.0)]
        found = noise_growth((0.5, 1.0, 2.0), sums, [1] * 40, Resampling(300, trial))
        assert found.slope is not None
        # Of the ratio of sums of very many such windows.
        many = 2 + 0.3 * np.random.default_rng(9).standard_normal(200_000)
        y = [np.log((s**many).mean()) for s in (0.5, 1.0, 2.0)]
        hits += found.slope.lo <= (y[2] - y[0]) / np.log(4.0) <= found.slope.hi
    assert 50 <= hits <= 60


def test_curves_without_a_slope() -> None:
    flat = noise_growth(SIGMAS, [[0.0] * 3] * 4 + [[1.0] * 3], [5] * 3, Resampling(100))
    assert flat.slope is None and flat.lo is None
    none = noise_growth(SIGMAS, curve(0.5), [100] * 24, Resampling(100))
    assert none.slope is not None and none.coefficient is None


def test_runs() -> None:
    assert longest_run([]) is None and longest_run([False]) is None
    assert longest_run([True, False, True, True, False, True, True]) == (2, 3)
    assert longest_run([False, True]) == (1, 1)


def test_wrong_requests_are_refused() -> None:
    for wrong in (
        lambda: NoisePlan("m", sigmas=(0.1,)),
        lambda: NoisePlan("m", sigmas=(0.1, 0.0)),
        lambda: NoisePlan("m", each="head"),
        lambda: NoisePlan("m", mode="sideways"),
    ):
        with pytest.raises(UsageError):
            wrong()
