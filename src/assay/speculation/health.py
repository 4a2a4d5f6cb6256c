"""Judge whether the draft head is healthy, degraded or broken, on 95 % intervals of counts.

Position 0 is the honest signal: later positions are only reached when it was accepted. Where
positions are not known, everything drafted stands in for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from assay.speculation.collapse import Collapse, all_or_nothing, find_collapse, judged_pair
from assay.speculation.combine import Evidence
from assay.speculation.head_state import HeadState, head_evidence
from assay.speculation.observation import Observation
from assay.speculation.rate import Rate, design_effect, proportion
from assay.speculation.record import Record

BROKEN_RATE, BROKEN_UPPER = 0.05, 0.10

DEGRADED_UPPER = 0.50

MIN_TOKENS_PER_STEP = 1.6

BROKEN_TOKENS_PER_STEP = 1.05

MIN_DRAFT_TOKENS = 20
"""Fewer draft tokens than this are not judged at all."""

SELDOM = 0.8
"""A drafter that drafts at a smaller share of the steps (n-grams, suffixes) is judged by what all
steps gain.
"""

WORTH = 1.2
"""Net multiplier above which speculation is worth running."""


class Health(StrEnum):
    """The state of a draft head."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    BROKEN = "broken"
    OFF = "off"
    INSUFFICIENT = "insufficient"
    UNKNOWN = "unknown"
    """Lines name drafting, and no parser reads them."""

    @property
    def bad(self) -> bool:
        """Whether speculation fails."""
        return self in (Health.DEGRADED, Health.BROKEN)


@dataclass(frozen=True)
class Assessment:
    """A health with what it rests on. `reason` is one clause; `rate` is the interval that was
    judged.
    """

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
    seldom: bool = False
    """Whether few steps drafted, so that all steps were judged."""

    @property
    def judged(self) -> bool:
        """Whether there was enough to judge."""
        return self.health in (Health.HEALTHY, Health.DEGRADED, Health.BROKEN)

    @property
    def dead_engines(self) -> list[str]:
        """Engines of several that are broken."""
        return [name for name, own in self.per_engine.items() if own.health is Health.BROKEN]

    def to_json(self) -> dict[str, Any]:
        """What the health rests on, as `results.evidence`."""
        return {
            "basis": self.basis,
            "reason": self.reason,
            "rate": self.rate,
            "acceptance": self.pooled,
            "per_position": self.positions,
            "tokens_per_step": self.tokens_per_step,
            "design_effect": self.design_effect,
        }


SAMPLED_LOSS = 0.4
"""Share of its greedy acceptance that a sound head of greedy drafts loses at temperature 1
(lab/docs/heads.md: 0.28 at 0.7).
"""


def sampled_share(temperature: float | None) -> float:
    """What sampling at a temperature leaves of the acceptance of greedy text; 1 where the
    temperature is not known.
    """
    return 1 - SAMPLED_LOSS * min(max(temperature or 0.0, 0.0), 1.0)


def assess(evidence: Evidence, share: float = 1.0) -> Assessment:
    """Judge a source: its totals first, then what totals hide (a dead engine, a collapse,
    impossible extremes).

    `share` scales what a healthy head must reach: `sampled_share` of the traffic's temperature.
    """
    whole = judge(evidence.record, evidence.windows, evidence.lifetime, share)
    engines = {
        name: judge(
            record, [w for w in evidence.windows if (w.replica or "other") == name], share=share
        )
        for name, record in evidence.per_engine.items()
    }
    collapse = find_collapse(evidence.windows)
    extremes = all_or_nothing(evidence.windows)
    health, reason = whole.health, whole.reason
    dead = [name for name, own in engines.items() if own.health is Health.BROKEN]
    if extremes:
        health, reason = Health.BROKEN, "every window accepted either nothing or everything"
    elif dead and health is not Health.BROKEN:
        health, reason = (
            Health.DEGRADED,
            f"{len(dead)} of {len(engines)} engines are dead: {', '.join(dead)}",
        )
    elif collapse is not None and not health.bad:
        late = judge_rate(collapse.after, share)
        if late.bad:
            health, reason = (
                Health.DEGRADED,
                f"acceptance fell to {collapse.after.percent()} within the run",
            )
    return replace(
        whole,
        health=health,
        reason=reason,
        per_engine=engines,
        collapse=collapse,
        all_or_nothing=extremes,
    )


def judge(
    record: Record,
    windows: Sequence[Observation] = (),
    lifetime: Record | None = None,
    share: float = 1.0,
) -> Assessment:
    """Judge one record. `windows` are its clusters; they widen the intervals where they disagree.

    Position 0 is taken from the counters since start (`lifetime`) where the record itself does not
    know it.
    """
    if record.nothing_drafted:
        return Assessment(Health.OFF, "nothing was drafted", "nothing")
    if not record.counted:
        return _judge_values(record, share)
    clusters = _clusters(windows, record.positions is not None)
    effect = design_effect(clusters)
    positions = tuple(proportion(a, n, effect) for a, n in record.positions or () if n)
    pooled = None
    if record.counts.drafted and record.leading is not None:
        pooled = proportion(
            min(max(record.leading, 0), record.counts.drafted), record.counts.drafted, effect
        )
    first, basis = _position_0(record, positions, pooled, lifetime, effect)
    length = record.tokens_per_step
    health = Health.INSUFFICIENT
    if record.impossible:
        reason = "more tokens were accepted than drafted: these counters do not fit together"
    elif pooled is not None and pooled.n < MIN_DRAFT_TOKENS:
        reason = f"only {pooled.n} tokens were drafted"
    elif first is not None:
        health, reason = _by_first_position(first, length, share)
        if health is Health.DEGRADED and _at_chance(record, first, pooled):
            health = Health.BROKEN
    elif pooled is not None:
        health, reason = _by_everything(record, pooled, length, share)
    elif (
        length is not None
        and not record.counts.partial
        and (record.counts.drafts or 0) >= MIN_DRAFT_TOKENS
    ):
        return _judge_values(record, share)
    else:
        reason, basis = "the source does not hold what a rate needs", "nothing"
    found = Assessment(health, reason, basis, first or pooled, length, positions, pooled, effect)
    counted = lifetime if lifetime is not None and record.coverage is None else record
    return found if counted.steps_estimated or basis == "nothing" else by_all_steps(counted, found)


def with_words(
    found: Assessment, record: Record, clues: Collection[str], unread: int
) -> Assessment:
    """`found` with what the source says in words: `off` needs evidence, and n-grams are judged over
    all steps.

    `clues` are the ids of start-up messages, `unread` the number of lines that name drafting and
    are not read.
    """
    if found.health is not Health.OFF:
        return by_all_steps(record, found) if "sparse_method" in clues else found
    if unread:
        reason = (
            f"{unread:,} line{'s name' if unread > 1 else ' names'} drafting in a form that is not"
            " read"
        )
        return replace(found, health=Health.UNKNOWN, reason=reason)
    if record.engine is not None:
        return found  # counters that stand at nothing
    asked = "speculation_on" in clues or "depth" in clues
    evidence = {
        "speculation_off": "speculation is off in the engine's configuration",
        "no_counters": "the metrics page has no draft counters",
        "replies": "requests were answered, and no line counts drafts",
    }
    for clue, reason in evidence.items():
        if clue in clues and (not asked or clue == "speculation_off"):
            return replace(found, reason=reason)
    reason = "nothing in the source counts drafts"
    if asked:
        reason = "speculation is configured, but nothing counts drafts"
    return replace(found, health=Health.INSUFFICIENT, reason=reason)


def _position_0(
    record: Record,
    positions: Sequence[Rate],
    pooled: Rate | None,
    lifetime: Record | None,
    effect: float,
) -> tuple[Rate | None, str]:
    """The interval of position 0 and its name; without one, everything drafted is judged."""
    if positions:
        return positions[0], "position 0"
    if record.num_speculative_tokens == 1 and pooled is not None:
        return pooled, "position 0"
    if record.first:
        return proportion(*record.first, effect), "position 0"
    dead = pooled is not None and judge_rate(pooled) is Health.BROKEN
    if (
        lifetime is not None
        and lifetime.first
        and lifetime.first[1] >= MIN_DRAFT_TOKENS
        and not dead
    ):
        return proportion(*lifetime.first), "position 0, since start"
    return None, "everything drafted"


def by_all_steps(record: Record, found: Assessment) -> Assessment:
    """Judge a drafter that drafts now and then by what it gains over all steps; any other keeps its
    health.

    Its draft tokens cost nothing but their verification; what it gains is 1 + accepted / steps. The
    interval holds the rate's and that of the number of drafts, which come in bursts (Poisson).
    """
    share = record.coverage
    if share is None or share >= SELDOM or found.health is Health.BROKEN or record.impossible:
        return found
    if record.overall is None or not record.counts.drafts:
        return found
    gain, rate = record.overall - 1, found.pooled or found.rate
    down = up = 0.0
    if rate is not None and rate.value > 0:
        down, up = 1 - rate.lo / rate.value, rate.hi / rate.value - 1
    spread = 1.96 / math.sqrt(record.counts.drafts)
    lo = 1 + gain * max(0.0, 1 - math.hypot(down, spread))
    hi = 1 + gain * (1 + math.hypot(up, spread))
    text = f"{record.overall:.2f} tokens a step overall [{lo:.2f}, {hi:.2f}]"
    health = Health.INSUFFICIENT
    if (record.counts.drafted or record.counts.drafts) >= MIN_DRAFT_TOKENS:
        health = Health.DEGRADED if hi < WORTH else Health.HEALTHY if lo >= WORTH else health
    reason = f"{100 * share:.3g} % of the steps had a draft: {text}"
    return replace(found, health=health, reason=reason, basis="all steps", seldom=True)


def _at_chance(record: Record, first: Rate, pooled: Rate | None) -> bool:
    """Whether the head hits now and then and never goes on: nearly nothing of what it drafts is
    accepted.
    """
    if first.hi >= BROKEN_UPPER or pooled is None or judge_rate(pooled) is not Health.BROKEN:
        return False
    return head_evidence(record).state is HeadState.NOISE


def judge_rate(rate: Rate, share: float = 1.0) -> Health:
    """Judge the interval of one acceptance rate by itself."""
    if rate.value < BROKEN_RATE and rate.hi < BROKEN_UPPER:
        return Health.BROKEN
    if rate.hi < DEGRADED_UPPER * share:
        return Health.DEGRADED
    return Health.HEALTHY if rate.lo >= DEGRADED_UPPER * share else Health.INSUFFICIENT


def least_length(share: float) -> float:
    """Tokens that a step must emit."""
    return 1 + (MIN_TOKENS_PER_STEP - 1) * share


def _by_first_position(first: Rate, length: float | None, share: float) -> tuple[Health, str]:
    health = judge_rate(first, share)
    text = f"position 0 is accepted in {first.percent()}"
    if health is not Health.BROKEN and length is not None and length < least_length(share):
        return Health.DEGRADED, f"{text} and a step emits {length:.2f} tokens"
    return health, text


def _by_everything(
    record: Record, pooled: Rate, length: float | None, share: float
) -> tuple[Health, str]:
    """Position 0 is not known: it lies between the pooled rate and accepted per draft."""
    text = f"{pooled.percent()} of all draft tokens are accepted"
    if length is not None:
        text += f", {length:.2f} tokens a step"
    least = least_length(share)
    helpful = length is not None and length >= least
    if pooled.value < BROKEN_RATE and pooled.hi < BROKEN_UPPER and not helpful:
        return Health.BROKEN, text
    if length is None:
        health = judge_rate(pooled, share)
        return health, text
    if length < least:
        # Derived from the reply, whose steps need not all have drafted (n-grams), the length is
        # only a lower bound.
        bound = record.mean_acceptance_length is None and record.counts.generated is not None
        return judge_rate(pooled, share) if bound else Health.DEGRADED, text
    # The lower bound of the rate must still mean a helpful step, and exclude a dead head.
    lower = _length_at(record, pooled.lo, length)
    enough = pooled.lo >= BROKEN_UPPER and lower >= least
    return (
        Health.HEALTHY if enough or pooled.lo >= DEGRADED_UPPER * share else Health.INSUFFICIENT
    ), text


def _length_at(record: Record, rate: float, length: float) -> float:
    """Tokens per step if the true pooled rate were `rate` instead of the observed one."""
    if not record.counts.drafted or not record.leading:
        return 1.0
    observed = record.leading / record.counts.drafted
    if (
        record.counts.drafts is None
        and record.counts.generated
        and record.counts.generated > record.leading
    ):
        accepted = rate * record.counts.drafted
        return record.counts.generated / (record.counts.generated - accepted)
    return 1 + (length - 1) * rate / observed


def _judge_values(record: Record, share: float) -> Assessment:
    """Printed values without counts are taken as they are."""
    first = record.per_position[0] if record.per_position else None
    rate, length = record.acceptance_rate, record.tokens_per_step
    signal = first if first is not None else rate
    parts = []
    if signal is not None:
        parts.append(f"{'the rate' if first is None else 'position 0'} reads {100 * signal:.1f} %")
    if length is not None:
        parts.append(f"a step emits {length:.2f} tokens")
    reason = (" and ".join(parts) or "only a multiplier is printed") + " (printed, without counts)"
    health = Health.HEALTHY
    short = length is not None and length < least_length(share)
    if signal is None:
        if length is None:
            health = Health.INSUFFICIENT
        elif short:
            health = Health.BROKEN if length < BROKEN_TOKENS_PER_STEP else Health.DEGRADED
    elif signal < BROKEN_RATE and (short or length is None):
        health = Health.BROKEN
    elif short or (signal < DEGRADED_UPPER * share and (first is not None or length is None)):
        health = Health.DEGRADED
    return Assessment(health, reason, "printed values", tokens_per_step=length)


def _clusters(windows: Sequence[Observation], by_position: bool) -> list[tuple[int, int]]:
    """(accepted, tried) of each window: position 0 where it is known, everything otherwise."""
    if by_position:
        return [judged_pair(w) for w in windows if w.counts.at_position]
    return [
        (w.counts.accepted, w.counts.drafted)
        for w in windows
        if w.counts.drafted and w.counts.accepted is not None
    ]
