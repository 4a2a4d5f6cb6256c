"""A positive figure with its 95 % interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """A positive figure with its two-sided 95 % interval; the bounds are None where too few values
    stand behind it.
    """

    value: float
    lo: float | None = None
    hi: float | None = None

    def __str__(self) -> str:
        return f"{self.value:.2f}" + ("" if self.lo is None else f" [{self.lo:.2f}, {self.hi:.2f}]")


def median(values: Sequence[float]) -> Measured | None:
    """Median of positive values with the interval between order statistics (distribution-free; from
    six values on).

    With k the largest number for which P(Binomial(n, 1/2) < k) <= 2.5 %, the k-th smallest and the
    k-th largest value enclose the median of what the values are drawn from with at least 95 %
    (Conover, Practical Nonparametric Statistics, section 3.2). None where there is no value.
    """
    ordered = sorted(v for v in values if v > 0)
    n = len(ordered)
    if not n:
        return None
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    k = _rank(n)
    return Measured(middle, ordered[k - 1], ordered[n - k]) if k else Measured(middle)


def _rank(n: int) -> int:
    """The largest k with P(Binomial(n, 1/2) < k) <= 2.5 %; by the normal approximation for more
    than a hundred values.
    """
    if n > 100:
        return int(n / 2 - 0.98 * math.sqrt(n))
    k, tail = 0, 0.0
    while tail + math.comb(n, k) / 2**n <= 0.025:
        tail += math.comb(n, k) / 2**n
        k += 1
    return k


def quotient(a: Measured, b: Measured) -> Measured:
    """a / b; the intervals are combined in squares on the logarithmic scale, as Newcombe's method
    does for differences.
    """
    value = a.value / b.value
    if a.lo is None or a.hi is None or b.lo is None or b.hi is None:
        return Measured(value)
    down = math.hypot(math.log(a.value / a.lo), math.log(b.hi / b.value))
    up = math.hypot(math.log(a.hi / a.value), math.log(b.value / b.lo))
    return Measured(value, value * math.exp(-down), value * math.exp(up))
