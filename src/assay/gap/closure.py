"""Is the gap explained, and does it stay within the margin? Rules on intervals; no number is made here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from assay.gap.amounts import Amount
from assay.stats.power import MIN_WINDOWS

CLOSED_SHARE = 0.1
"""What the buckets may leave over, as a share of the total."""


@dataclass(frozen=True)
class Closed:
    """Whether what is left over is small. `bound` is what it may be; `shown` says that its whole interval is."""

    ok: bool
    bound: float
    shown: bool


def closed(closure: Amount, total: Amount, floor: float) -> Closed:
    """At most 10 % of the total, or the noise floor, and known at least as well as the total itself."""
    bound = max(CLOSED_SHARE * abs(total.value), floor)
    shown = closure.largest <= bound
    as_sharp = closure.hi - closure.lo <= total.hi - total.lo
    return Closed(shown or (abs(closure.value) <= bound and as_sharp), bound, shown)


def closed_nll(closure: Amount, total: Amount, floor: float) -> Closed:
    """As `closed`, or the interval contains zero.

    ΔNLL of the tokens that came is noisy: between two runs of an engine in 16 bits it differs by more than 10 % of a
    small total although nothing has changed. KL is what decides.
    """
    strict = closed(closure, total, floor)
    return Closed(strict.ok or closure.lo <= 0 <= closure.hi, strict.bound, strict.shown)


class Place:
    """Where the total lies against a margin."""

    INSIDE = "inside"
    OUTSIDE = "outside"
    UNDECIDED = "undecided"


def place(total: Amount, margin: float, windows: int, *, same: bool = False) -> str:
    """Whether the total ΔNLL lies within ± ln(1 + margin) of perplexity; fewer than 8 windows never decide.

    `same` says that reference and candidate are one configuration, where nothing needs windows.
    """
    if same:
        return Place.INSIDE
    if windows < MIN_WINDOWS:
        return Place.UNDECIDED
    lo, hi = math.log1p(-margin), math.log1p(margin)
    if total.interval.within(lo, hi):
        return Place.INSIDE
    return Place.OUTSIDE if total.interval.outside(lo, hi) else Place.UNDECIDED
