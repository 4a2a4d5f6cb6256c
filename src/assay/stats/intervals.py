"""An estimate with the interval around it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist


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


# -----------------------------------------------------------------------------
# Intervals for proportions.
#
# Wilson, J. Am. Stat. Assoc. 22 (1927) 209; Newcombe, Stat. Med. 17 (1998) 873, method 10, for the difference of two;
# Clopper and Pearson, Biometrika 26 (1934) 404, where coverage must never fall below the nominal one.


def wilson(successes: float, n: float, confidence: float = 0.95) -> Interval:
    """Score interval of a proportion, `successes` out of `n`.

    Centre (p + z²/2n) / (1 + z²/n), half-width z √(p(1−p)/n + z²/4n²) / (1 + z²/n). With n = 0 nothing is known: the
    interval is [0, 1] and the value is NaN. Effective counts (n divided by a design effect) need not be whole.
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


def newcombe(successes_a: float, n_a: float, successes_b: float, n_b: float, confidence: float = 0.95) -> Interval:
    """Interval of p_a − p_b for two independent proportions (Newcombe's hybrid of two Wilson intervals)."""
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
