"""Two candidates on the same windows or questions: their difference is judged, not their two intervals.

What the windows or questions have in common (a hard passage) cancels. *No worse* means within a declared margin, which
an interval must show: the upper bound of what is lost, one-sided at 97.5 %, lies within it (non-inferiority: ICH E9; the
two-sided 95 % interval of the difference has the same bound). *Worse* means that the lower bound lies beyond the margin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from math import comb
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from assay.stats.cluster import ClusterEstimate, cluster_ratio, student_t
from assay.stats.equivalence import MIN_WINDOWS
from assay.stats.intervals import Interval, newcombe, wilson

POWER = 0.8
"""Chance with which the number of windows or questions that is named decides, were the estimates the truth."""


class Standing(StrEnum):
    """How something stands against its control."""

    NO_WORSE = "no worse"
    WORSE = "worse"
    UNDECIDED = "undecided"


# -----------------------------------------------------------------------------
# Means over the same windows.


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

    `difference` is the mean of the candidate minus that of the control; its 95 % interval holds the error of the margin too.
    `margin` is how much more is still no worse. `power` is the chance to show that with as many windows, were the two
    equal; `windows_needed` decides with a chance of 80 % where the estimates stay where they are (None: no number does).
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
    """Judge the mean of a candidate against `share` · the larger of |mean of the control| and `least` as its margin.

    Sums of each cluster of windows and its tokens. The margin is estimated from the same windows as the difference, so
    what is tested is one mean: with c the control's, Σ (candidate − (1 ± share) c) / Σ tokens against 0. `windows` are
    those that were scored, where several of them make one cluster; fewer than 8 are always undecided.
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
    return NonInferiority(standing, interval, margin, _power(lost, margin), _needed(lost, windows))


def _power(lost: ClusterEstimate, margin: float) -> float:
    """P(T + margin / SE ≥ t), T of Student's t, where the difference is 0."""
    from scipy.special import stdtr

    if not math.isfinite(lost.se):
        return 0.0
    if lost.se == 0:
        return 1.0
    df = lost.clusters - 1
    return float(stdtr(df, margin / lost.se - student_t(df, 0.95)))


def _needed(lost: ClusterEstimate, windows: int) -> int | None:
    """Windows G at which |lost| is (t + z of 80 %) standard errors, SE falling as 1/√G; at least 8."""
    if lost.se == 0:
        return MIN_WINDOWS
    if lost.value == 0 or not math.isfinite(lost.se):
        return None
    reach = student_t(max(lost.clusters - 1, MIN_WINDOWS - 1), 0.95) + NormalDist().inv_cdf(POWER)
    needed = math.ceil(windows * (reach * lost.se / abs(lost.value)) ** 2)
    return max(MIN_WINDOWS, needed) if needed <= _MOST else None


_MOST = 1_000_000


# -----------------------------------------------------------------------------
# Right and wrong answers to the same questions.


def mcnemar(only_ours: int, only_theirs: int) -> float:
    """Two-sided mid-p value of McNemar's exact test: of the pairs that differ, half are expected on either side.

    p = 2 P(X < k) + P(X = k) with k the smaller count and X binomial (n, ½); Fagerland, Lydersen and Laake, BMC Med.
    Res. Methodol. 13 (2013) 91.
    """
    n, k = int(only_ours + only_theirs), int(min(only_ours, only_theirs))
    if n == 0:
        return 1.0
    below, at, all_ = sum(comb(n, i) for i in range(k)), comb(n, k), 2**n
    return float(1.0 - at / (2 * all_) if 2 * k == n else (2 * below + at) / all_)


@dataclass(frozen=True)
class Answers:
    """Right answers of ours against theirs: difference of the shares with its 95 % interval, p-value of "no difference".

    `standing` is *no worse* where even the lower bound shows no loss beyond the margin, *worse* where the upper bound
    shows one. `questions_needed` decide with a chance of 80 % where the shares stay what they are; None: no number does.
    """

    standing: Standing
    difference: Interval
    p_value: float
    questions_needed: int | None


def paired_answers(only_ours: int, only_theirs: int, asked: int, *, margin: float = 0.0) -> Answers:
    """From answers to the same questions: how many only we and only they got right, of how many that were asked.

    `margin` is a difference of shares. The interval is that of Tango's score test (Stat. Med. 17 (1998) 891), which
    holds for few questions and for none that differ. Questions for 80 % power after Connor (Biometrics 43 (1987) 207).
    """
    if min(only_ours, only_theirs) < 0 or only_ours + only_theirs > asked or asked < 1:
        raise ValueError(f"{only_ours} and {only_theirs} of {asked} questions is not possible")
    value, apart = (only_ours - only_theirs) / asked, (only_ours + only_theirs) / asked
    interval = Interval(
        value, _bound(only_ours, only_theirs, asked, -1.0), _bound(only_ours, only_theirs, asked, 1.0)
    )
    p = mcnemar(only_ours, only_theirs)
    needed = _questions(value + margin, apart, value)
    if apart == 0 and margin > 0:  # where the two never differ, the bound is z² / (n + z²)
        needed = math.ceil(_Z**2 * (1 - margin) / margin)
    return Answers(_standing(interval, p, margin), interval, p, needed)


def _bound(b: int, c: int, n: int, side: float) -> float:
    """The end of Tango's interval on one side (±1): the difference at which the score is z, by bisection."""

    def score(d: float) -> float:
        half = ((2 * n - b + c) * d - b - c) / 2
        q = (math.sqrt(half**2 + 2 * n * c * d * (1 - d)) - half) / (2 * n)
        variance = n * (2 * q + d * (1 - d))
        return (b - c - n * d) / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, -side)

    near, far = (b - c) / n, side
    for _ in range(60):
        middle = (near + far) / 2
        near, far = (middle, far) if abs(score(middle)) < _Z else (near, middle)
    return near


def counted_answers(ours: int, asked: int, theirs: int, asked_theirs: int) -> Answers:
    """From two counts alone, where nobody knows which questions were the same: Newcombe's interval, a pooled z test."""
    interval = newcombe(ours, asked, theirs, asked_theirs)
    a, b = wilson(ours, asked).value, wilson(theirs, asked_theirs).value
    pooled = (ours + theirs) / (asked + asked_theirs)
    se = math.sqrt(pooled * (1 - pooled) * (1 / asked + 1 / asked_theirs))
    p = 2 * NormalDist().cdf(-abs(a - b) / se) if se else 1.0
    # Independent answers differ as often as this.
    return Answers(_standing(interval, p, 0.0), interval, p, _questions(a - b, a + b - 2 * a * b, a - b))


_Z = NormalDist().inv_cdf(0.975)


def _standing(difference: Interval, p_value: float, margin: float) -> Standing:
    """By the interval and, without a margin, by the exact test too: both must say so."""
    if margin == 0 and p_value > 0.05:
        return Standing.UNDECIDED
    if difference.lo >= -margin:
        return Standing.NO_WORSE
    return Standing.WORSE if difference.hi < -margin else Standing.UNDECIDED


def _questions(distance: float, apart: float, difference: float) -> int | None:
    """n = (z₀.₉₇₅ √ψ + z₀.₈ √(ψ − δ²))² / distance², ψ the share of questions on which the two differ."""
    if distance == 0 or apart == 0:
        return None
    spread = _Z * math.sqrt(apart) + NormalDist().inv_cdf(POWER) * math.sqrt(max(0.0, apart - difference**2))
    needed = math.ceil((spread / distance) ** 2)
    return needed if needed <= _MOST else None
