"""A rate with its 95 % interval, widened where windows disagree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from assay.stats import wilson

MIN_CLUSTERS = 5
"""Fewer windows than this say too little about how much they differ."""


@dataclass(frozen=True)
class Rate:
    """A rate, or a difference of two, with its two-sided 95 % interval. `n` is the number of trials
    behind it.
    """

    value: float
    lo: float
    hi: float
    n: int = 0

    def percent(self) -> str:
        """The interval as text, in per cent."""
        return f"{100 * self.value:.1f} % [{100 * self.lo:.1f}, {100 * self.hi:.1f}]"


def proportion(successes: int, trials: int, design_effect: float = 1.0) -> Rate:
    """Wilson interval of a proportion. A design effect above 1 divides the number of trials."""
    effect = max(1.0, design_effect)
    # Counters of one page are not read at one instant, so hits may run a little ahead of trials.
    interval = wilson(min(max(successes, 0), trials) / effect, trials / effect)
    return Rate(interval.value, interval.lo, interval.hi, trials)


def overdispersion(*parts: Sequence[tuple[int, int]], least: int = MIN_CLUSTERS - 1) -> float:
    """Variance of pooled proportions over their binomial variance, from (successes, trials) of the
    windows of each part.

    Pearson's Σ (x − n·p)² / (n·p·(1 − p)) over the degrees of freedom, at least 1; 1 for fewer than
    `least` of these.
    """
    chi2, freedom = 0.0, 0
    for part in parts:
        x, n = total(part)
        freedom += max(0, len(part) - 1)
        if 0 < x < n:
            p = x / n
            chi2 += sum((a - m * p) ** 2 / (m * p * (1 - p)) for a, m in part if m)
    return max(1.0, chi2 / freedom) if freedom >= least else 1.0


def design_effect(clusters: Sequence[tuple[int, int]]) -> float:
    """What the intervals of a run widen by because its windows differ; 1 for fewer than five."""
    return overdispersion([c for c in clusters if c[1]])


def difference(a: Rate, b: Rate) -> Rate:
    """a − b with Newcombe's interval (1998, method 10): the two Wilson intervals combined in
    squares.
    """
    gap = a.value - b.value
    lo = gap - math.hypot(a.value - a.lo, b.hi - b.value)
    hi = gap + math.hypot(a.hi - a.value, b.value - b.lo)
    return Rate(gap, lo, hi, min(a.n, b.n))


def total(pairs: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(successes, trials) of all pairs."""
    return sum(x for x, _ in pairs), sum(n for _, n in pairs)
