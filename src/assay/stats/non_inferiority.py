"""Whether one paired difference is no worse than another allows, and what would decide it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from assay.stats import ClusterEstimate, Interval, cluster_ratio, student_t
from assay.stats.resolution import MIN_WINDOWS

POWER = 0.8
"""Chance with which the number of windows or questions that is named decides, were the estimates
the truth.
"""


class Standing(StrEnum):
    """How something stands against its control."""

    NO_WORSE = "no worse"
    WORSE = "worse"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class PairedDifference:
    """Mean of a minus mean of b by window, with the two-sided p-value of "no difference"."""

    difference: ClusterEstimate
    p_value: float


def paired_difference(
    a_sums: ArrayLike, b_sums: ArrayLike, tokens: ArrayLike, confidence: float = 0.95
) -> PairedDifference:
    """Difference of two means over the same tokens, from the sums of each window."""
    from scipy.special import stdtr

    a, b = np.asarray(a_sums, dtype=np.float64), np.asarray(b_sums, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(f"both candidates need the same windows, got {a.size} and {b.size}")
    estimate = cluster_ratio(a - b, tokens, confidence)
    if estimate.clusters < 2:
        return PairedDifference(estimate, math.nan)
    if estimate.se == 0:
        return PairedDifference(estimate, 1.0 if estimate.value == 0 else 0.0)
    t = abs(estimate.value) / estimate.se
    return PairedDifference(estimate, float(2 * stdtr(estimate.clusters - 1, -t)))


@dataclass(frozen=True)
class NonInferiority:
    """What a candidate loses against its control in a mean of which less is better.

    `difference` is the mean of the candidate minus that of the control; its 95 % interval holds the
    error of the margin too. `margin` is how much more is still no worse. `power` is the chance to
    show that with as many windows, were the two equal; `windows_needed` decides with a chance of 80
    % where the estimates stay where they are (None: no number does).
    """

    standing: Standing
    difference: Interval
    margin: float
    power: float
    windows_needed: int | None


def non_inferiority(
    candidate: ArrayLike,
    control: ArrayLike,
    tokens: ArrayLike,
    *,
    share: float,
    least: float = 0.0,
    windows: int | None = None,
) -> NonInferiority:
    """Judge the mean of a candidate against `share` · the larger of |mean of the control| and
    `least` as its margin.

    Sums of each cluster of windows and its tokens. The margin is estimated from the same windows as
    the difference, so what is tested is one mean: with c the control's, Σ (candidate − (1 ± share)
    c) / Σ tokens against 0. `windows` are those that were scored, where several of them make one
    cluster; fewer than 8 are always undecided.
    """
    a, b, n = (np.asarray(x, dtype=np.float64) for x in (candidate, control, tokens))
    if not a.shape == b.shape == n.shape:
        raise ValueError(f"both need the same windows, got {a.size}, {b.size} and {n.size}")
    if not (share >= 0 and least >= 0):
        raise ValueError(f"a margin cannot be negative, got {share} of at least {least}")
    own = float(b.sum() / n.sum())
    margin = share * max(abs(own), least)
    allowed = share * math.copysign(1.0, own) * b if abs(own) > least else margin * n
    lost = cluster_ratio(a - b - allowed, n)
    windows = lost.clusters if windows is None else windows
    interval = Interval(*(x + margin for x in (lost.value, lost.interval.lo, lost.interval.hi)))
    if windows < MIN_WINDOWS or not math.isfinite(lost.se):
        standing = Standing.UNDECIDED
    elif lost.interval.hi <= 0:
        standing = Standing.NO_WORSE
    else:
        standing = Standing.WORSE if lost.interval.lo > 0 else Standing.UNDECIDED
    return NonInferiority(
        standing, interval, margin, _power(lost, margin), _to_decide(lost, windows)
    )


def _power(lost: ClusterEstimate, margin: float) -> float:
    """P(T + margin / SE ≥ t), T of Student's t, where the difference is 0."""
    from scipy.special import stdtr

    if not math.isfinite(lost.se):
        return 0.0
    if lost.se == 0:
        return 1.0
    df = lost.clusters - 1
    return float(stdtr(df, margin / lost.se - student_t(df, 0.95)))


def _to_decide(lost: ClusterEstimate, windows: int) -> int | None:
    """Windows G at which |lost| is (t + z of 80 %) standard errors, SE falling as 1/√G; at least
    8.
    """
    if lost.se == 0:
        return MIN_WINDOWS
    if lost.value == 0 or not math.isfinite(lost.se):
        return None
    reach = student_t(max(lost.clusters - 1, MIN_WINDOWS - 1), 0.95) + NormalDist().inv_cdf(POWER)
    needed = math.ceil(windows * (reach * lost.se / abs(lost.value)) ** 2)
    return max(MIN_WINDOWS, needed) if needed <= MOST_NEEDED else None


MOST_NEEDED = 1_000_000
