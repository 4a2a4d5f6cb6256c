"""What one rule says, and how its numbers are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from assay.coherence.record import Sample
from assay.stats.interval import Interval
from assay.verdict import Finding

State = Literal["good", "bad", "unclear"]


@dataclass(frozen=True)
class Ruling:
    """What one rule says, in one line, with the findings it raises."""

    rule: str
    state: State
    says: str
    findings: tuple[Finding, ...] = ()


def kinds_of(samples: Sequence[Sample]) -> dict[str, int]:
    """How often each kind occurs, the most frequent first."""
    kinds: dict[str, int] = {}
    for sample in samples:
        key = sample.kind or sample.label
        kinds[key] = kinds.get(key, 0) + 1
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))


def interval_json(interval: Interval) -> dict[str, float]:
    """An interval as JSON."""
    return {"value": interval.value, "lo": interval.lo, "hi": interval.hi}


def percent(interval: Interval) -> str:
    """A rate with its interval in words."""
    return f"{interval.value:.0%}, 95 % interval {interval.lo:.0%} to {interval.hi:.0%}"
