"""Bootstrap by window against draws that are carried out one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.stats import Resampling, bootstrap_quantiles, resampled_counts


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
