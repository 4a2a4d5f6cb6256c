"""What speculation is worth: tokens per step, net multiplier over the number of speculative tokens, and advice.

With per-position rates p_i and a draft token that costs c target steps, N speculative tokens give

    E(N) = 1 + p_1 + … + p_N  tokens per step,   T(N) = 1 + c · N  target steps,   multiplier(N) = E(N) / T(N).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from assay.speculation.head import geometric_ratio
from assay.speculation.record import Record
from assay.speculation.throughput import Measured

ASSUMED_COST = 0.10
"""Cost of one draft token in target steps where nothing measures it: typical of MTP and EAGLE heads."""
WORTH = 1.2
"""Net multiplier above which speculation is worth running."""
MAX_DEPTH = 16
TOO_DEEP = 1.05
"""A depth wastes time if a smaller one is faster by this factor."""


@dataclass(frozen=True)
class Cost:
    """Cost of one draft token in target steps, and where the figure comes from."""

    ratio: float
    source: str
    """`given`, `measured` or `assumed`."""
    lo: float | None = None
    hi: float | None = None

    def __str__(self) -> str:
        return f"{self.ratio:.3g}" + ("" if self.lo is None else f" [{self.lo:.2g}, {self.hi:.2g}]")


@dataclass(frozen=True)
class Benefit:
    """Net multiplier for every depth, the present one and the best."""

    rates: tuple[float, ...]
    measured_depth: int
    depth: int | None
    cost: Cost
    multipliers: tuple[float, ...]
    """multipliers[n − 1] belongs to n speculative tokens."""
    coverage: float | None = None
    """Share of all decode steps that drafted at all; None where it is not known."""
    measured_multiplier: Measured | None = None

    @property
    def best(self) -> int:
        """Number of speculative tokens with the highest predicted multiplier."""
        return 1 + max(range(len(self.multipliers)), key=lambda i: self.multipliers[i])

    @property
    def best_multiplier(self) -> float:
        """The highest predicted multiplier."""
        return max(self.multipliers)

    @property
    def multiplier(self) -> float | None:
        """Predicted net multiplier of the present depth."""
        return (
            self.multipliers[self.depth - 1] if self.depth and self.depth <= len(self.multipliers) else None
        )

    @property
    def too_deep(self) -> bool:
        """Whether the tail costs more than it earns."""
        now = self.multiplier
        return (
            now is not None
            and self.depth is not None
            and self.best < self.depth
            and self.best_multiplier >= TOO_DEEP * now
        )

    @property
    def advice(self) -> str:
        """What to do, in one line."""
        now = self.multiplier if self.measured_multiplier is None else self.measured_multiplier.value
        if self.best_multiplier < 1.0 or (now is not None and now < 1.0 and self.best_multiplier < WORTH):
            return "disable speculation: it costs more than it earns"
        if self.too_deep:
            return f"lower the number of speculative tokens from {self.depth} to {self.best}"
        if self.best_multiplier < WORTH:
            return f"hardly worth running: at best {self.best_multiplier:.2f} times as fast"
        if self.depth and self.best > self.depth and now and self.best_multiplier >= TOO_DEEP * now:
            return f"keep it, and try up to {self.best} speculative tokens (extrapolated)"
        return "keep it"

    def to_json(self) -> dict[str, Any]:
        """The object `results.benefit`."""
        measured = self.measured_multiplier
        return {
            "tokens_per_step": [expected_tokens(self.rates, n) for n in range(1, len(self.rates) + 1)],
            "multipliers": list(self.multipliers),
            "num_speculative_tokens": self.depth,
            "measured_depth": self.measured_depth,
            "best": self.best,
            "best_multiplier": self.best_multiplier,
            "multiplier": self.multiplier,
            "measured_multiplier": None if measured is None else measured.value,
            "measured_multiplier_interval": None if measured is None else measured.to_json(),
            "cost_ratio": self.cost.ratio,
            "cost_interval": None if self.cost.lo is None else [self.cost.lo, self.cost.hi],
            "cost_source": self.cost.source,
            "coverage": self.coverage,
            "advice": self.advice,
        }


def benefit(record: Record, cost: Cost, measured_multiplier: Measured | None = None) -> Benefit | None:
    """Benefit of a record's acceptance at a cost; None where its positions can neither be read nor fitted."""
    known = position_rates(record)
    if not known:
        return None
    rates = extrapolated(known, MAX_DEPTH)
    multipliers = tuple(expected_tokens(rates, n) / (1 + cost.ratio * n) for n in range(1, MAX_DEPTH + 1))
    coverage = None
    if (
        record.generated
        and record.drafts
        and record.leading is not None
        and record.generated > record.leading
    ):
        # Every step adds one token of its own, so there were generated − accepted steps.
        coverage = min(1.0, record.drafts / (record.generated - record.leading))
    depth = record.num_speculative_tokens
    return Benefit(rates, len(known), depth, cost, multipliers, coverage, measured_multiplier)


def position_rates(record: Record) -> tuple[float, ...]:
    """Acceptance of each position: as counted, or the geometric decay with the same mean (empty if unknown)."""
    if record.per_position:
        return record.per_position
    ratio, k = geometric_ratio(record), record.num_speculative_tokens
    return tuple(ratio**i for i in range(1, k + 1)) if ratio is not None and k else ()


def expected_tokens(rates: Sequence[float], depth: int) -> float:
    """E(N) = 1 + Σ p_i over the first N positions."""
    return 1 + sum(rates[:depth])


def extrapolated(rates: Sequence[float], depth: int) -> tuple[float, ...]:
    """`rates` carried on to `depth` positions at the mean ratio of its own decay."""
    known = list(rates[:depth])
    ratio = (known[-1] / known[0]) ** (1 / (len(known) - 1)) if len(known) > 1 and known[0] > 0 else known[-1]
    while len(known) < depth:
        known.append(known[-1] * min(1.0, ratio))
    return tuple(known)


def measured_cost(tokens_per_step: float, depth: int, multiplier: Measured) -> Cost | None:
    """Cost of a draft token from the net multiplier at the same load: multiplier = E / (1 + c · N).

    None where the speeds contradict that (c would be negative).
    """
    if multiplier.value <= 0 or depth < 1:
        return None

    def at(value: float) -> float:
        return (tokens_per_step / value - 1) / depth

    if at(multiplier.value) < 0:
        return None
    if multiplier.lo is None or multiplier.hi is None:
        return Cost(at(multiplier.value), "measured")
    return Cost(at(multiplier.value), "measured", max(0.0, at(multiplier.hi)), at(multiplier.lo))
