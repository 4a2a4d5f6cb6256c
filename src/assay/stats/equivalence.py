"""Is a difference within a declared margin, outside it, or is the evidence too thin to say?

A point estimate inside a margin proves nothing; an interval inside it does (two one-sided tests: Schuirmann,
J. Pharmacokinet. Biopharm. 15 (1987) 657; with two-sided 95 % intervals each test has level 2.5 %). An interval
wholly outside proves the opposite; one that crosses a bound leaves it open.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from assay.stats.cluster import ClusterEstimate, student_t
from assay.stats.intervals import Interval, check_confidence, percent_change

# -----------------------------------------------------------------------------
# What a number of windows can resolve, before the run and after an undecided one.
#
# The error of a mean over G windows falls as 1/√G. A pilot of G₀ windows with the standard error SE₀ therefore
# predicts the half-width t(G − 1) · SE₀ · √(G₀/G) for G windows.

MIN_PILOT = 4
"""Fewer windows say next to nothing about the spread."""

MIN_WINDOWS = 8
"""Below this the intervals are not trusted and a comparison is inconclusive."""


@dataclass(frozen=True)
class Resolution:
    """The half-width of an interval that G windows are expected to give.

    `lo` and `hi` bound it as far as the pilot can tell (χ² interval of the pilot's variance): with four windows they
    are 0.57 and 3.7 times the half-width.
    """

    windows: int
    half_width: float
    lo: float
    hi: float


def resolution(pilot: ClusterEstimate, windows: int, confidence: float = 0.95) -> Resolution:
    """What `windows` windows will resolve, from a pilot of at least four (ValueError with fewer)."""
    from scipy.special import chdtri

    if pilot.clusters < MIN_PILOT:
        raise ValueError(f"a pilot needs at least {MIN_PILOT} windows, got {pilot.clusters}")
    if windows < 2:
        raise ValueError("an interval needs at least two windows")
    half = student_t(windows - 1, confidence) * pilot.se * math.sqrt(pilot.clusters / windows)
    df, tail = pilot.clusters - 1, (1 - check_confidence(confidence)) / 2
    # chdtri inverts the upper tail of χ²: P(χ² > x) = p.
    lo, hi = (math.sqrt(df / float(chdtri(df, p))) for p in (tail, 1 - tail))
    return Resolution(windows, half, half * lo, half * hi)


def windows_for(pilot: ClusterEstimate, half_width: float, confidence: float = 0.95) -> int | None:
    """The smallest number of windows (at least 8) whose interval is expected to be no wider than ± `half_width`.

    None where no number below a million is enough.
    """
    if not half_width > 0:
        raise ValueError("a half-width must be positive")
    lo, hi = MIN_WINDOWS, 1_000_000
    if resolution(pilot, hi, confidence).half_width > half_width:
        return None
    while lo < hi:
        middle = (lo + hi) // 2
        if resolution(pilot, middle, confidence).half_width <= half_width:
            hi = middle
        else:
            lo = middle + 1
    return lo


def windows_needed(
    estimate: float, half_width: float, windows: int, lo: float = -math.inf, hi: float = math.inf
) -> int | None:
    """Windows at which the interval around `estimate` would fit into [lo, hi]: ⌈G · (t·SE / distance)²⌉, at least 8.

    `half_width` is t·SE at G = `windows`; the distance is that to the nearer bound. None where the estimate lies
    outside or on a bound (more windows will not bring it in), or where nothing is known of the error.
    """
    distance = min(estimate - lo, hi - estimate)
    if not distance > 0 or not math.isfinite(half_width):
        return None
    if math.isinf(distance):
        return MIN_WINDOWS
    return max(MIN_WINDOWS, math.ceil(windows * (half_width / distance) ** 2))


# -----------------------------------------------------------------------------


class Grade(StrEnum):
    """What a comparison of two distributions comes to."""

    ACCEPT = "ACCEPT"
    MARGINAL = "MARGINAL"
    REJECT = "REJECT"
    INCONCLUSIVE = "INCONCLUSIVE"


@dataclass(frozen=True)
class Margins:
    """Bounds in percent: of the change of perplexity either way, and of top-1 agreement from below."""

    dppl_accept: float = 1.0
    dppl_marginal: float = 3.0
    top1_accept: float = 95.0
    top1_marginal: float = 85.0

    def __post_init__(self) -> None:
        if not 0 < self.dppl_accept <= self.dppl_marginal < 100:
            raise ValueError(
                f"need 0 < accept ≤ marginal < 100 for perplexity, got {self.dppl_accept} and {self.dppl_marginal}"
            )
        if not 0 <= self.top1_marginal <= self.top1_accept <= 100:
            raise ValueError(
                f"need 0 ≤ marginal ≤ accept ≤ 100 for top-1, got {self.top1_marginal} and {self.top1_accept}"
            )

    def bounds(self, grade: Grade) -> tuple[float, float]:
        """(± perplexity, top-1 from below) of ACCEPT or MARGINAL."""
        if grade is Grade.ACCEPT:
            return self.dppl_accept, self.top1_accept
        return self.dppl_marginal, self.top1_marginal


@dataclass(frozen=True)
class Judgement:
    """The grade, the one that the point estimates alone would give, and what would decide an open case.

    `aim` is the better grade that is still open (None where nothing is); `windows_needed` are the windows at which
    its margins would hold if the estimates stay where they are, None where they lie outside it.
    """

    grade: Grade
    grade_point: Grade
    dppl_pct: Interval
    top1_pct: Interval
    aim: Grade | None = None
    windows_needed: int | None = None


def grade_point(dppl_pct: float, top1_pct: float, margins: Margins | None = None) -> Grade:
    """The field's older rule, on point estimates: never inconclusive, whatever the error."""
    margins = margins or Margins()
    for grade in (Grade.ACCEPT, Grade.MARGINAL):
        dppl, top1 = margins.bounds(grade)
        if abs(dppl_pct) <= dppl and top1_pct >= top1:
            return grade
    return Grade.REJECT


def grade_intervals(
    dppl_pct: Interval, top1_pct: Interval, windows: int, margins: Margins | None = None
) -> Grade:
    """The grade by two-sided intervals; fewer than 8 windows are always INCONCLUSIVE."""
    margins = margins or Margins()
    if windows < MIN_WINDOWS:
        return Grade.INCONCLUSIVE
    for grade in (Grade.ACCEPT, Grade.MARGINAL):
        if _holds(dppl_pct, top1_pct, *margins.bounds(grade)):
            return grade
    if _fails(dppl_pct, top1_pct, *margins.bounds(Grade.MARGINAL)):
        return Grade.REJECT
    return Grade.INCONCLUSIVE


def judge(log_ratio: ClusterEstimate, top1: ClusterEstimate, margins: Margins | None = None) -> Judgement:
    """Grade a candidate from the mean of d = NLL_candidate − NLL_reference and the share of equal top-1 tokens.

    Both by window; `top1` is a share between 0 and 1. The interval of the perplexity is that of the log ratio,
    transformed (e^lo − 1 … e^hi − 1).
    """
    margins = margins or Margins()
    dppl = percent_change(log_ratio.interval)
    agreement = Interval(*(100 * x for x in (top1.value, top1.interval.lo, top1.interval.hi)))
    windows = min(log_ratio.clusters, top1.clusters)
    grade = grade_intervals(dppl, agreement, windows, margins)
    point = grade_point(dppl.value, agreement.value, margins)
    aim = _aim(grade, point, dppl, agreement, margins)
    needed = None if aim is None else _needed(log_ratio, agreement, windows, *margins.bounds(aim))
    return Judgement(grade, point, dppl, agreement, aim, needed)


def tost_p(estimate: ClusterEstimate, lo: float, hi: float) -> float:
    """The p-value of two one-sided t tests: small where `estimate` lies between `lo` and `hi` beyond doubt.

    p = max(P(T > (R − lo)/SE), P(T > (hi − R)/SE)), G − 1 degrees of freedom. NaN where nothing is known of the error.
    """
    from scipy.special import stdtr

    if math.isnan(estimate.se):
        return math.nan
    if estimate.se == 0:
        return 0.0 if lo < estimate.value < hi else 1.0
    distance = min(estimate.value - lo, hi - estimate.value)
    return float(stdtr(estimate.clusters - 1, -distance / estimate.se))


def _holds(dppl: Interval, top1: Interval, dppl_bound: float, top1_bound: float) -> bool:
    return dppl.within(-dppl_bound, dppl_bound) and top1.lo >= top1_bound


def _fails(dppl: Interval, top1: Interval, dppl_bound: float, top1_bound: float) -> bool:
    return dppl.outside(-dppl_bound, dppl_bound) or top1.hi < top1_bound


def _aim(grade: Grade, point: Grade, dppl: Interval, top1: Interval, margins: Margins) -> Grade | None:
    """The best grade that is neither reached nor ruled out; for an inconclusive case, the one that it points at."""
    if grade is Grade.MARGINAL:
        ruled_out = _fails(dppl, top1, *margins.bounds(Grade.ACCEPT))
        return None if ruled_out else Grade.ACCEPT
    if grade is Grade.INCONCLUSIVE:
        return point if point is Grade.ACCEPT else Grade.MARGINAL
    return None


def _needed(
    log_ratio: ClusterEstimate, top1: Interval, windows: int, dppl_bound: float, top1_bound: float
) -> int | None:
    """Windows at which both metrics would be inside their bounds; the perplexity is judged on the log scale."""
    lo, hi = math.log1p(-dppl_bound / 100), math.log1p(dppl_bound / 100)
    by_metric = (
        windows_needed(log_ratio.value, log_ratio.interval.hi - log_ratio.value, windows, lo, hi),
        # At the edge of [0, 100] the interval is lopsided; its lower half is what has to fit.
        windows_needed(top1.value, top1.value - top1.lo, windows, lo=top1_bound),
    )
    if any(needed is None for needed in by_metric):
        return None
    return max(needed for needed in by_metric if needed is not None)


# -----------------------------------------------------------------------------
# Several tests at once: Holm's step-down adjustment (Holm, Scand. J. Statist. 6 (1979) 65).


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values in the order given: p̃₍ᵢ₎ = max over j ≤ i of min(1, (m − j + 1) p₍ⱼ₎).

    Rejecting every test with p̃ ≤ α keeps the chance of one false rejection or more at α, whatever the dependence.
    """
    if any(not 0.0 <= p <= 1.0 for p in p_values):
        raise ValueError(f"p-values must lie between 0 and 1, got {list(p_values)}")
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
