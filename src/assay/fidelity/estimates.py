"""Means and shares over the finite tokens of all windows, with intervals by window."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from assay.fidelity.observation import WindowObservation
from assay.stats import ClusterEstimate, Interval, cluster_proportion, cluster_ratio, not_negative


def mean_of(
    seen: Sequence[WindowObservation], values: Sequence[NDArray[np.float64]]
) -> ClusterEstimate:
    """Mean of what cannot be negative, over finite tokens by window; where it is infinite (a token
    ruled out), so is its interval. An interval that would reach below zero has its lower end on the
    log scale."""
    sums = [float(v[w.finite].sum()) for w, v in zip(seen, values, strict=True) if w.finite.any()]
    counts = _counts(seen)
    if not np.isfinite(sums).all():
        nothing = Interval(math.inf, -math.inf, math.inf)
        return ClusterEstimate(math.inf, math.nan, nothing, len(counts), float(sum(counts)))
    return not_negative(cluster_ratio(sums, counts))


def share_of(
    seen: Sequence[WindowObservation], values: Sequence[NDArray[np.bool_]]
) -> ClusterEstimate:
    """Share of finite tokens, by window."""
    sums = [int(v[w.finite].sum()) for w, v in zip(seen, values, strict=True) if w.finite.any()]
    return cluster_proportion(sums, _counts(seen))


def by_window(seen: Sequence[WindowObservation], name: str) -> list[NDArray[np.float64]]:
    """One statistic of the finite tokens, an array a window; windows without any are left out."""
    return [getattr(w, name)[w.finite] for w in seen if w.finite.any()]


def _counts(seen: Sequence[WindowObservation]) -> list[int]:
    return [int(w.finite.sum()) for w in seen if w.finite.any()]
