"""What speculation is worth: the net multiplier over the number of speculative tokens, and advice.

With per-position rates p_i, a share q of the decode steps that draft at all, and a draft token that
costs c target steps, N speculative tokens give, over all steps,

    E(N) = 1 + q · (p_1 + … + p_N)  tokens per step,   T(N) = 1 + q · c · N  target steps,
    multiplier(N) = E(N) / T(N).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from assay.speculation.decay import expected_tokens, extrapolated, position_rates
from assay.speculation.health import SELDOM, WORTH
from assay.speculation.measured import Measured
from assay.speculation.rate import Rate
from assay.speculation.record import Record

ASSUMED_COST = 0.10
"""Cost of one draft token in target steps where nothing measures it: typical of MTP and EAGLE
heads.
"""

ASSUMED_RANGE = (0.05, 0.20)
"""What the assumed cost may really be."""

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

    @property
    def bounds(self) -> tuple[float, float]:
        """What the cost may be at least and at most."""
        if self.source == "assumed":
            return ASSUMED_RANGE
        return (
            self.ratio if self.lo is None else self.lo,
            self.ratio if self.hi is None else self.hi,
        )


@dataclass(frozen=True)
class Benefit:
    """Net multiplier for every depth, the present one and the best. All steps count, also those
    without a draft.
    """

    rates: tuple[float, ...]
    measured_depth: int
    depth: int | None
    cost: Cost
    multipliers: tuple[float, ...]
    """multipliers[n − 1] belongs to n speculative tokens."""
    coverage: float | None = None
    """Share of all decode steps that drafted at all; None where it is not known."""
    measured_multiplier: Measured | None = None
    interval: tuple[float, float] | None = None
    """What the present depth's multiplier may be, given the errors of acceptance and of the cost.
    """

    @property
    def net(self) -> Measured | None:
        """The net multiplier with its interval: as measured, else as predicted; None without."""
        if self.measured_multiplier is not None:
            return self.measured_multiplier
        if self.interval is None or self.multiplier is None:
            return None
        return Measured(self.multiplier, *self.interval)

    @property
    def earns(self) -> bool:
        """Whether the interval of the net multiplier lies above 1."""
        return self.net is not None and self.net.lo is not None and self.net.lo > 1

    @property
    def origin(self) -> str:
        """Where the net multiplier comes from, as the end of a clause."""
        if self.measured_multiplier is not None:
            return ", as measured against the baseline"
        return f", as predicted at a cost of {self.cost} target steps a draft token ({self.cost.source})"  # noqa: E501

    @property
    def loses(self) -> bool:
        """Whether the interval lies below 1; not by an assumed cost of a draft token alone."""
        known = self.measured_multiplier is not None or self.cost.source != "assumed"
        return known and self.net is not None and self.net.hi is not None and self.net.hi < 1

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
            self.multipliers[self.depth - 1]
            if self.depth and self.depth <= len(self.multipliers)
            else None
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
    def seldom(self) -> bool:
        """Whether so few steps draft that a deeper draft changes little."""
        return self.coverage is not None and self.coverage < SELDOM

    @property
    def undecided(self) -> bool:
        """Whether the multiplier, measured or predicted, is within its error of 1."""
        m = self.measured_multiplier
        if m is not None:
            return m.lo is not None and m.hi is not None and m.lo <= 1 <= m.hi
        return self.interval is not None and self.interval[0] <= 1 <= self.interval[1]

    @property
    def advice(self) -> str:
        """What to do, in one line."""
        now = (
            self.multiplier if self.measured_multiplier is None else self.measured_multiplier.value
        )
        share = f"; {100 * (self.coverage or 0):.3g} % of the steps draft" if self.seldom else ""
        if self.too_deep and self.best_multiplier >= WORTH and not self.seldom:
            return f"lower the number of speculative tokens from {self.depth} to {self.best}"
        if self.undecided and self.measured_multiplier is not None:
            return (
                "the measured gain is within its error of 1: send more requests to both servers"
                " (--requests)"
            )
        if self.undecided and self.interval is not None:
            return (
                f"the predicted multiplier may be {self.interval[0]:.2f} to"
                f" {self.interval[1]:.2f}{share}: measure it against a server without speculation,"
                " --baseline URL"
            )
        if self.best_multiplier < 1.0 or (
            now is not None and now < 1.0 and self.best_multiplier < WORTH
        ):
            return f"disable speculation: it costs more than it earns{share}"
        if self.too_deep:
            return f"lower the number of speculative tokens from {self.depth} to {self.best}"
        if self.best_multiplier < WORTH:
            return f"hardly worth running: at best {self.best_multiplier:.2f} times as fast{share}"
        deeper = (
            self.depth and self.best > self.depth and now and self.best_multiplier >= TOO_DEEP * now
        )
        if deeper and not self.seldom:
            return f"keep it, and try up to {self.best} speculative tokens (extrapolated)"
        return "keep it"

    def to_json(self) -> dict[str, Any]:
        """The object `results.benefit`."""
        measured = self.measured_multiplier
        return {
            "tokens_per_step": [
                expected_tokens(self.rates, n) for n in range(1, len(self.rates) + 1)
            ],
            "multipliers": self.multipliers,
            "num_speculative_tokens": self.depth,
            "measured_depth": self.measured_depth,
            "best": self.best,
            "best_multiplier": self.best_multiplier,
            "multiplier": self.multiplier,
            "multiplier_interval": None if self.interval is None else list(self.interval),
            "measured_multiplier": None if measured is None else measured.value,
            "measured_multiplier_interval": measured,
            "cost_ratio": self.cost.ratio,
            "cost_interval": None if self.cost.lo is None else [self.cost.lo, self.cost.hi],
            "cost_source": self.cost.source,
            "coverage": self.coverage,
            "advice": self.advice,
        }


def benefit(
    record: Record,
    cost: Cost,
    measured_multiplier: Measured | None = None,
    rate: Rate | None = None,
    lifetime: Record | None = None,
) -> Benefit | None:
    """Benefit of a record's acceptance at a cost; None where its positions can neither be read nor
    fitted.

    What the record does not know is taken from the counters since start (`lifetime`). `rate` is the
    interval of the acceptance that was judged.
    """
    source = record if position_rates(record) or lifetime is None else lifetime
    known = position_rates(source)
    if not known:
        return None
    coverage = (
        record.coverage if lifetime is None or record.coverage is not None else lifetime.coverage
    )
    share = 1.0 if coverage is None else coverage
    depth = source.num_speculative_tokens
    rates = extrapolated(known, max(MAX_DEPTH, min(depth or 0, 4 * MAX_DEPTH)))
    gains = [share * (expected_tokens(rates, n) - 1) for n in range(1, len(rates) + 1)]
    multipliers = tuple(
        (1 + gain) / (1 + share * cost.ratio * n) for n, gain in enumerate(gains, 1)
    )
    interval = None
    if depth and depth <= len(gains):
        down, up = (
            (rate.lo / rate.value, rate.hi / rate.value)
            if rate is not None and rate.value > 0
            else (1.0, 1.0)
        )
        cheap, dear = cost.bounds
        interval = (
            (1 + gains[depth - 1] * down) / (1 + share * dear * depth),
            (1 + gains[depth - 1] * up) / (1 + share * cheap * depth),
        )
    return Benefit(
        rates, len(known), depth, cost, multipliers, coverage, measured_multiplier, interval
    )


def measured_cost(
    tokens_per_step: float, depth: int, multiplier: Measured, coverage: float = 1.0
) -> Cost | None:
    """Cost of a draft token from the net multiplier at the same load: multiplier = E / (1 + q · c ·
    N).

    `tokens_per_step` is E over all steps. None where the speeds contradict that (c would be
    negative).
    """
    if multiplier.value <= 0 or depth < 1 or coverage <= 0:
        return None

    def at(value: float) -> float:
        return (tokens_per_step / value - 1) / (depth * coverage)

    if at(multiplier.value) < 0:
        return None
    if multiplier.lo is None or multiplier.hi is None:
        return Cost(at(multiplier.value), "measured")
    return Cost(at(multiplier.value), "measured", max(0.0, at(multiplier.hi)), at(multiplier.lo))
