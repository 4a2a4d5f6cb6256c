"""Intervals of acceptance rates: Wilson, widened where windows disagree, and differences of two of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from assay.stats.wilson import wilson

MIN_CLUSTERS = 5
"""Fewer windows than this say too little about how much they differ."""


@dataclass(frozen=True)
class Rate:
    """A rate, or a difference of two, with its two-sided 95 % interval. `n` is the number of trials behind it."""

    value: float
    lo: float
    hi: float
    n: int = 0

    def to_json(self) -> dict[str, float]:
        """The interval as a JSON object."""
        return {"value": self.value, "lo": self.lo, "hi": self.hi, "n": self.n}

    def percent(self) -> str:
        """The interval as text, in per cent."""
        return f"{100 * self.value:.1f} % [{100 * self.lo:.1f}, {100 * self.hi:.1f}]"


def proportion(successes: int, trials: int, design_effect: float = 1.0) -> Rate:
    """Wilson interval of a proportion. A design effect above 1 divides the number of trials."""
    effect = max(1.0, design_effect)
    # Counters of one page are not read at one instant, so hits may run a little ahead of trials.
    interval = wilson(min(max(successes, 0), trials) / effect, trials / effect)
    return Rate(interval.value, interval.lo, interval.hi, trials)


def design_effect(clusters: Sequence[tuple[int, int]]) -> float:
    """Variance of a pooled proportion over its binomial variance, from (successes, trials) of each window.

    Pearson's overdispersion: sum((x − n·p)² / (n·p·(1 − p))) / (G − 1), at least 1. 1 for fewer than 5 windows.
    """
    used = [(x, n) for x, n in clusters if n]
    successes, trials = sum(x for x, _ in used), sum(n for _, n in used)
    if len(used) < MIN_CLUSTERS or not 0 < successes < trials:
        return 1.0
    p = successes / trials
    chi2 = sum((x - n * p) ** 2 / (n * p * (1 - p)) for x, n in used)
    return max(1.0, chi2 / (len(used) - 1))


def difference(a: Rate, b: Rate) -> Rate:
    """a − b with Newcombe's interval (1998, method 10): the two Wilson intervals combined in squares."""
    gap = a.value - b.value
    lo = gap - math.hypot(a.value - a.lo, b.hi - b.value)
    hi = gap + math.hypot(a.hi - a.value, b.value - b.lo)
    return Rate(gap, lo, hi, min(a.n, b.n))
