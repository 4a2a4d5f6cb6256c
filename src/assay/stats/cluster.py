"""Means, ratios and proportions with cluster-robust intervals (CR1, Student's t)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from assay.stats.interval import Interval, check_confidence
from assay.stats.proportion import wilson


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
