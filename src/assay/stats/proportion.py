"""A proportion whose trials come in clusters, such as top-1 agreement by window."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from assay.stats.cluster import ClusterEstimate, cluster_ratio
from assay.stats.interval import Interval
from assay.stats.wilson import wilson

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def cluster_proportion(successes: ArrayLike, trials: ArrayLike, confidence: float = 0.95) -> ClusterEstimate:
    """Σ successes / Σ trials with its CR1 interval, kept inside [0, 1].

    Where every trial or none succeeded the clusters show no spread and CR1 would claim certainty; the far bound is
    then that of Wilson's interval (about z²/n off), and the design effect is 1 for want of anything better.
    """
    import numpy as np

    estimate = cluster_ratio(successes, trials, confidence)
    interval = estimate.interval
    if estimate.value in (0.0, 1.0):
        score = wilson(float(np.sum(successes)), estimate.n, confidence)
        lo, hi = min(interval.lo, score.lo), max(interval.hi, score.hi)
        return replace(
            estimate, interval=Interval(estimate.value, max(0.0, lo), min(1.0, hi)), design_effect=1.0
        )
    p = estimate.value
    independent = p * (1 - p) / estimate.n
    return replace(
        estimate,
        interval=Interval(p, max(0.0, interval.lo), min(1.0, interval.hi)),
        design_effect=estimate.se**2 / independent,
    )
