"""Tell a dead head, a random one and a weak one apart by how hits spread over the positions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from assay.speculation.decay import decay
from assay.speculation.rate import Rate, proportion
from assay.speculation.record import Record

DEAD_DRAFTS = 100
"""Drafts without one accepted token that make a dead head more likely than a bad one."""

_CHANCE = 0.05

_SIGNAL = 0.10


class HeadState(StrEnum):
    """How accepted tokens are spread over the positions."""

    DEAD = "dead"
    """Exact zeros over at least 100 drafts: the head proposes nothing that fits."""
    NOISE = "noise"
    """Rare hits that do not continue: chance level."""
    DIVERGED = "diverged"
    """Low, but hits continue at a steady ratio: both models work and disagree."""
    UNCLEAR = "unclear"
    """Too few hits to tell."""


@dataclass(frozen=True)
class HeadEvidence:
    """The state with its figures. `upper` bounds the acceptance of a dead head (rule of three: 3 /
    n).
    """

    state: HeadState
    drafts: int
    upper: float | None = None
    first: Rate | None = None
    continued: Rate | None = None
    """Acceptance of position 1 given position 0."""
    geometric: float | None = None
    """Ratio of the geometric decay that fits the positions."""

    def to_json(self) -> dict[str, Any]:
        """The figures as evidence of a finding."""
        return {
            "head_state": self.state.value,
            "drafts": self.drafts,
            "acceptance_upper_bound": self.upper,
            "position_0": self.first,
            "position_1_given_0": self.continued,
            "geometric_ratio": self.geometric,
        }


def head_evidence(record: Record) -> HeadEvidence:
    """Classify a head that accepts little.

    A head that knows the text goes on being right after a hit; a random one is right at chance
    level every time. So the acceptance of position 1 given position 0 tells them apart, where there
    are enough hits.
    """
    drafts = record.counts.drafts or (
        record.positions[0][1] if record.positions else record.counts.drafted or 0
    )
    if not record.leading and not any(a for a, _ in record.positions or ()):
        state = HeadState.DEAD if drafts >= DEAD_DRAFTS else HeadState.UNCLEAR
        return HeadEvidence(state, drafts, upper=3 / drafts if drafts else None)
    if not record.positions or not record.positions[0][1]:
        return HeadEvidence(HeadState.UNCLEAR, drafts)
    first = proportion(*record.positions[0])
    continued = None
    if len(record.positions) > 1 and record.positions[0][0]:
        hits = record.positions[0][0]
        continued = proportion(min(record.positions[1][0], hits), hits)
    ratio = decay(record)
    state = HeadState.UNCLEAR
    goes_on = continued is not None and continued.lo > _SIGNAL
    stops = continued is not None and continued.hi < _SIGNAL and first.hi < 2 * _SIGNAL
    if not stops and (goes_on or (first.value >= _CHANCE and first.lo > _CHANCE / 2)):
        state = HeadState.DIVERGED
    elif continued is not None and continued.hi < 0.5:
        state = HeadState.NOISE
    return HeadEvidence(state, drafts, first=first, continued=continued, geometric=ratio)
