"""Numbers, counts and histograms in values of any kind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from assay.speculation.observation import MOST_POSITIONS


def number(value: Any) -> float | None:
    """`value` as a finite float; None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        result = float(str(value).replace(",", "")) if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return result if math.isfinite(result) else None


MOST = 10**15
"""A larger count is a broken line, not a count."""


def count(value: Any) -> int | None:
    """`value` as a count, 0 or more; None for anything else."""
    result = number(value)
    return (
        int(result)
        if result is not None and 0 <= result <= MOST and result == int(result)
        else None
    )


def counts(values: Any) -> tuple[int, ...] | None:
    """A list of counts; None if `values` is not one. A mapping {"0": 39, "3": 3} is a list with
    gaps.
    """
    if isinstance(values, Mapping):
        by_index = {count(k): v for k, v in values.items()}
        if (
            None in by_index
            or not by_index
            or max(k for k in by_index if k is not None) > MOST_POSITIONS
        ):
            return None
        values = [by_index.get(i, 0) for i in range(max(k for k in by_index if k is not None) + 1)]
    if not isinstance(values, list | tuple) or not values or len(values) > MOST_POSITIONS:
        return None
    result = [count(v) for v in values]
    return None if any(v is None for v in result) else tuple(v for v in result if v is not None)


def positions_from(
    histogram: Sequence[int] | None, depth: int | None = None
) -> tuple[int, ...] | None:
    """Accepted drafts per position of a histogram, padded with zeros to `depth` positions; None
    without one.
    """
    if not histogram:
        return None
    own = from_histogram(histogram)[2]
    return own + (0,) * (min(depth or 0, MOST_POSITIONS) - len(own))


def from_histogram(histogram: Sequence[int]) -> tuple[int, int, tuple[int, ...]]:
    """(drafts, accepted, accepted per position) of `histogram[i]` = steps that accepted i drafts.

    Position i was accepted in every step that accepted more than i.
    """
    per_position = tuple(sum(histogram[i + 1 :]) for i in range(len(histogram) - 1))
    return sum(histogram), sum(i * n for i, n in enumerate(histogram)), per_position
