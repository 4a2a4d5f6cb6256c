"""An interval around a value, and what perplexity makes of one in nats."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
