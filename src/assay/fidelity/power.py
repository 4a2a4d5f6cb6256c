"""What a run will be able to resolve, told by its first windows before the rest is scored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from assay.fidelity.observation import WindowObservation
from assay.fidelity.plan import Plan
from assay.stats import Interval, cluster_mean, percent_change
from assay.stats.resolution import MIN_PILOT, resolution, windows_for


@dataclass(frozen=True)
class Power:
    """The half-width that the interval of Δppl is expected to have, in percent, from `pilot`
    windows.

    `lo` and `hi` bound it as far as so few windows can tell. `enough` are the windows whose
    half-width would be that of the ACCEPT margin: a candidate without any difference is accepted
    from there on. None where a million are few.
    """

    pilot: int
    windows: int
    half_width: float
    lo: float
    hi: float
    margin: float
    enough: int | None

    def __str__(self) -> str:
        line = (
            f"{self.windows} windows resolve Δppl to about ±{self.half_width:.2g} % "
            f"(between {self.lo:.2g} and {self.hi:.2g}, from {self.pilot} windows)"
        )
        if self.half_width < self.margin:
            return line
        needed = (
            "no number of windows" if self.enough is None else f"at least {self.enough:,} windows"
        )
        return f"{line}; the margin of ±{self.margin:g} % takes {needed}"

    def to_json(self) -> dict[str, Any]:
        """`results.power`."""
        return {
            "pilot_windows": self.pilot,
            "windows": self.windows,
            "dppl_pct_half_width": {"value": self.half_width, "lo": self.lo, "hi": self.hi},
            "windows_for_margin": self.enough,
        }


def power_of(seen: Sequence[WindowObservation], plan: Plan, windows: int) -> Power | None:
    """What `windows` windows will resolve; None where the first ones have too few finite tokens to
    tell.
    """
    groups = [w.dnll[w.finite] for w in seen[:MIN_PILOT] if w.finite.any()]
    if len(groups) < MIN_PILOT or windows < MIN_PILOT:
        return None
    pilot = cluster_mean(groups)
    found = resolution(pilot, windows)
    half, lo, hi = (
        percent_change(Interval(x, x, x)).value for x in (found.half_width, found.lo, found.hi)
    )
    enough = windows_for(pilot, math.log1p(plan.margin_ppl))
    return Power(len(groups), windows, half, lo, hi, 100 * plan.margin_ppl, enough)
