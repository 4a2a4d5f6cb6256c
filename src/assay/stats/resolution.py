"""How small a difference a number of windows resolves, and how many windows a difference needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from assay.stats import ClusterEstimate, check_confidence, student_t

MIN_PILOT = 4
"""Fewer windows say next to nothing about the spread."""


MIN_WINDOWS = 8
"""Below this the intervals are not trusted and a comparison is inconclusive."""


@dataclass(frozen=True)
class Resolution:
    """The half-width of an interval that G windows are expected to give.

    `lo` and `hi` bound it as far as the pilot can tell (χ² interval of the pilot's variance): with
    four windows they are 0.57 and 3.7 times the half-width.
    """

    windows: int
    half_width: float
    lo: float
    hi: float


def resolution(pilot: ClusterEstimate, windows: int, confidence: float = 0.95) -> Resolution:
    """What `windows` windows will resolve, from a pilot of at least four (ValueError
    with fewer).
    """
    from scipy.special import chdtri

    if pilot.clusters < MIN_PILOT:
        raise ValueError(f"a pilot needs at least {MIN_PILOT} windows, got {pilot.clusters}")
    if windows < 2:
        raise ValueError("an interval needs at least two windows")
    half = student_t(windows - 1, confidence) * pilot.se * math.sqrt(pilot.clusters / windows)
    df, tail = pilot.clusters - 1, (1 - check_confidence(confidence)) / 2
    # chdtri inverts the upper tail of χ²: P(χ² > x) = p.
    lo, hi = (math.sqrt(df / float(chdtri(df, p))) for p in (tail, 1 - tail))
    return Resolution(windows, half, half * lo, half * hi)


def windows_for(pilot: ClusterEstimate, half_width: float, confidence: float = 0.95) -> int | None:
    """The smallest number of windows (at least 8) whose interval is expected to be no wider than ±
    `half_width`.

    None where no number below a million is enough.
    """
    if not half_width > 0:
        raise ValueError("a half-width must be positive")
    lo, hi = MIN_WINDOWS, 1_000_000
    if resolution(pilot, hi, confidence).half_width > half_width:
        return None
    while lo < hi:
        middle = (lo + hi) // 2
        if resolution(pilot, middle, confidence).half_width <= half_width:
            hi = middle
        else:
            lo = middle + 1
    return lo


def windows_needed(
    estimate: float, half_width: float, windows: int, lo: float = -math.inf, hi: float = math.inf
) -> int | None:
    """Windows at which the interval around `estimate` would fit into [lo, hi]: ⌈G · (t·SE /
    distance)²⌉, at least 8.

    `half_width` is t·SE at G = `windows`; the distance is that to the nearer bound. None where the
    estimate lies outside or on a bound (more windows will not bring it in), or where nothing is
    known of the error.
    """
    distance = min(estimate - lo, hi - estimate)
    if not distance > 0 or not math.isfinite(half_width):
        return None
    if math.isinf(distance):
        return MIN_WINDOWS
    return max(MIN_WINDOWS, math.ceil(windows * (half_width / distance) ** 2))
