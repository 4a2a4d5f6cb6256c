"""Intervals of proportions: Wilson's, and Newcombe's of a difference."""

from __future__ import annotations

import math
from statistics import NormalDist

from assay.stats.interval import Interval, check_confidence


def wilson(successes: float, n: float, confidence: float = 0.95) -> Interval:
    """Score interval of a proportion, `successes` out of `n`.

    Centre (p + z²/2n) / (1 + z²/n), half-width z √(p(1−p)/n + z²/4n²) / (1 + z²/n). With n = 0
    nothing is known: the interval is [0, 1] and the value is NaN. Effective counts (n divided by a
    design effect) need not be whole.
    """
    check_counts(successes, n)
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


def newcombe(
    successes_a: float, n_a: float, successes_b: float, n_b: float, confidence: float = 0.95
) -> Interval:
    """Interval of p_a − p_b for two independent proportions (Newcombe's hybrid of two Wilson
    intervals).
    """
    a, b = wilson(successes_a, n_a, confidence), wilson(successes_b, n_b, confidence)
    if n_a == 0 or n_b == 0:
        return Interval(math.nan, -1.0, 1.0)
    value = a.value - b.value
    lo = value - math.hypot(a.value - a.lo, b.hi - b.value)
    hi = value + math.hypot(a.hi - a.value, b.value - b.lo)
    return Interval(value, max(-1.0, lo), min(1.0, hi))


def check_counts(successes: float, n: float) -> None:
    """ValueError unless `successes` of `n` is possible."""
    if not (0 <= successes <= n and math.isfinite(n)):
        raise ValueError(f"{successes} successes out of {n} is not possible")
