"""Mean of independent values with Student's t interval (two-sided 95 % by default)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from assay.stats.interval import Interval


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean of `values` ± t(n − 1) · s / √n. For paired data, pass the differences.

    Needs at least two values (ValueError); non-finite values are the caller's to remove.
    """
    n = len(values)
    if n < 2:
        raise ValueError("an interval needs at least two values")
    from scipy.stats import t

    mean = math.fsum(values) / n
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    half = float(t.ppf(0.5 + confidence / 2, n - 1)) * math.sqrt(variance / n)
    return Interval(value=mean, lo=mean - half, hi=mean + half)
