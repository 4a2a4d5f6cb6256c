"""An estimate with its interval."""

from __future__ import annotations

from typing import NamedTuple


class Interval(NamedTuple):
    """A point estimate and the bounds of its interval."""

    value: float
    lo: float
    hi: float
