"""Is the draft head healthy, degraded or broken? Judged on 95 % intervals of counts, not on printed percentages.

Position 0 is the honest signal: later positions are only reached when it was accepted. Where positions are not
known, everything drafted stands in for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from assay.speculation.combine import Evidence
from assay.speculation.intervals import Rate, design_effect, proportion
from assay.speculation.record import Observation, Record
from assay.speculation.trend import Collapse, all_or_nothing, find_collapse

BROKEN_RATE, BROKEN_UPPER = 0.05, 0.10
DEGRADED_UPPER = 0.50
MIN_TOKENS_PER_STEP = 1.6
BROKEN_TOKENS_PER_STEP = 1.05
MIN_DRAFT_TOKENS = 20
"""Fewer draft tokens than this are not judged at all."""


class Health(StrEnum):
    """The state of a draft head."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    BROKEN = "broken"
    OFF = "off"
    INSUFFICIENT = "insufficient"

    @property
    def bad(self) -> bool:
        """Whether speculation fails."""
        return self in (Health.DEGRADED, Health.BROKEN)


@dataclass(frozen=True)
class Assessment:
    """A health with what it rests on. `reason` is one clause; `rate` is the interval that was judged."""

    health: Health
    reason: str
    basis: str
    rate: Rate | None = None
    tokens_per_step: float | None = None
    positions: tuple[Rate, ...] = ()
    pooled: Rate | None = None
    design_effect: float = 1.0
    per_engine: dict[str, Assessment] = field(default_factory=dict)
    collapse: Collapse | None = None
    all_or_nothing: bool = False

    @property
    def judged(self) -> bool:
        """Whether there was enough to judge."""
        return self.health not in (Health.OFF, Health.INSUFFICIENT)

    @property
    def dead_engines(self) -> list[str]:
        """Engines of several that are broken."""
        return [name for name, own in self.per_engine.items() if own.health is Health.BROKEN]

    def to_json(self) -> dict[str, Any]:
        """What the health rests on, as `results.evidence`."""
        return {
            "basis": self.basis,
            "reason": self.reason,
            "rate": None if self.rate is None else self.rate.to_json(),
            "acceptance": None if self.pooled is None else self.pooled.to_json(),
            "per_position": [p.to_json() for p in self.positions],
            "tokens_per_step": self.tokens_per_step,
            "design_effect": self.design_effect,
        }


def assess(evidence: Evidence) -> Assessment:
    """Judge a source: its totals first, then what totals hide (a dead engine, a collapse, impossible extremes)."""
    whole = judge(evidence.record, evidence.windows)
    engines = {
        name: judge(record, [w for w in evidence.windows if (w.replica or "other") == name])
        for name, record in evidence.per_engine.items()
    }
    collapse = find_collapse(evidence.windows)
    extremes = all_or_nothing(evidence.windows)
    health, reason = whole.health, whole.reason
    dead = [name for name, own in engines.items() if own.health is Health.BROKEN]
    if extremes:
        health, reason = Health.BROKEN, "every window accepted either nothing or everything"
    elif dead and health is not Health.BROKEN:
        health, reason = Health.DEGRADED, f"{len(dead)} of {len(engines)} engines are dead: {', '.join(dead)}"
    elif collapse is not None and not health.bad:
        late = judge_rate(collapse.after)
        if late.bad:
            health, reason = Health.DEGRADED, f"acceptance fell to {collapse.after.percent()} within the run"
    return Assessment(
        health, reason, whole.basis, whole.rate, whole.tokens_per_step, whole.positions, whole.pooled,
        whole.design_effect, engines, collapse, extremes,
    )  # fmt: skip


def judge(record: Record, windows: Sequence[Observation] = ()) -> Assessment:
    """Judge one record. `windows` are its clusters; they widen the intervals where they disagree."""
    if record.nothing_drafted:
        return Assessment(Health.OFF, "nothing was drafted", "nothing")
    if not record.counts:
        return _judge_values(record)
    clusters = _clusters(windows, record.positions is not None)
    effect = design_effect(clusters)
    positions = tuple(proportion(a, n, effect) for a, n in record.positions or () if n)
    pooled = None
    if record.drafted and record.leading is not None:
        pooled = proportion(min(max(record.leading, 0), record.drafted), record.drafted, effect)
    first = positions[0] if positions else pooled if record.num_speculative_tokens == 1 else None
    basis = "position 0" if first else "everything drafted"
    length = record.tokens_per_step
    if record.impossible:
        health, reason = (
            Health.INSUFFICIENT,
            "more tokens were accepted than drafted: these counters do not fit together",
        )
    elif pooled is not None and pooled.n < MIN_DRAFT_TOKENS:
        health, reason = Health.INSUFFICIENT, f"only {pooled.n} tokens were drafted"
    elif first is not None:
        health, reason = _by_first_position(first, length)
    elif pooled is not None:
        health, reason = _by_everything(record, pooled, length)
    elif length is not None and not record.partial and (record.drafts or 0) >= MIN_DRAFT_TOKENS:
        return _judge_values(record)
    else:
        health, reason, basis = Health.INSUFFICIENT, "the source does not hold what a rate needs", "nothing"
    return Assessment(health, reason, basis, first or pooled, length, positions, pooled, effect)


def judge_rate(rate: Rate) -> Health:
    """Judge the interval of one acceptance rate by itself."""
    if rate.value < BROKEN_RATE and rate.hi < BROKEN_UPPER:
        return Health.BROKEN
    if rate.hi < DEGRADED_UPPER:
        return Health.DEGRADED
    return Health.HEALTHY if rate.lo >= DEGRADED_UPPER else Health.INSUFFICIENT


def _by_first_position(first: Rate, length: float | None) -> tuple[Health, str]:
    health = judge_rate(first)
    text = f"position 0 is accepted in {first.percent()}"
    if health is not Health.BROKEN and length is not None and length < MIN_TOKENS_PER_STEP:
        return Health.DEGRADED, f"{text} and a step emits {length:.2f} tokens"
    return health, text


def _by_everything(record: Record, pooled: Rate, length: float | None) -> tuple[Health, str]:
    """Position 0 is not known: it lies between the pooled rate and accepted per draft."""
    text = f"{pooled.percent()} of all draft tokens are accepted"
    if length is not None:
        text += f", {length:.2f} tokens a step"
    helpful = length is not None and length >= MIN_TOKENS_PER_STEP
    if pooled.value < BROKEN_RATE and pooled.hi < BROKEN_UPPER and not helpful:
        return Health.BROKEN, text
    if length is None:
        health = judge_rate(pooled)
        return health, text
    if length < MIN_TOKENS_PER_STEP:
        # Derived from the reply, whose steps need not all have drafted (n-grams), the length is only a lower bound.
        bound = record.mean_acceptance_length is None and record.generated is not None
        return judge_rate(pooled) if bound else Health.DEGRADED, text
    # The lower bound of the rate must still mean a helpful step, and exclude a dead head.
    lower = _length_at(record, pooled.lo, length)
    enough = pooled.lo >= BROKEN_UPPER and lower >= MIN_TOKENS_PER_STEP
    return (Health.HEALTHY if enough or pooled.lo >= DEGRADED_UPPER else Health.INSUFFICIENT), text


def _length_at(record: Record, rate: float, length: float) -> float:
    """Tokens per step if the true pooled rate were `rate` instead of the observed one."""
    if not record.drafted or not record.leading:
        return 1.0
    observed = record.leading / record.drafted
    if record.drafts is None and record.generated and record.generated > record.leading:
        accepted = rate * record.drafted
        return record.generated / (record.generated - accepted)
    return 1 + (length - 1) * rate / observed


def _judge_values(record: Record) -> Assessment:
    """Printed values without counts are taken as they are."""
    first = record.per_position[0] if record.per_position else None
    rate, length = record.acceptance_rate, record.tokens_per_step
    signal = first if first is not None else rate
    parts = []
    if first is not None:
        parts.append(f"position 0 reads {100 * first:.1f} %")
    elif rate is not None:
        parts.append(f"the rate reads {100 * rate:.1f} %")
    if length is not None:
        parts.append(f"a step emits {length:.2f} tokens")
    reason = (" and ".join(parts) or "only a multiplier is printed") + " (printed, without counts)"
    short = length is not None and length < MIN_TOKENS_PER_STEP
    if signal is None and length is None:
        health = Health.INSUFFICIENT
    elif (signal is not None and signal < BROKEN_RATE and (short or length is None)) or (
        signal is None and length is not None and length < BROKEN_TOKENS_PER_STEP
    ):
        health = Health.BROKEN
    elif (
        short
        or (first is not None and first < DEGRADED_UPPER)
        or (length is None and signal is not None and signal < DEGRADED_UPPER)
    ):
        health = Health.DEGRADED
    else:
        health = Health.HEALTHY
    return Assessment(health, reason, "printed values", tokens_per_step=length)


def _clusters(windows: Sequence[Observation], by_position: bool) -> list[tuple[int, int]]:
    """(accepted, tried) of each window: position 0 where it is known, everything otherwise."""
    clusters = []
    for w in windows:
        if by_position and w.accepted_per_position:
            tried = w.drafts_per_position[0] if w.drafts_per_position else w.drafts
            clusters.append((w.accepted_per_position[0], tried or 0))
        elif not by_position and w.drafted and w.accepted is not None:
            clusters.append((w.accepted, w.drafted))
    return clusters
