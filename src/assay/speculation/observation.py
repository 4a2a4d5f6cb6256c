"""What one line, metrics sample or response says about drafts."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from itertools import zip_longest
from typing import Any

MOST_POSITIONS = 1000
"""No draft is longer; a larger figure is not one of positions."""


class Kind(StrEnum):
    """How an observation relates to the run it comes from."""

    WINDOW = "window"
    """Counts of one logging interval: add them up."""
    REQUEST = "request"
    """Counts of one request: add them up."""
    TOTAL = "total"
    """Counts since the process started: take differences."""
    SUMMARY = "summary"
    """Counts of a finished benchmark: use them where there is nothing finer."""
    VALUE = "value"
    """Printed rates without counts."""


@dataclass(frozen=True)
class Definition:
    """How an engine defines its figures; a parser declares one for each form that it reads.

    Args:
        id: Its name in `results.record.definitions`.
        text: What is counted, in one clause.
        steps_estimated: The number of decode steps comes from a printed speed.
        counts_after_rejection: "Accepted" also counts hits after the first rejection, so that no
            length follows from it.
        by_method: Counts since start of one drafting method of several.
        depth_unknown: The number of counted slots is not the number of speculative tokens.
        repeats: It repeats what a richer object of the same response says.
    """

    id: str
    text: str
    steps_estimated: bool = False
    counts_after_rejection: bool = False
    by_method: bool = False
    depth_unknown: bool = False
    repeats: bool = False


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What was counted. Unknown values are None.

    `at_position[i]` counts the steps whose draft position i was accepted, out of
    `tried_at_position[i]` (out of `drafts` where None). `emitted` counts all tokens of the steps
    that drafted, bonus tokens included; `generated` the tokens of the whole reply and `steps` its
    decode steps, which need not all have drafted. `accepted_first` counts the drafts of which at
    least the first token was accepted. `partial` is set where some counters are missing,
    `estimated` where the counts are derived from printed values.
    """

    drafted: int | None = None
    accepted: int | None = None
    drafts: int | None = None
    emitted: int | None = None
    generated: int | None = None
    steps: int | None = None
    accepted_first: int | None = None
    at_position: tuple[int, ...] | None = None
    tried_at_position: tuple[int, ...] | None = None
    partial: bool = False
    estimated: bool = False

    @property
    def known(self) -> bool:
        """Whether anything here can be added up."""
        return self.drafted is not None or self.drafts is not None or self.at_position is not None

    def fell_below(self, before: Counts) -> bool:
        """Whether any counter is below that of `before`: the process restarted in between."""
        pairs = [(getattr(before, name), getattr(self, name)) for name in COUNTERS]
        pairs += zip(before.at_position or (), self.at_position or (), strict=False)
        return any(a is not None and b is not None and b < a for a, b in pairs)

    def since(self, before: Counts) -> Counts:
        """What was counted after `before`, an earlier reading of the same counters."""
        changes: dict[str, Any] = {}
        for name in COUNTERS:
            now, then = getattr(self, name), getattr(before, name)
            changes[name] = None if now is None else now - (then or 0)
        for name in ("at_position", "tried_at_position"):
            now, then = getattr(self, name), getattr(before, name)
            changes[name] = (
                now
                if not now or not then
                else tuple(x - y for x, y in zip_longest(now, then[: len(now)], fillvalue=0))
            )
        return replace(self, **changes)


COUNTERS = tuple(f.name for f in fields(Counts) if f.type == "int | None")
"""The fields of `Counts` that hold one number."""


@dataclass(frozen=True, kw_only=True)
class Printed:
    """Figures as they were printed, as fractions; lengths count the bonus token.

    `reported_rate` keeps a printed rate whose meaning turned out to be another. `implied_depth` is
    the number of speculative tokens that other figures imply. `weight` is the share of a printed
    value in an average, None where that is not known.
    """

    acceptance_rate: float | None = None
    reported_rate: float | None = None
    mean_acceptance_length: float | None = None
    rates_per_position: tuple[float, ...] | None = None
    multiplier: float | None = None
    implied_depth: int | None = None
    weight: float | None = 1.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the engine did meanwhile: tokens per second, running requests, tokens of their
    contexts.
    """

    generation_throughput: float | None = None
    running: int | None = None
    context_tokens: int | None = None


NO_COUNTS, NOT_PRINTED, NO_LOAD = Counts(), Printed(), Load()


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One line, metrics sample or response.

    `replica` names the engine of several, `stream` the counter inside it. `idle` is set where the
    form shows that nothing was drafted without counting it. `source` quotes the words from which
    figures without a form of their own were read.
    """

    engine: str
    kind: Kind
    definition: Definition
    replica: str | None = None
    stream: str = ""
    time: str | None = None
    num_speculative_tokens: int | None = None
    counts: Counts = NO_COUNTS
    printed: Printed = NOT_PRINTED
    load: Load = NO_LOAD
    idle: bool = False
    note: str = ""
    source: str = ""

    @property
    def empty(self) -> bool:
        """Whether nothing was drafted in it."""
        if self.counts.drafted is not None:
            return self.counts.drafted == 0
        if self.counts.drafts is not None:
            return self.counts.drafts == 0
        return self.idle
