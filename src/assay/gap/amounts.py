"""Estimates of sums by window, and of their ratios: mean a token, interval by window, p-value of "nothing"."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from assay.stats.cluster import ClusterEstimate, cluster_ratio
from assay.stats.interval import Interval
from assay.stats.paired import paired_difference

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from assay.gap.sums import WindowSums


@dataclass(frozen=True)
class Amount:
    """A mean a token with its two-sided 95 % interval (CR1, t with G − 1) and the p-value of "it is zero"."""

    value: float
    lo: float
    hi: float
    p: float

    @property
    def interval(self) -> Interval:
        """Value and bounds."""
        return Interval(self.value, self.lo, self.hi)

    @property
    def largest(self) -> float:
        """The largest magnitude that the interval allows."""
        return max(abs(self.lo), abs(self.hi))

    def to_json(self) -> dict[str, float]:
        """`{value, lo, hi}`."""
        return {"value": self.value, "lo": self.lo, "hi": self.hi}


@dataclass(frozen=True)
class Effect:
    """One difference in both currencies, nats a token."""

    dnll: Amount
    kl: Amount

    def to_json(self) -> dict[str, Any]:
        """ΔNLL at the top, KL beside it."""
        return {**self.dnll.to_json(), "kl": self.kl.to_json()}


def amount(sums: ArrayLike, tokens: ArrayLike) -> Amount:
    """The mean a token of sums by window [G] over their tokens [G]."""
    import numpy as np

    values = np.asarray(sums, dtype=np.float64)
    found = paired_difference(values, np.zeros_like(values), tokens)
    bounds = found.difference.interval
    # One window says nothing of the error: no evidence of a difference.
    return Amount(bounds.value, bounds.lo, bounds.hi, 1.0 if math.isnan(found.p_value) else found.p_value)


def effect(sums: WindowSums) -> Effect:
    """Both currencies of a (combined) configuration."""
    return Effect(amount(sums.dnll, sums.tokens), amount(sums.kl, sums.tokens))


def ratio(numerators: ArrayLike, denominators: ArrayLike) -> Interval | None:
    """Σ numerators / Σ denominators with the interval by window; None where there is nothing to divide by."""
    import numpy as np

    below = np.asarray(denominators, dtype=np.float64)
    if not (below > 0).any() or (below < 0).any():
        return None
    found: ClusterEstimate = cluster_ratio(numerators, below)
    return found.interval
