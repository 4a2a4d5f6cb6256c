"""Differences that no cause explains: the same run repeated, and the other order of changes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from assay.stats.resolution import MIN_WINDOWS
from assay_lab.gap.buckets import Amount, Effect

REPEAT_SHARE = 0.1
"""What may not repeat, as a share of the total."""
FORETOLD_SHARE = 0.2
"""How far the sum of the buckets may be off on other text, as a share of what was measured there.
"""


@dataclass(frozen=True)
class Repeated:
    """Whether what does not repeat is small. `bound` is what it may be; `shown` says that its whole
    interval is.
    """

    ok: bool
    bound: float
    shown: bool


def repeated(left: Amount, total: Amount, floor: float) -> Repeated:
    """At most 10 % of the total, or the noise floor, and known at least as well as the total
    itself.
    """
    bound = max(REPEAT_SHARE * abs(total.value), floor)
    shown = left.largest <= bound
    as_sharp = left.hi - left.lo <= total.hi - total.lo
    return Repeated(shown or (abs(left.value) <= bound and as_sharp), bound, shown)


def repeated_nll(left: Amount, total: Amount, floor: float) -> Repeated:
    """As `repeated`, or the interval contains zero.

    ΔNLL of the target tokens is noisy: between two runs of an engine in 16 bits it differs by more
    than 10 % of a small total although nothing has changed. KL is what decides.
    """
    strict = repeated(left, total, floor)
    return Repeated(strict.ok or left.lo <= 0 <= left.hi, strict.bound, strict.shown)


class Place(StrEnum):
    """The place of the total against a margin."""

    INSIDE = "inside"
    OUTSIDE = "outside"
    UNDECIDED = "undecided"


def place(total: Amount, margin: float, windows: int, *, same: bool = False) -> Place:
    """Whether the total ΔNLL is within ± ln(1 + margin) of perplexity; fewer than 8 windows never
    decide.

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


@dataclass(frozen=True)
class Floors:
    """What would be there anyway: each engine scored again at another batch, and noise of one bf16
    rounding a layer.

    None where it was not measured.
    """

    reference: Effect | None
    candidate: Effect | None
    rounding: Effect | None

    @property
    def repeat_kl(self) -> float:
        """KL of an engine against itself, the larger one."""
        return max([0.0, *(e.kl.value for e in (self.reference, self.candidate) if e)])

    @property
    def repeat_dnll(self) -> float:
        """How far |ΔNLL| of an engine against itself may be from zero."""
        return max([0.0, *(e.dnll.largest for e in (self.reference, self.candidate) if e)])

    @property
    def largest_kl(self) -> float:
        """The largest known floor in KL, rounding included."""
        return max(self.repeat_kl, self.rounding.kl.value if self.rounding else 0.0)

    def to_json(self) -> dict[str, Any]:
        """As `results.floors`."""
        return {
            "reference": self.reference,
            "candidate": self.candidate,
            "rounding_bf16": self.rounding,
        }
