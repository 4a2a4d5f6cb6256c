"""Is the draft head healthy, degraded or broken? Judged on 95 % intervals of counts, not on printed
percentages.

Position 0 is the honest signal: later positions are only reached when it was accepted. Where
positions are not known, everything drafted stands in for it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from assay.speculation.record import Evidence, Observation, Record
from assay.stats import wilson

MIN_CLUSTERS = 5
"""Fewer windows than this say too little about how much they differ."""


@dataclass(frozen=True)
class Rate:
    """A rate, or a difference of two, with its two-sided 95 % interval. `n` is the number of trials
    behind it.
    """

    value: float
    lo: float
    hi: float
    n: int = 0

    def percent(self) -> str:
        """The interval as text, in per cent."""
        return f"{100 * self.value:.1f} % [{100 * self.lo:.1f}, {100 * self.hi:.1f}]"


def proportion(successes: int, trials: int, design_effect: float = 1.0) -> Rate:
    """Wilson interval of a proportion. A design effect above 1 divides the number of trials."""
    effect = max(1.0, design_effect)
    # Counters of one page are not read at one instant, so hits may run a little ahead of trials.
    interval = wilson(min(max(successes, 0), trials) / effect, trials / effect)
    return Rate(interval.value, interval.lo, interval.hi, trials)


def overdispersion(*parts: Sequence[tuple[int, int]], least: int = MIN_CLUSTERS - 1) -> float:
    """Variance of pooled proportions over their binomial variance, from (successes, trials) of the
    windows of each part.

    Pearson's Σ (x − n·p)² / (n·p·(1 − p)) over the degrees of freedom, at least 1; 1 for fewer than
    `least` of these.
    """
    chi2, freedom = 0.0, 0
    for part in parts:
        x, n = _total(part)
        freedom += max(0, len(part) - 1)
        if 0 < x < n:
            p = x / n
            chi2 += sum((a - m * p) ** 2 / (m * p * (1 - p)) for a, m in part if m)
    return max(1.0, chi2 / freedom) if freedom >= least else 1.0


def design_effect(clusters: Sequence[tuple[int, int]]) -> float:
    """What the intervals of a run widen by because its windows differ; 1 for fewer than five."""
    return overdispersion([c for c in clusters if c[1]])


def difference(a: Rate, b: Rate) -> Rate:
    """a − b with Newcombe's interval (1998, method 10): the two Wilson intervals combined in
    squares.
    """
    gap = a.value - b.value
    lo = gap - math.hypot(a.value - a.lo, b.hi - b.value)
    hi = gap + math.hypot(a.hi - a.value, b.value - b.lo)
    return Rate(gap, lo, hi, min(a.n, b.n))


MIN_DRAFTS = 50
"""Trials that a part of a run needs before it is compared with another part."""
_LIKELIHOOD_RATIO = 15.0
_FALL = 0.5


@dataclass(frozen=True)
class Collapse:
    """Acceptance before and after the window at which it fell, counted in windows of that engine."""

    at: int
    windows: int
    before: Rate
    after: Rate
    time: str | None = None
    replica: str | None = None
    zero: bool = False
    """Every later window is exactly zero: a switch, not a drift."""


def find_collapse(windows: Sequence[Observation]) -> Collapse | None:
    """The clearest fall of acceptance to less than half within one engine's windows; None if there
    is none.

    The split with the greatest binomial likelihood ratio, deflated by the overdispersion inside the
    two parts, must exceed 15, and the upper bound after it must lie under half the lower bound
    before it.
    """
    best: tuple[float, Collapse] | None = None
    for replica, own in _series(windows).items():
        pairs = [_pair(w) for w in own]
        split = _best_split(pairs)
        if split is None:
            continue
        at, ratio = split
        before, after = proportion(*_total(pairs[:at])), proportion(*_total(pairs[at:]))
        ratio /= overdispersion(pairs[:at], pairs[at:], least=3)
        if (
            after.hi < _FALL * before.lo
            and ratio > _LIKELIHOOD_RATIO
            and (best is None or ratio > best[0])
        ):
            zero = after.value == 0.0
            best = (ratio, Collapse(at, len(own), before, after, own[at].time, replica, zero))
    return None if best is None else best[1]


def _best_split(pairs: Sequence[tuple[int, int]]) -> tuple[int, float] | None:
    """The index at which the rate falls most clearly, and twice the log-likelihood gained by
    splitting there.
    """
    whole_x, whole_n = _total(pairs)
    whole = _loglik(whole_x, whole_n)
    best: tuple[int, float] | None = None
    x = n = 0
    for at, (own_x, own_n) in enumerate(pairs[:-1], 1):
        x, n = x + own_x, n + own_n
        rest_x, rest_n = whole_x - x, whole_n - n
        if n < MIN_DRAFTS or rest_n < MIN_DRAFTS or rest_x * n >= _FALL * x * rest_n:
            continue
        ratio = 2 * (_loglik(x, n) + _loglik(rest_x, rest_n) - whole)
        if best is None or ratio > best[1]:
            best = (at, ratio)
    return best


def zero_windows(windows: Sequence[Observation], collapse: Collapse | None) -> list[Observation]:
    """Windows of exact zero over many drafts although the same engine accepts at least a fifth in
    others.
    """
    found = []
    for replica, own in _series(windows).items():
        pairs = [_pair(w) for w in own]
        if not any(n >= MIN_DRAFTS and x / n >= 0.2 for x, n in pairs):
            continue
        for i, (w, (x, n)) in enumerate(zip(own, pairs, strict=True)):
            after_collapse = (
                collapse is not None and collapse.replica == replica and i >= collapse.at
            )
            if x == 0 and n >= MIN_DRAFTS and not after_collapse:
                found.append(w)
    return found


def all_or_nothing(windows: Sequence[Observation]) -> bool:
    """Whether every window accepted exactly nothing or exactly everything, and both occur.

    No text does that; NaN logits do (nothing compares as greater, or everything does).
    """
    return {_extreme(w) for w in windows} == {0, 1}


def _extreme(w: Observation) -> int | None:
    """0 for a window that accepted nothing, 1 for one that accepted everything, else None."""
    if w.drafted is not None and w.accepted is not None:
        return int(w.accepted > 0) if w.drafted >= 20 and w.accepted in (0, w.drafted) else None
    length, depth = w.mean_acceptance_length, w.num_speculative_tokens
    if length == 1.0:
        return 0 if depth else None
    return 1 if depth and length in (depth, depth + 1) else None


def _series(windows: Sequence[Observation]) -> dict[str | None, list[Observation]]:
    """Windows with enough behind them to be counted, by engine."""
    series: dict[str | None, list[Observation]] = defaultdict(list)
    for w in windows:
        if _pair(w)[1]:
            series[w.replica].append(w)
    return series


def _pair(w: Observation) -> tuple[int, int]:
    """(accepted, tried) of position 0, or of everything where positions are not known."""
    if w.accepted_per_position and (w.drafts_per_position or w.drafts):
        return w.accepted_per_position[0], (w.drafts_per_position or (w.drafts,))[0] or 0
    return (w.accepted, w.drafted or 0) if w.accepted is not None else (0, 0)


def _total(pairs: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return sum(x for x, _ in pairs), sum(n for _, n in pairs)


def _loglik(x: int, n: int) -> float:
    """Binomial log-likelihood at the maximum."""
    if not 0 < x < n:
        return 0.0
    return x * math.log(x / n) + (n - x) * math.log(1 - x / n)


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
(docs/heads.md: 0.28 at 0.7).
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
    if not record.counts:
        return _judge_values(record, share)
    clusters = _clusters(windows, record.positions is not None)
    effect = design_effect(clusters)
    positions = tuple(proportion(a, n, effect) for a, n in record.positions or () if n)
    pooled = None
    if record.drafted and record.leading is not None:
        pooled = proportion(min(max(record.leading, 0), record.drafted), record.drafted, effect)
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
    elif length is not None and not record.partial and (record.drafts or 0) >= MIN_DRAFT_TOKENS:
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
    if record.overall is None or not record.drafts:
        return found
    gain, rate = record.overall - 1, found.pooled or found.rate
    down = up = 0.0
    if rate is not None and rate.value > 0:
        down, up = 1 - rate.lo / rate.value, rate.hi / rate.value - 1
    spread = 1.96 / math.sqrt(record.drafts)
    lo = 1 + gain * max(0.0, 1 - math.hypot(down, spread))
    hi = 1 + gain * (1 + math.hypot(up, spread))
    text = f"{record.overall:.2f} tokens a step overall [{lo:.2f}, {hi:.2f}]"
    health = Health.INSUFFICIENT
    if (record.drafted or record.drafts) >= MIN_DRAFT_TOKENS:
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
        bound = record.mean_acceptance_length is None and record.generated is not None
        return judge_rate(pooled, share) if bound else Health.DEGRADED, text
    # The lower bound of the rate must still mean a helpful step, and exclude a dead head.
    lower = _length_at(record, pooled.lo, length)
    enough = pooled.lo >= BROKEN_UPPER and lower >= least
    return (
        Health.HEALTHY if enough or pooled.lo >= DEGRADED_UPPER * share else Health.INSUFFICIENT
    ), text


def _length_at(record: Record, rate: float, length: float) -> float:
    """Tokens per step if the true pooled rate were `rate` instead of the observed one."""
    if not record.drafted or not record.leading:
        return 1.0
    observed = record.leading / record.drafted
    if record.drafts is None and record.generated and record.generated > record.leading:
        accepted = rate * record.drafted
        return record.generated / (record.generated - accepted)
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
        return [_pair(w) for w in windows if w.accepted_per_position]
    return [(w.accepted, w.drafted) for w in windows if w.drafted and w.accepted is not None]


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
    drafts = record.drafts or (record.positions[0][1] if record.positions else record.drafted or 0)
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


def decay(record: Record) -> float | None:
    """a in p_i ≈ a^(i+1): the geometric decay with the record's mean of accepted tokens a draft."""
    positions = record.positions
    if positions and all(n for _, n in positions):
        return geometric_ratio(sum(a / n for a, n in positions), len(positions))
    if record.tokens_per_step is not None and record.num_speculative_tokens:
        return geometric_ratio(record.tokens_per_step - 1, record.num_speculative_tokens)
    return None


def geometric_ratio(mean: float, k: int, first: int = 1) -> float | None:
    """The root a of Σ a^i = mean over k powers from `first` on; 1 where the mean is larger than
    any, None where it is 0.
    """
    powers = range(first, first + k)
    if mean <= 0 or (first == 0 and mean < 1):
        return None if mean <= 0 else 0.0
    if mean >= k:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in powers) < mean else (low, middle)
    return low
