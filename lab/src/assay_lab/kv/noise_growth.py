"""How the KL of a model grows with the size of noise in its cache.

A small error changes the logits in proportion, and their KL by its square: KL = c σ², slope 2 in
a log-log plot. Above that range the model saturates; below it, errors drown in the rounding of
the cache's own type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from assay.stats import Interval, Resampling, resampled_counts

QUADRATIC = 2.0
NOISE_TOLERANCE = 0.3
"""A slope between neighbours within this of 2 belongs to the quadratic range."""


@dataclass(frozen=True)
class NoiseGrowth:
    """`slope` of log KL over log σ; the quadratic range from `lo` to `hi` with c = KL / σ² in it,
    None without one.
    """

    slope: Interval | None
    lo: float | None
    hi: float | None
    coefficient: Interval | None


def noise_growth(
    sigmas: Sequence[float],
    kl: Sequence[Sequence[float]],
    tokens: Sequence[int],
    resampling: Resampling,
    confidence: float = 0.95,
) -> NoiseGrowth:
    """From the KL sums [sigmas][windows] and the tokens of each window; windows are resampled for
    intervals.

    Sizes whose KL is 0 say nothing about a slope and are left out.
    """
    sums, weights = np.asarray(kl, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
    some = sums.sum(axis=1) > 0
    x, sums = np.log(np.asarray(sigmas)[some]), sums[some]
    if x.size < 2:
        return NoiseGrowth(None, None, None, None)
    y = np.log(sums.sum(axis=1) / weights.sum())
    draws = np.concatenate(
        [_logs(c, sums, weights) for c in resampled_counts(weights.size, resampling)]
    )  # [draws, sigmas]
    tail = (1 - confidence) / 2

    def between(value: float, drawn: NDArray[np.float64]) -> Interval:
        lo, hi = np.quantile(drawn, [tail, 1 - tail])
        return Interval(value, float(lo), float(hi))

    slope = between(float(_slope(x, y[None])[0]), _slope(x, draws))
    run = longest_run(
        [abs(float(s) - QUADRATIC) <= NOISE_TOLERANCE for s in np.diff(y) / np.diff(x)]
    )
    if run is None:
        return NoiseGrowth(slope, None, None, None)
    first, last = run
    inside = slice(first, last + 2)
    level = (y - QUADRATIC * x)[inside].mean()
    drawn = np.exp((draws - QUADRATIC * x)[:, inside].mean(axis=1))
    return NoiseGrowth(
        slope, math.exp(x[first]), math.exp(x[last + 1]), between(math.exp(float(level)), drawn)
    )


def longest_run(good: Sequence[bool]) -> tuple[int, int] | None:
    """First and last index of the longest run of true values, the earliest of equals; None without
    any.
    """
    best: tuple[int, int] | None = None
    start: int | None = None
    for i, value in enumerate([*good, False]):
        if value and start is None:
            start = i
        elif not value and start is not None:
            if best is None or i - start > best[1] - best[0] + 1:
                best = start, i - 1
            start = None
    return best


def _logs(
    counts: NDArray[np.float64], sums: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Log of the mean KL of every size in each draw [draws, sigmas]."""
    found: NDArray[np.float64] = np.log(
        np.maximum(counts @ sums.T, 1e-300) / (counts @ weights)[:, None]
    )
    return found


def _slope(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least-squares slope of each row of y over x."""
    off = x - x.mean()
    found: NDArray[np.float64] = (y @ off) / (off @ off)
    return found
