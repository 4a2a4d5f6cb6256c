"""Is a difference within a declared margin, outside it, or is the evidence too thin to say?

A point estimate inside a margin proves nothing; an interval inside it does (two one-sided tests:
Schuirmann, J. Pharmacokinet. Biopharm. 15 (1987) 657; with two-sided 95 % intervals each test has
level 2.5 %). An interval wholly outside proves the opposite; one that crosses a bound leaves it
open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import comb
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from assay.stats import (
    ClusterEstimate,
    Interval,
    check_confidence,
    cluster_ratio,
    newcombe,
    percent_change,
    student_t,
    wilson,
)

# What a number of windows can resolve, before the run and after an undecided one.
#
# The error of a mean over G windows falls as 1/√G. A pilot of G₀ windows with the standard error
# SE₀ therefore predicts the half-width t(G − 1) · SE₀ · √(G₀/G) for G windows.

MIN_PILOT = 4
"""Fewer windows say next to nothing about the spread."""

MIN_WINDOWS = 8
"""Below this the intervals are not trusted and a comparison is inconclusive."""


@dataclass(frozen=True)
class Resolution:
    """The half-width of an interval that G windows are expected to give.

    `lo` and `hi` bound it as far as the pilot can tell (χ² interval of the pilot's variance): with
    four windows they are 0.57 and 3.7 times the half-width.
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
    """The smallest number of windows (at least 8) whose interval is expected to be no wider than ±
    `half_width`.

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
    """Windows at which the interval around `estimate` would fit into [lo, hi]: ⌈G · (t·SE /
    distance)²⌉, at least 8.

    `half_width` is t·SE at G = `windows`; the distance is that to the nearer bound. None where the
    estimate lies outside or on a bound (more windows will not bring it in), or where nothing is
    known of the error.
    """
    distance = min(estimate - lo, hi - estimate)
    if not distance > 0 or not math.isfinite(half_width):
        return None
    if math.isinf(distance):
        return MIN_WINDOWS
    return max(MIN_WINDOWS, math.ceil(windows * (half_width / distance) ** 2))


class Grade(StrEnum):
    """What a comparison of two distributions comes to."""

    ACCEPT = "ACCEPT"
    MARGINAL = "MARGINAL"
    REJECT = "REJECT"
    INCONCLUSIVE = "INCONCLUSIVE"


@dataclass(frozen=True)
class Margins:
    """Bounds: of the change of perplexity either way in percent, of top-1 agreement from below in
    percent, and of the mean KL divergence from above in nats."""

    dppl_accept: float = 1.0
    dppl_marginal: float = 3.0
    top1_accept: float = 95.0
    top1_marginal: float = 85.0
    kl_accept: float = 0.010
    kl_marginal: float = 0.030

    def __post_init__(self) -> None:
        if not 0 < self.dppl_accept <= self.dppl_marginal < 100:
            raise ValueError(
                f"need 0 < accept ≤ marginal < 100 for perplexity, got {self.dppl_accept} and"
                f" {self.dppl_marginal}"
            )
        if not 0 <= self.top1_marginal <= self.top1_accept <= 100:
            raise ValueError(
                f"need 0 ≤ marginal ≤ accept ≤ 100 for top-1, got {self.top1_marginal} and"
                f" {self.top1_accept}"
            )
        if not 0 < self.kl_accept <= self.kl_marginal:
            raise ValueError(
                f"need 0 < accept ≤ marginal for KL, got {self.kl_accept} and {self.kl_marginal}"
            )

    def bounds(self, grade: Grade) -> dict[str, tuple[float, float]]:
        """The range that each metric has to lie in for ACCEPT or MARGINAL."""
        if grade is Grade.ACCEPT:
            dppl, top1, kl = self.dppl_accept, self.top1_accept, self.kl_accept
        else:
            dppl, top1, kl = self.dppl_marginal, self.top1_marginal, self.kl_marginal
        return {"dppl": (-dppl, dppl), "top1": (top1, math.inf), "kl": (-math.inf, kl)}


@dataclass(frozen=True)
class Judgement:
    """The grade, the one that the point estimates alone would give, and what would decide an open
    case.

    `aim` is the better grade that is still open (None where nothing is); `windows_needed` are the
    windows at which its margins would hold if the estimates stay where they are, None where they
    lie outside it. `accept_excluded` says that some interval lies wholly outside the margins of
    ACCEPT: whatever else is open, it is no ACCEPT.
    """

    grade: Grade
    grade_point: Grade
    dppl_pct: Interval
    top1_pct: Interval
    aim: Grade | None = None
    windows_needed: int | None = None
    accept_excluded: bool = False
    confidence: float = 0.95
    """Of the intervals that the grade rests on; those that are shown have 95 %."""


def grade_point(dppl_pct: float, top1_pct: float, margins: Margins | None = None) -> Grade:
    """The grade by point estimates of perplexity and top-1 alone, as older tools have it: never
    inconclusive.
    """
    margins = margins or Margins()
    for grade in (Grade.ACCEPT, Grade.MARGINAL):
        bounds = margins.bounds(grade)
        if abs(dppl_pct) <= bounds["dppl"][1] and top1_pct >= bounds["top1"][0]:
            return grade
    return Grade.REJECT


def grade_intervals(
    metrics: Mapping[str, Interval], windows: int, margins: Margins | None = None
) -> Grade:
    """The grade by the two-sided intervals of the metrics (`dppl`, `top1`, `kl`; see
    `Margins.bounds`).

    ACCEPT and MARGINAL where every interval lies within its bounds, MARGINAL too where ACCEPT alone
    is undecided, REJECT where one lies wholly outside those of MARGINAL; fewer than 8 windows are
    always INCONCLUSIVE.
    """
    margins = margins or Margins()
    if windows < MIN_WINDOWS:
        return Grade.INCONCLUSIVE
    for grade in (Grade.ACCEPT, Grade.MARGINAL):
        if all(
            metrics[name].within(*bounds)
            for name, bounds in margins.bounds(grade).items()
            if name in metrics
        ):
            return grade
    return Grade.REJECT if _excluded(metrics, margins, Grade.MARGINAL) else Grade.INCONCLUSIVE


def judge(
    log_ratio: ClusterEstimate,
    top1: ClusterEstimate,
    kl: ClusterEstimate | None = None,
    margins: Margins | None = None,
    *,
    windows: int | None = None,
    confidence: float = 0.95,
    shown: ClusterEstimate | None = None,
) -> Judgement:
    """Grade a candidate from the mean of d = NLL_candidate − NLL_reference, the share of equal
    top-1 tokens (between 0 and 1) and the mean KL in nats.

    `shown` is the share of equal top-1 tokens that is reported, and that the point grade knows,
    where `top1` leaves out what rounding turned. `windows` are those that were scored, where
    several of them make one cluster. The interval of the perplexity is that of the log ratio,
    transformed (e^lo − 1 … e^hi − 1). `confidence` is that of the intervals which decide.
    """
    margins = margins or Margins()
    clusters = min(log_ratio.clusters, top1.clusters)
    windows = clusters if windows is None else windows
    common = _metrics(log_ratio, top1, kl, 0.95)
    metrics = common if confidence == 0.95 else _metrics(log_ratio, top1, kl, confidence)
    grade = grade_intervals(metrics, windows, margins)
    agreement = common["top1"] if shown is None else _percent(shown.interval)
    point = grade_point(common["dppl"].value, agreement.value, margins)
    excluded = windows >= MIN_WINDOWS and _excluded(metrics, margins, Grade.ACCEPT)
    aim = None
    if grade is Grade.MARGINAL and not excluded:
        aim = Grade.ACCEPT
    elif grade is Grade.INCONCLUSIVE:
        aim = (
            Grade.MARGINAL
            if excluded or not _holds_at_point(common, margins, Grade.ACCEPT)
            else Grade.ACCEPT
        )
    needed = None
    if aim is not None:
        half = log_ratio.interval.hi - log_ratio.value
        scale = _scale(log_ratio, confidence)
        needed = _needed(log_ratio.value, half * scale, metrics, windows, margins.bounds(aim))
    return Judgement(grade, point, common["dppl"], agreement, aim, needed, excluded, confidence)


def _metrics(
    log_ratio: ClusterEstimate, top1: ClusterEstimate, kl: ClusterEstimate | None, confidence: float
) -> dict[str, Interval]:
    ratio, agreement = at_confidence(log_ratio, confidence), at_confidence(top1, confidence)
    found = {"dppl": percent_change(ratio), "top1": _percent(agreement)}
    return found if kl is None else found | {"kl": at_confidence(kl, confidence)}


def _percent(share: Interval) -> Interval:
    return Interval(*(100 * x for x in (share.value, share.lo, share.hi)))


def at_confidence(estimate: ClusterEstimate, confidence: float) -> Interval:
    """The 95 % interval of an estimate widened or narrowed to another confidence, each side by the
    ratio of the t values.
    """
    scale, own = _scale(estimate, confidence), estimate.interval
    if scale == 1.0 or not math.isfinite(own.hi - own.lo):
        return own
    return Interval(
        own.value,
        own.value - scale * (own.value - own.lo),
        own.value + scale * (own.hi - own.value),
    )


def _scale(estimate: ClusterEstimate, confidence: float) -> float:
    if confidence == 0.95 or estimate.clusters < 2:
        return 1.0
    return student_t(estimate.clusters - 1, confidence) / student_t(estimate.clusters - 1, 0.95)


def _excluded(metrics: Mapping[str, Interval], margins: Margins, grade: Grade) -> bool:
    """Whether some metric lies wholly outside the bounds of `grade`."""
    return any(
        metrics[name].outside(*b) for name, b in margins.bounds(grade).items() if name in metrics
    )


def _holds_at_point(metrics: Mapping[str, Interval], margins: Margins, grade: Grade) -> bool:
    return all(
        lo <= metrics[name].value <= hi
        for name, (lo, hi) in margins.bounds(grade).items()
        if name in metrics
    )


def _needed(
    log_ratio: float,
    half_width: float,
    metrics: Mapping[str, Interval],
    windows: int,
    bounds: Mapping[str, tuple[float, float]],
) -> int | None:
    """Windows at which every metric would be inside its bounds; the perplexity is judged on the log
    scale.
    """
    lo, hi = (math.log1p(x / 100) for x in bounds["dppl"])
    agreement = metrics["top1"]
    by_metric = [
        windows_needed(log_ratio, half_width, windows, lo, hi),
        # At the edge of [0, 100] the interval is lopsided; its lower half is what has to fit.
        windows_needed(
            agreement.value, agreement.value - agreement.lo, windows, lo=bounds["top1"][0]
        ),
    ]
    if (kl := metrics.get("kl")) is not None:
        by_metric.append(windows_needed(kl.value, kl.hi - kl.value, windows, hi=bounds["kl"][1]))
    if any(needed is None for needed in by_metric):
        return None
    return max(needed for needed in by_metric if needed is not None)


def confidence_of_look(look: int) -> float:
    """Confidence of the deciding intervals when an undecided run is extended and judged again: 95 %
    at the first look,
    99 % at the second, then 99.5 %, 99.75 % …

    A run that is extended until it is decided would otherwise be accepted at the margin more often
    than one look allows. The error that is spent (Bonferroni) is 2.5 % on each side at the first
    look and less than 1 % more at all others.
    """
    if look < 1:
        raise ValueError("looks are counted from 1")
    return 0.95 if look == 1 else 1.0 - 0.01 / 2 ** (look - 2)


def tost_p(estimate: ClusterEstimate, lo: float, hi: float) -> float:
    """The p-value of two one-sided t tests: small where `estimate` lies between `lo` and `hi`
    beyond doubt.

    p = max(P(T > (R − lo)/SE), P(T > (hi − R)/SE)), G − 1 degrees of freedom. NaN where nothing is
    known of the error.
    """
    from scipy.special import stdtr

    if math.isnan(estimate.se):
        return math.nan
    if estimate.se == 0:
        return 0.0 if lo < estimate.value < hi else 1.0
    distance = min(estimate.value - lo, hi - estimate.value)
    return float(stdtr(estimate.clusters - 1, -distance / estimate.se))


# Several tests at once: Holm's step-down adjustment (Holm, Scand. J. Statist. 6 (1979) 65).


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values in the order given: p̃₍ᵢ₎ = max over j ≤ i of min(1, (m − j + 1) p₍ⱼ₎).

    Rejecting every test with p̃ ≤ α keeps the chance of one false rejection or more at α, whatever
    the dependence.
    """
    if any(not 0.0 <= p <= 1.0 for p in p_values):
        raise ValueError(f"p-values must lie between 0 and 1, got {list(p_values)}")
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


# Two candidates on the same windows or questions: their difference is judged, not their two
# intervals.
#
# What the windows or questions have in common (a hard passage) cancels. *No worse* means within a
# declared margin, which an interval must show: the upper bound of what is lost, one-sided at 97.5
# %, lies within it (non-inferiority: ICH E9; the two-sided 95 % interval of the difference has the
# same bound). *Worse* means that the lower bound lies beyond the margin.


POWER = 0.8
"""Chance with which the number of windows or questions that is named decides, were the estimates
the truth.
"""


class Standing(StrEnum):
    """How something stands against its control."""

    NO_WORSE = "no worse"
    WORSE = "worse"
    UNDECIDED = "undecided"


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
    """Windows G at which |lost| is (t + z of 80 %) standard errors, SE falling as 1/√G; at least 8."""
    if lost.se == 0:
        return MIN_WINDOWS
    if lost.value == 0 or not math.isfinite(lost.se):
        return None
    reach = student_t(max(lost.clusters - 1, MIN_WINDOWS - 1), 0.95) + NormalDist().inv_cdf(POWER)
    needed = math.ceil(windows * (reach * lost.se / abs(lost.value)) ** 2)
    return max(MIN_WINDOWS, needed) if needed <= _MOST else None


_MOST = 1_000_000


# Right and wrong answers to the same questions.


def mcnemar(only_ours: int, only_theirs: int) -> float:
    """Two-sided mid-p value of McNemar's exact test: of the pairs that differ, half are expected on
    either side.

    p = 2 P(X < k) + P(X = k) with k the smaller count and X binomial (n, ½); Fagerland, Lydersen
    and Laake, BMC Med. Res. Methodol. 13 (2013) 91.
    """
    n, k = int(only_ours + only_theirs), int(min(only_ours, only_theirs))
    if n == 0:
        return 1.0
    below, at, all_ = sum(comb(n, i) for i in range(k)), comb(n, k), 2**n
    return float(1.0 - at / (2 * all_) if 2 * k == n else (2 * below + at) / all_)


@dataclass(frozen=True)
class Answers:
    """Right answers of ours against theirs: difference of the shares with its 95 % interval,
    p-value of "no difference".

    `standing` is *no worse* where even the lower bound shows no loss beyond the margin, *worse*
    where the upper bound shows one. `questions_needed` decide with a chance of 80 % where the
    shares stay what they are; None: no number does.
    """

    standing: Standing
    difference: Interval
    p_value: float
    questions_needed: int | None


def paired_answers(only_ours: int, only_theirs: int, asked: int, *, margin: float = 0.0) -> Answers:
    """From answers to the same questions: how many only we and only they got right, of how many
    that were asked.

    `margin` is a difference of shares. The interval is that of Tango's score test (Stat. Med. 17
    (1998) 891), which holds for few questions and for none that differ. Questions for 80 % power
    after Connor (Biometrics 43 (1987) 207).
    """
    if min(only_ours, only_theirs) < 0 or only_ours + only_theirs > asked or asked < 1:
        raise ValueError(f"{only_ours} and {only_theirs} of {asked} questions is not possible")
    value, apart = (only_ours - only_theirs) / asked, (only_ours + only_theirs) / asked
    interval = Interval(
        value,
        _bound(only_ours, only_theirs, asked, -1.0),
        _bound(only_ours, only_theirs, asked, 1.0),
    )
    p = mcnemar(only_ours, only_theirs)
    needed = _questions(value + margin, apart, value)
    if apart == 0 and margin > 0:  # where the two never differ, the bound is z² / (n + z²)
        needed = math.ceil(_Z**2 * (1 - margin) / margin)
    return Answers(_standing(interval, p, margin), interval, p, needed)


def _bound(b: int, c: int, n: int, side: float) -> float:
    """The end of Tango's interval on one side (±1): the difference at which the score is z, by
    bisection.
    """

    def score(d: float) -> float:
        half = ((2 * n - b + c) * d - b - c) / 2
        q = (math.sqrt(half**2 + 2 * n * c * d * (1 - d)) - half) / (2 * n)
        variance = n * (2 * q + d * (1 - d))
        return (
            (b - c - n * d) / math.sqrt(variance)
            if variance > 0
            else math.copysign(math.inf, -side)
        )

    near, far = (b - c) / n, side
    for _ in range(60):
        middle = (near + far) / 2
        near, far = (middle, far) if abs(score(middle)) < _Z else (near, middle)
    return near


def counted_answers(ours: int, asked: int, theirs: int, asked_theirs: int) -> Answers:
    """From two counts alone, where nobody knows which questions were the same: Newcombe's interval,
    a pooled z test.
    """
    interval = newcombe(ours, asked, theirs, asked_theirs)
    a, b = wilson(ours, asked).value, wilson(theirs, asked_theirs).value
    pooled = (ours + theirs) / (asked + asked_theirs)
    se = math.sqrt(pooled * (1 - pooled) * (1 / asked + 1 / asked_theirs))
    p = 2 * NormalDist().cdf(-abs(a - b) / se) if se else 1.0
    # Independent answers differ as often as this.
    return Answers(
        _standing(interval, p, 0.0), interval, p, _questions(a - b, a + b - 2 * a * b, a - b)
    )


_Z = NormalDist().inv_cdf(0.975)


def _standing(difference: Interval, p_value: float, margin: float) -> Standing:
    """By the interval and, without a margin, by the exact test too: both must say so."""
    if margin == 0 and p_value > 0.05:
        return Standing.UNDECIDED
    if difference.lo >= -margin:
        return Standing.NO_WORSE
    return Standing.WORSE if difference.hi < -margin else Standing.UNDECIDED


def _questions(distance: float, apart: float, difference: float) -> int | None:
    """n = (z₀.₉₇₅ √ψ + z₀.₈ √(ψ − δ²))² / distance², ψ the share of questions on which the two
    differ.
    """
    if distance == 0 or apart == 0:
        return None
    spread = _Z * math.sqrt(apart) + NormalDist().inv_cdf(POWER) * math.sqrt(
        max(0.0, apart - difference**2)
    )
    needed = math.ceil((spread / distance) ** 2)
    return needed if needed <= _MOST else None
