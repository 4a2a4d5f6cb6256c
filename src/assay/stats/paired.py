"""Two candidates measured on the same windows: their difference is compared, not their two intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assay.stats.cluster import ClusterEstimate, cluster_ratio

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


@dataclass(frozen=True)
class PairedDifference:
    """Mean of a minus mean of b by window, with the two-sided p-value of "no difference"."""

    difference: ClusterEstimate
    p_value: float


def paired_difference(
    a_sums: ArrayLike, b_sums: ArrayLike, tokens: ArrayLike, confidence: float = 0.95
) -> PairedDifference:
    """Difference of two means over the same tokens, from the sums of each window.

    Both sides of every window are subtracted first, so what the windows have in common (a hard passage) cancels.
    """
    import numpy as np
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
