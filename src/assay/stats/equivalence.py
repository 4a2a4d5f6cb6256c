"""Whether a difference is within a margin, outside it, or open: equivalence testing (TOST).

A point estimate inside a margin proves nothing; an interval inside it does: two one-sided tests
(TOST; Schuirmann, J. Pharmacokinet. Biopharm. 15 (1987) 657). With two-sided 95 % intervals each
test has level 2.5 %. An interval wholly outside proves the opposite; one that crosses a bound
leaves it open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from assay.stats import ClusterEstimate, Interval, percent_change, student_t
from assay.stats.resolution import MIN_WINDOWS, windows_needed


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
    ACCEPT, so the grade cannot become ACCEPT.
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
    agreement = common["top1"] if shown is None else percent(shown.interval)
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
    found = {"dppl": percent_change(ratio), "top1": percent(agreement)}
    return found if kl is None else found | {"kl": at_confidence(kl, confidence)}


def percent(share: Interval) -> Interval:
    """A share as percent."""
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
