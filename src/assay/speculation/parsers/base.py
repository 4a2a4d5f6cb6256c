"""What a parser is: reads lines, JSON objects or metrics samples of one engine into observations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.speculation.record import Observation


@dataclass(frozen=True)
class Line:
    """One log line without colours, and what its prefix says about where it comes from.

    `process` tells writers apart (container, process id); `replica` is a data-parallel engine such as `DP0`.
    """

    text: str
    process: str = ""
    replica: str | None = None
    time: str | None = None


@dataclass(frozen=True)
class Sample:
    """One sample of a Prometheus text page."""

    name: str
    labels: Mapping[str, str]
    value: float


class Parser:
    """Base class: a parser overrides what its engine writes. All hooks must survive any input."""

    engine = ""
    markers: tuple[str, ...] = ()
    """`line` is called for lines that hold one of these."""
    own: tuple[str, ...] = ()
    """Markers that no other engine writes: such a line is shown to this parser alone."""

    def line(self, line: Line) -> Iterable[Observation]:
        """Observations in one log line; the parser may remember the line for later ones."""
        return ()

    def document(self, value: Mapping[str, Any]) -> Iterable[Observation]:
        """Observations in one JSON object (not in the objects inside it)."""
        return ()

    def samples(self, samples: Sequence[Sample]) -> Iterable[Observation]:
        """Observations in one page of metrics."""
        return ()

    def settle(self, observations: Sequence[Observation]) -> Sequence[Observation]:
        """This engine's observations of one source once all are known, with what only their whole can tell."""
        return observations


def number(value: Any) -> float | None:
    """`value` as a finite float; None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        result = float(str(value).replace(",", "")) if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        return None
    return result if math.isfinite(result) else None


def count(value: Any) -> int | None:
    """`value` as a count, 0 or more; None for anything else."""
    result = number(value)
    if result is None or result < 0 or result != int(result):
        return None
    return int(result)


def counts(values: Any) -> tuple[int, ...] | None:
    """A list of counts; None if `values` is not one."""
    if not isinstance(values, list | tuple) or not values:
        return None
    result = [count(v) for v in values]
    return None if any(v is None for v in result) else tuple(v for v in result if v is not None)


def from_histogram(histogram: Sequence[int]) -> tuple[int, int, tuple[int, ...]]:
    """(drafts, accepted, accepted per position) of `histogram[i]` = steps that accepted i drafts.

    Position i was accepted in every step that accepted more than i.
    """
    per_position = tuple(sum(histogram[i + 1 :]) for i in range(len(histogram) - 1))
    return sum(histogram), sum(i * n for i, n in enumerate(histogram)), per_position
