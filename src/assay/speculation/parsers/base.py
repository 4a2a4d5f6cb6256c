"""What a parser of an engine's drafts overrides, and what it is given."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.speculation.observation import Observation


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


@dataclass(frozen=True)
class StartUp:
    """A message at the start of a log that bears on speculation.

    Args:
        id: The kind of message; parsers may share one.
        needles: Texts in lower case; only lines that hold one are looked at.
        pattern: What the line must match. Its first group, where there is one, is what is quoted.
    """

    id: str
    needles: tuple[str, ...]
    pattern: re.Pattern[str]


class Parser:
    """Base class: a parser overrides what its engine writes. All hooks must survive any input.

    The search in large logs is made from `needles` and `company`: a line that holds neither is
    never seen by a parser.
    """

    fallback = 0
    """Parsers with a larger number are asked later: 0 for the forms of one engine."""

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

    heads: tuple[str, ...] = ()
    """Texts with which a record begins; a line that holds one twice holds several records."""
    metrics: tuple[str, ...] = ()
    """Prefixes of all metric names of its engines, before `:` or `_`."""
    reads: str = ""
    """A regular expression of the metric names that `samples` reads, lower case."""
    metric_words: tuple[str, ...] = ()
    """Texts in lower case; every metric name that `samples` reads holds one. None given: any name.
    """
    start_up: tuple[StartUp, ...] = ()
    """Messages at the start of a log."""
    replies: re.Pattern[str] | None = None
    """A line that shows that a request was answered, whether or not anything was drafted."""
    speed: re.Pattern[str] | None = None
    """A line with tokens per second (first group) and running requests (second)."""

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
