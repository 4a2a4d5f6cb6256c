"""A parser reads lines, JSON objects or metrics samples of one engine into observations: one engine
a file.

`named` reads figures that say themselves what they count. A new engine is a new file and a line in
`scan.PARSERS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.speculation.record import MOST_POSITIONS, Observation


@dataclass(frozen=True)
class Line:
    """One log line without colours, and what its prefix says about where it comes from.

    `process` tells writers apart (container, process id, child of a router); `replica` is a
    data-parallel engine such as `DP0`, `port` the `[port]` with which a router marks the lines of
    its children.
    """

    text: str
    process: str = ""
    replica: str | None = None
    time: str | None = None
    port: str | None = None


@dataclass(frozen=True)
class Sample:
    """One sample of a Prometheus text page."""

    name: str
    labels: Mapping[str, str]
    value: float


class Parser:
    """Base class: a parser overrides what its engine writes. All hooks must survive any input.

    The search in large logs is made from `needles` and `company`: a line that holds neither is
    never seen by a parser.
    """

    engine = ""
    also: tuple[str, ...] = ()
    """Other engines whose lines this parser reads."""
    needles: tuple[str, ...] = ()
    """Texts in lower case. `line` is called for lines that hold one of them."""
    company: tuple[str, ...] = ()
    """Where not empty, such a line must hold one of these as well."""
    near: tuple[str, ...] = ()
    """`line` is also called for lines that hold one of these, if they stand just before or after
    one with a needle.
    """

    def line(self, line: Line) -> Iterable[Observation] | None:
        """Observations in one log line, which the parser may remember for later ones; None if it is
        not its line.
        """
        return None

    def document(self, value: Mapping[str, Any]) -> Iterable[Observation]:
        """Observations in one JSON object (not in the objects inside it)."""
        return ()

    def samples(self, samples: Sequence[Sample]) -> Iterable[Observation]:
        """Observations in one page of metrics."""
        return ()

    def settle(self, observations: Sequence[Observation]) -> Sequence[Observation]:
        """This engine's observations of one source once all are known, with what only their whole
        can tell.
        """
        return observations

    def silent(self, head: str) -> Iterable[Observation]:
        """What the start of a log shows of times that drafted nothing; asked once all lines are
        read.
        """
        return ()

    def wants(self, low: str) -> bool:
        """Whether a line, in lower case, is for this parser."""
        for needle in self.needles:
            if needle in low:
                return not self.company or any(word in low for word in self.company)
        return any(word in low for word in self.near)


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
