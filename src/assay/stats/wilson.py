"""Intervals for rates: one proportion, and the difference of two."""

from __future__ import annotations

import math
from statistics import NormalDist

from assay.stats.interval import Interval


def wilson(successes: float, n: float, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion.

    Wilson (1927): (p + z²/2n ± z·√(p(1 − p)/n + z²/4n²)) / (1 + z²/n). With n = 0 nothing is known: value NaN, 0 to 1.
    Counts may be fractions: a design effect divides both.
    ValueError where `successes` is not within 0 … n.
    """
    _check(successes, n)
    if n == 0:
        return Interval(math.nan, 0.0, 1.0)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # At the ends the bound is exact; rounding would put it a hair beside.
    lo = 0.0 if successes == 0 else centre - half
    hi = 1.0 if successes == n else centre + half
    return Interval(p, lo, hi)


def newcombe(
    successes: int, n: int, other_successes: int, other_n: int, confidence: float = 0.95
) -> Interval:
    """Interval of the difference p − p′ of two independent proportions.

    Newcombe (1998), method 10: Wilson's bounds of both, combined by the root of their squared distances.
    """
    p, lo, hi = wilson(successes, n, confidence)
    q, other_lo, other_hi = wilson(other_successes, other_n, confidence)
    if n == 0 or other_n == 0:
        return Interval(math.nan, -1.0, 1.0)
    return Interval(p - q, p - q - math.hypot(p - lo, other_hi - q), p - q + math.hypot(hi - p, q - other_lo))


def clopper_pearson(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """The exact interval of a proportion, from quantiles of the beta distribution; never too narrow."""
    _check(successes, n)
    if n == 0:
        return Interval(math.nan, 0.0, 1.0)
    from scipy.stats import beta

    tail = (1 - confidence) / 2
    lo = 0.0 if successes == 0 else float(beta.ppf(tail, successes, n - successes + 1))
    hi = 1.0 if successes == n else float(beta.ppf(1 - tail, successes + 1, n - successes))
    return Interval(successes / n, lo, hi)


def _check(successes: float, n: float) -> None:
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n} is not a proportion")
