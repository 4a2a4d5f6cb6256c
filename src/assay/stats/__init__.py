"""Intervals and errors that the verdicts rest on: here an estimate with the interval around it, and
means and ratios whose errors come from clusters, such as windows of text; `equivalence` has the
tests against a margin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Interval:
    """A point estimate and the bounds of its two-sided confidence interval."""

    value: float
    lo: float
    hi: float

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.lo <= value <= self.hi

    def within(self, lo: float, hi: float) -> bool:
        """Whether the whole interval lies in [lo, hi]."""
        return lo <= self.lo and self.hi <= hi

    def outside(self, lo: float, hi: float) -> bool:
        """Whether the whole interval lies outside [lo, hi]."""
        return self.hi < lo or hi < self.lo


def interval_json(interval: Interval) -> dict[str, float]:
    """An interval as JSON: `value`, `lo` and `hi`."""
    return {"value": interval.value, "lo": interval.lo, "hi": interval.hi}


def check_confidence(confidence: float) -> float:
    """`confidence` if it is a probability strictly between 0 and 1."""
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    return confidence


def percent_change(log_ratio: Interval) -> Interval:
    """An interval of ln(a/b) as the relative change 100 · (a/b − 1), bound by bound."""
    return Interval(*(100 * _expm1(x) for x in (log_ratio.value, log_ratio.lo, log_ratio.hi)))


def _expm1(x: float) -> float:
    try:
        return math.expm1(x)
    except OverflowError:
        return math.inf


# Intervals for proportions.
#
# Wilson, J. Am. Stat. Assoc. 22 (1927) 209; Newcombe, Stat. Med. 17 (1998) 873, method 10, for the
# difference of two; Clopper and Pearson, Biometrika 26 (1934) 404, where coverage must never fall
# below the nominal one.


def wilson(successes: float, n: float, confidence: float = 0.95) -> Interval:
    """Score interval of a proportion, `successes` out of `n`.

    Centre (p + z²/2n) / (1 + z²/n), half-width z √(p(1−p)/n + z²/4n²) / (1 + z²/n). With n = 0
    nothing is known: the interval is [0, 1] and the value is NaN. Effective counts (n divided by a
    design effect) need not be whole.
    """
    _check_counts(successes, n)
    z = NormalDist().inv_cdf(0.5 + check_confidence(confidence) / 2)
    if n == 0:
        return Interval(math.nan, 0.0, 1.0)
    p = successes / n
    scale = 1.0 + z * z / n
    centre = (p + z * z / (2 * n)) / scale
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / scale
    # At the ends the formula gives exactly 0 and 1, but for rounding.
    lo = 0.0 if successes == 0 else max(0.0, centre - half)
    hi = 1.0 if successes == n else min(1.0, centre + half)
    return Interval(p, lo, hi)


def newcombe(
    successes_a: float, n_a: float, successes_b: float, n_b: float, confidence: float = 0.95
) -> Interval:
    """Interval of p_a − p_b for two independent proportions (Newcombe's hybrid of two Wilson
    intervals).
    """
    a, b = wilson(successes_a, n_a, confidence), wilson(successes_b, n_b, confidence)
    if n_a == 0 or n_b == 0:
        return Interval(math.nan, -1.0, 1.0)
    value = a.value - b.value
    lo = value - math.hypot(a.value - a.lo, b.hi - b.value)
    hi = value + math.hypot(a.hi - a.value, b.value - b.lo)
    return Interval(value, max(-1.0, lo), min(1.0, hi))


def _check_counts(successes: float, n: float) -> None:
    if not (0 <= successes <= n and math.isfinite(n)):
        raise ValueError(f"{successes} successes out of {n} is not possible")


# Means and ratios whose errors come from clusters, such as the windows that tokens were scored in.
#
# Tokens of one window are not independent; its sum is. The estimate is a ratio of sums R = Σ y_g /
# Σ w_g over clusters g, and its variance the CR1 sandwich of that ratio (Cameron and Miller, J.
# Human Resources 50 (2015) 317):
#
#     Var(R) = G / (G − 1) · Σ (y_g − R w_g)² / (Σ w_g)²,
#
# with intervals from Student's t with G − 1 degrees of freedom. With w_g the number of tokens this
# is what an ordinary regression on a constant gives with errors clustered by window.


@dataclass(frozen=True)
class ClusterEstimate:
    """A ratio of sums with its cluster-robust error.

    With a single cluster nothing is known about the error: `se` is NaN and the interval is
    infinite. `design_effect` is the variance divided by the one that independent observations would
    have, NaN where that cannot be told.
    """

    value: float
    se: float
    interval: Interval
    clusters: int
    n: float
    """The sum of the weights; for a mean, the number of observations."""
    design_effect: float = math.nan

    @property
    def effective_n(self) -> float:
        """How many independent observations would be as precise."""
        return self.n / self.design_effect if self.design_effect > 0 else math.nan


def student_t(df: float, confidence: float) -> float:
    """The two-sided critical value of Student's t: P(|T| ≤ t) = `confidence` with `df` degrees of
    freedom.
    """
    from scipy.special import stdtrit

    return float(stdtrit(df, 0.5 + check_confidence(confidence) / 2))


def cluster_ratio(
    numerators: ArrayLike, denominators: ArrayLike, confidence: float = 0.95
) -> ClusterEstimate:
    """Σ numerators / Σ denominators, one entry of each for a cluster.

    Clusters with the denominator 0 are left out; the others must be positive.
    """
    check_confidence(confidence)
    y = np.asarray(numerators, dtype=np.float64)
    w = np.asarray(denominators, dtype=np.float64)
    if y.ndim != 1 or y.shape != w.shape:
        raise ValueError(f"need two equally long lists, got shapes {y.shape} and {w.shape}")
    if not (np.isfinite(y).all() and np.isfinite(w).all()) or (w < 0).any():
        raise ValueError("sums must be finite and weights not negative")
    y, w = y[w > 0], w[w > 0]
    clusters, total = int(w.size), float(w.sum())
    if clusters == 0:
        raise ValueError("there is no cluster with any weight")
    value = float(y.sum()) / total
    if clusters == 1:
        return ClusterEstimate(value, math.nan, Interval(value, -math.inf, math.inf), 1, total)
    residual = y - value * w
    variance = clusters / (clusters - 1) * float(residual @ residual) / total**2
    se = math.sqrt(variance)
    half = student_t(clusters - 1, confidence) * se
    return ClusterEstimate(value, se, Interval(value, value - half, value + half), clusters, total)


def not_negative(estimate: ClusterEstimate) -> ClusterEstimate:
    """The estimate of what cannot be negative: an interval that would reach below 0 has its lower
    end on the log scale.
    """
    own = estimate.interval
    lower = max(own.lo, 0.0)
    if own.lo < 0 < own.value and math.isfinite(own.hi):
        lower = own.value * math.exp((own.value - own.hi) / own.value)
    return replace(estimate, interval=Interval(own.value, lower, own.hi))


def cluster_mean(groups: Sequence[ArrayLike], confidence: float = 0.95) -> ClusterEstimate:
    """The mean of all observations, given as one list for each cluster, with its design effect.

    The design effect compares with s²/n, the variance of the mean of n independent observations.
    """
    arrays = [np.asarray(group, dtype=np.float64).ravel() for group in groups]
    sums = [float(a.sum()) for a in arrays]
    counts = [float(a.size) for a in arrays]
    estimate = cluster_ratio(sums, counts, confidence)
    values = np.concatenate(arrays)
    if estimate.clusters == 1 or values.size < 2:
        return estimate
    independent = float(values.var(ddof=1)) / values.size
    effect = estimate.se**2 / independent if independent > 0 else math.nan
    return ClusterEstimate(
        estimate.value, estimate.se, estimate.interval, estimate.clusters, estimate.n, effect
    )


# Mean of independent values with Student's t interval (two-sided 95 % by default).


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean of `values` ± t(n − 1) · s / √n. For paired data, pass the differences.

    Needs at least two values (ValueError); non-finite values are the caller's to remove.
    """
    n = len(values)
    if n < 2:
        raise ValueError("an interval needs at least two values")
    from scipy.stats import t

    mean = math.fsum(values) / n
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    half = float(t.ppf(0.5 + confidence / 2, n - 1)) * math.sqrt(variance / n)
    return Interval(value=mean, lo=mean - half, hi=mean + half)


# A proportion whose trials come in clusters, such as top-1 agreement by window.


def cluster_proportion(
    successes: ArrayLike, trials: ArrayLike, confidence: float = 0.95
) -> ClusterEstimate:
    """Σ successes / Σ trials with its CR1 interval, kept inside [0, 1].

    Where every trial or none succeeded the clusters show no spread and CR1 would claim certainty;
    the far bound is then that of Wilson's interval (about z²/n off), and the design effect is 1 for
    want of anything better.
    """
    estimate = cluster_ratio(successes, trials, confidence)
    interval = estimate.interval
    if estimate.value in (0.0, 1.0):
        score = wilson(float(np.sum(successes)), estimate.n, confidence)
        lo, hi = min(interval.lo, score.lo), max(interval.hi, score.hi)
        return replace(
            estimate,
            interval=Interval(estimate.value, max(0.0, lo), min(1.0, hi)),
            design_effect=1.0,
        )
    p = estimate.value
    independent = p * (1 - p) / estimate.n
    return replace(
        estimate,
        interval=Interval(p, max(0.0, interval.lo), min(1.0, interval.hi)),
        design_effect=estimate.se**2 / independent,
    )


# Bootstrap by cluster: whole windows are drawn with replacement, so what correlates within one
# stays together.
#
# A draw is a vector of counts c_g ~ Multinomial(G; 1/G, …, 1/G). Everything below is a function of
# the counts, so both sides of a paired comparison are resampled by the same windows. Intervals are
# percentiles of the draws (Efron and Tibshirani, An Introduction to the Bootstrap (1993), ch. 13).
# The seed determines the draws.


_BLOCK = 1 << 21
"""Numbers worked on at once: bounds the memory at some tens of MB whatever the number of clusters.
"""


@dataclass(frozen=True)
class Resampling:
    """How often and from which seed clusters are drawn; part of the result, so that it can be had
    again.
    """

    draws: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise ValueError(f"need at least one draw, got {self.draws}")


def resampled_counts(clusters: int, resampling: Resampling) -> Iterator[NDArray[np.float64]]:
    """Blocks [b, G] of counts: how often each cluster is in a draw. Equal seeds give equal counts."""
    rng = np.random.default_rng(resampling.seed)
    rows = max(1, _BLOCK // clusters)
    for lo in range(0, resampling.draws, rows):
        size = min(rows, resampling.draws - lo)
        picks = rng.integers(0, clusters, size=(size, clusters))
        flat = picks + np.arange(size)[:, None] * clusters
        counts = np.bincount(flat.ravel(), minlength=size * clusters)
        yield counts.reshape(size, clusters).astype(np.float64)


def bootstrap_quantiles(
    groups: Sequence[ArrayLike],
    probabilities: Sequence[float],
    confidence: float = 0.95,
    resampling: Resampling | None = None,
) -> list[Interval]:
    """Quantiles of all observations, given as one list for each cluster, with percentile intervals.

    The quantile of p is the smallest observation that at least the share p does not exceed (the
    inverse of the distribution function, no interpolation), exact in every draw. +∞ is an ordinary
    value; NaN is a ValueError.
    """
    check_confidence(confidence)
    arrays = [np.asarray(group, dtype=np.float64).ravel() for group in groups]
    arrays = [a for a in arrays if a.size]
    if not arrays:
        raise ValueError("there is no observation")
    if any(not 0.0 < p <= 1.0 for p in probabilities):
        raise ValueError(f"probabilities must lie in (0, 1], got {list(probabilities)}")
    values = np.concatenate(arrays)
    if np.isnan(values).any():
        raise ValueError("NaN has no rank: leave it out")
    order = np.argsort(values, kind="stable")
    ranked = values[order]
    cluster = np.repeat(np.arange(len(arrays)), [a.size for a in arrays])[order]
    ranks = _RankedClusters(cluster, len(arrays))
    drawn = [
        [ranked[ranks.at(counts, p)] for p in probabilities]
        for counts in resampled_counts(len(arrays), resampling or Resampling())
    ]
    result = []
    for i, p in enumerate(probabilities):
        point = float(ranked[_target(np.float64(values.size), p) - 1])
        result.append(
            _percentiles(point, np.concatenate([block[i] for block in drawn]), confidence)
        )
    return result


class _RankedClusters:
    """Weighted ranks among n sorted observations, where the weight of one is the count of its
    cluster.

    The cumulated weight is known at every `step`-th rank by one matrix product; only the block that
    holds the wanted rank is added up one by one: O(G √n) a draw in place of O(n).
    """

    def __init__(self, cluster: NDArray[np.int64], clusters: int) -> None:
        n = cluster.size
        self.step = max(1, math.isqrt(n))
        blocks = -(-n // self.step)
        flat = cluster * blocks + np.arange(n) // self.step
        per_block = np.bincount(flat, minlength=clusters * blocks).reshape(clusters, blocks)
        self.cumulated = per_block.cumsum(axis=1).astype(np.float64)
        # Padding points at an extra cluster that is never drawn.
        members = np.full(blocks * self.step, clusters)
        members[:n] = cluster
        self.members = members.reshape(blocks, self.step)

    def at(self, counts: NDArray[np.float64], p: float) -> NDArray[np.int64]:
        """Index of the p-quantile in each draw of a block of counts [b, G]."""
        rows = max(1, _BLOCK // max(self.step, self.cumulated.shape[1]))
        return np.concatenate(
            [self._at(counts[lo : lo + rows], p) for lo in range(0, len(counts), rows)]
        )

    def _at(self, counts: NDArray[np.float64], p: float) -> NDArray[np.int64]:
        weight = counts @ self.cumulated  # [b, blocks], exact: whole numbers far below 2^53
        target = _target(weight[:, -1], p)
        block = (weight < target[:, None]).sum(axis=1)
        draw = np.arange(len(counts))
        before = np.where(block > 0, weight[draw, block - 1], 0.0)
        padded = np.pad(counts, ((0, 0), (0, 1)))
        within = padded[draw[:, None], self.members[block]].cumsum(axis=1) + before[:, None]
        found: NDArray[np.int64] = block * self.step + (within < target[:, None]).sum(axis=1)
        return found


def _target(total: NDArray[np.float64] | np.float64, p: float) -> NDArray[np.int64]:
    """The rank of the p-quantile among `total`: ⌈p · total⌉, at least 1, safe from the rounding of
    p · total.
    """
    wanted = np.asarray(np.ceil(p * total * (1 - 1e-12)), dtype=np.int64)
    return np.maximum(wanted, 1)


def _percentiles(value: float, draws: NDArray[np.float64], confidence: float) -> Interval:
    tail = (1 - check_confidence(confidence)) / 2
    # No interpolation: between two infinite draws it would give NaN.
    lo, hi = np.quantile(draws, [tail, 1 - tail], method="inverted_cdf")
    return Interval(value, float(lo), float(hi))
