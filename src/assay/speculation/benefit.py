"""What speculation is worth: tokens per step, net multiplier over the number of speculative tokens,
and advice.

With per-position rates p_i, a share q of the decode steps that draft at all, and a draft token that
costs c target steps, N speculative tokens give, over all steps,

    E(N) = 1 + q · (p_1 + … + p_N)  tokens per step,   T(N) = 1 + q · c · N  target steps,
    multiplier(N) = E(N) / T(N).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import UsageError
from assay.speculation.health import (
    SELDOM,
    WORTH,
    Assessment,
    Health,
    Rate,
    decay,
    difference,
    geometric_ratio,
)
from assay.speculation.record import Record
from assay.verdict import Finding, Severity, Table


@dataclass(frozen=True)
class Measured:
    """A positive figure with its two-sided 95 % interval; the bounds are None where too few values
    stand behind it.
    """

    value: float
    lo: float | None = None
    hi: float | None = None

    def __str__(self) -> str:
        return f"{self.value:.2f}" + ("" if self.lo is None else f" [{self.lo:.2f}, {self.hi:.2f}]")


def median(values: Sequence[float]) -> Measured | None:
    """Median of positive values with the interval between order statistics (distribution-free; from
    six values on).

    With k the largest number for which P(Binomial(n, 1/2) < k) <= 2.5 %, the k-th smallest and the
    k-th largest value enclose the median of what the values are drawn from with at least 95 %
    (Conover, Practical Nonparametric Statistics, section 3.2). None where there is no value.
    """
    ordered = sorted(v for v in values if v > 0)
    n = len(ordered)
    if not n:
        return None
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    k = _rank(n)
    return Measured(middle, ordered[k - 1], ordered[n - k]) if k else Measured(middle)


def _rank(n: int) -> int:
    """The largest k with P(Binomial(n, 1/2) < k) <= 2.5 %; by the normal approximation for more
    than a hundred values.
    """
    if n > 100:
        return int(n / 2 - 0.98 * math.sqrt(n))
    k, tail = 0, 0.0
    while tail + math.comb(n, k) / 2**n <= 0.025:
        tail += math.comb(n, k) / 2**n
        k += 1
    return k


def quotient(a: Measured, b: Measured) -> Measured:
    """a / b; the intervals are combined in squares on the logarithmic scale, as Newcombe's method
    does for differences.
    """
    value = a.value / b.value
    if a.lo is None or a.hi is None or b.lo is None or b.hi is None:
        return Measured(value)
    down = math.hypot(math.log(a.value / a.lo), math.log(b.hi / b.value))
    up = math.hypot(math.log(a.hi / a.value), math.log(b.value / b.lo))
    return Measured(value, value * math.exp(-down), value * math.exp(up))


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


def position_rates(record: Record) -> tuple[float, ...]:
    """Acceptance of each position: as counted, or a geometric decay with the same mean (empty if
    unknown).

    Where position 0 is known the decay starts there, else at 1.
    """
    if record.per_position:
        return record.per_position
    k, length = record.num_speculative_tokens, record.mean_acceptance_length
    if record.first and k and length is not None and record.first[1]:
        start = record.first[0] / record.first[1]
        ratio = geometric_ratio((length - 1) / start, k, first=0) if start else None
        return tuple(start * ratio**i for i in range(k)) if ratio is not None else ()
    ratio = decay(record)
    return tuple(ratio**i for i in range(1, k + 1)) if ratio is not None and k else ()


def expected_tokens(rates: Sequence[float], depth: int) -> float:
    """1 + Σ p_i over the first N positions: tokens of a step that drafts."""
    return 1 + sum(rates[:depth])


def extrapolated(rates: Sequence[float], depth: int) -> tuple[float, ...]:
    """`rates` carried on to `depth` positions at the mean ratio of its own decay."""
    known = list(rates[:depth])
    ratio = (
        (known[-1] / known[0]) ** (1 / (len(known) - 1))
        if len(known) > 1 and known[0] > 0
        else known[-1]
    )
    while len(known) < depth:
        known.append(known[-1] * min(1.0, ratio))
    return tuple(known)


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


# Against a baseline: is the difference a loader fault, or something that quantization can do?
#
# For speculative sampling the acceptance at a position is 1 − TV(p, q), with p the target's
# distribution and q the draft's (Leviathan et al. 2023, arXiv:2211.17192, theorem 3.5). If a
# changed target p′ replaces p, the acceptance changes by at most TV(p, p′). A fall of d points
# therefore needs a target that differs by at least d points itself.

QUANTIZATION = 0.10
"""A fall that a quantized but sound target explains: its total variation from the original is of
this order.
"""
LOADER = 0.40
"""A fall that only a target with mostly different text would explain."""


@dataclass(frozen=True)
class Comparison:
    """Differences candidate − baseline with 95 % intervals, and how to read them."""

    position0: Rate | None
    acceptance: Rate | None
    per_position: tuple[Rate, ...]
    tokens_per_step: tuple[float, float] | None
    speeds: tuple[float, float] | None
    baseline: Health
    reading: str

    @property
    def fall(self) -> Rate | None:
        """The difference that is judged: position 0 where both sides know it."""
        return self.position0 or self.acceptance

    @property
    def worse(self) -> bool:
        """Whether acceptance is lower beyond the interval."""
        return self.fall is not None and self.fall.hi < 0

    def to_json(self) -> dict[str, Any]:
        """The object `results.baseline`."""
        return {
            "health": self.baseline,
            "position_0_difference": self.position0,
            "acceptance_difference": self.acceptance,
            "per_position_difference": self.per_position,
            "tokens_per_step": self.tokens_per_step,
            "generation_throughput": self.speeds,
            "reading": self.reading,
        }


def compare(
    candidate: Assessment,
    baseline: Assessment,
    record: Record,
    baseline_record: Record,
    speeds: tuple[float, float] | None = None,
) -> Comparison:
    """Compare two assessed sources. `speeds` are (candidate, baseline) tokens per second, where
    both are known.
    """
    per_position = tuple(
        difference(a, b) for a, b in zip(candidate.positions, baseline.positions, strict=False)
    )
    pooled = None
    if candidate.pooled and baseline.pooled:
        pooled = difference(candidate.pooled, baseline.pooled)
    lengths = None
    if record.tokens_per_step is not None and baseline_record.tokens_per_step is not None:
        lengths = (record.tokens_per_step, baseline_record.tokens_per_step)
    first = per_position[0] if per_position else None
    reading = _reading(first or pooled, candidate.health, baseline.health)
    return Comparison(first, pooled, per_position, lengths, speeds, baseline.health, reading)


def _reading(fall: Rate | None, candidate: Health, baseline: Health) -> str:
    if baseline is Health.OFF:
        return "the baseline does not speculate; only the speeds compare"
    if fall is None:
        return "one side has no counts, so there is no interval for the difference"
    if fall.lo <= 0 <= fall.hi:
        return "no difference beyond the interval"
    if fall.lo > 0:
        return "acceptance is higher than the baseline's"
    points = f"{-100 * fall.hi:.0f}"
    if candidate is Health.BROKEN and not baseline.bad and -fall.hi >= LOADER:
        return (
            f"a loader fault: quantization cannot cost {points} points unless the target's own text"
            " changed in as many of a hundred tokens"
        )
    if -fall.hi >= LOADER:
        return f"more than a sound quantized target explains (at least {points} points)"
    if -fall.lo <= QUANTIZATION:
        return (
            "within what a quantized target explains; `assay compare` measures how far the target"
            " itself moved"
        )
    return (
        f"at least {points} points lower: a changed target explains it only if its text differs"
        " that much; `assay compare` tells"
    )


# `assay spec LOG --predict COMPARISON`: what the head of a healthy run will accept beside a changed
# target.
#
# A head that reads the target's hidden states follows a target that changes: it drafts on the
# changed states, and the text that it guesses is the changed target's own. So acceptance need not
# fall with the distance between the two targets. Each position's acceptance, given the ones before
# it, is taken to fall by the factor 1 − β d for a total variation d; the fitted β is 0 up to the
# total variation that was measured. β comes from one head beside targets of many formats, the
# errors from another model and from vLLM (`benchmarks/heads_tables.py`,
# `benchmarks/results/heads_predict.json`).


BETA = 0.00
"""Share of the changed tokens that the head would have had right, fitted to the simulated rows of
one model: none.
"""
ERROR: float | None = 0.065
"""Largest error of position 0 on rows that were not fitted: another model's, and all that vLLM
served; None: not measured.
"""
LENGTH_ERROR: float | None = 0.31
"""The same of the tokens per step."""
FITTED_TO = 0.24
"""Largest total variation of the rows: beyond it nothing was measured."""


@dataclass(frozen=True)
class Change:
    """How far a target is from the one that the head was trained on. `exact` is False for a bound
    from the KL alone.
    """

    tv: float
    exact: bool
    source: str


@dataclass(frozen=True)
class Prediction:
    """Shares accepted by position and tokens a step beside the changed target; errors are None
    where they are not known.
    """

    change: Change
    positions: tuple[float, ...]
    tokens_per_step: float
    error: float | None = ERROR
    length_error: float | None = LENGTH_ERROR


def read_change(text: str) -> Change:
    """The total variation that `text` gives: a number, or the JSON of `assay compare` (its `tv`,
    else √(KL / 2) as a bound).

    UsageError where it gives none.
    """
    try:
        value = float(text)
    except ValueError:
        return _of_comparison(Path(text))
    if not 0 <= value <= 1:
        raise _unusable(f"--predict {text}: a total variation lies between 0 and 1")
    return Change(value, True, "given")


def _of_comparison(path: Path) -> Change:
    try:
        results = json.loads(path.read_text(encoding="utf-8"))["results"]
        tv, kl = (results.get("tv") or {}).get("mean"), (results.get("kld") or {}).get("mean")
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(
            f"--predict {path}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unusable(f"--predict {path} is no result of assay compare") from error
    if isinstance(tv, int | float) and math.isfinite(tv):
        return Change(float(tv), True, path.name)
    if isinstance(kl, int | float) and 0 <= kl < math.inf:
        return Change(min(1.0, math.sqrt(kl / 2)), False, path.name)
    raise _unusable(f"--predict {path} has neither a total variation nor a KL")


def _unusable(message: str) -> UsageError:
    return UsageError(
        message,
        remedy=(
            "assay compare hf:TRAINED hf:SERVED --text PROMPTS --json FILE, then assay spec LOG"
            " --predict FILE"
        ),
        finding_id="speculation.usage",
    )


def predict(positions: Sequence[float], change: Change) -> Prediction:
    """From the shares [k] of steps that accept at least so many drafts beside the head's own
    target.
    """
    factor = max(0.0, 1 - BETA * change.tv)
    shares = tuple(share * factor ** (j + 1) for j, share in enumerate(positions))
    return Prediction(change, shares, 1 + sum(shares))


def to_json(p: Prediction) -> dict[str, Any]:
    """Plain JSON types."""
    return {
        "tv": p.change.tv,
        "tv_exact": p.change.exact,
        "positions": list(p.positions),
        "tokens_per_step": p.tokens_per_step,
        "error": p.error,
        "tokens_per_step_error": p.length_error,
    }


def table(p: Prediction, now: Sequence[float]) -> Table:
    """Beside what the source shows."""
    rows = [
        (
            f"position {j}",
            f"{100 * a:.1f} %",
            f"{100 * b:.1f} %" + ("" if p.error is None else f" ± {100 * p.error:.1f}"),
        )
        for j, (a, b) in enumerate(zip(now, p.positions, strict=True))
    ]
    rows.append(
        (
            "tokens per step",
            f"{1 + sum(now):.2f}",
            f"{p.tokens_per_step:.2f}"
            + ("" if p.length_error is None else f" ± {p.length_error:.2f}"),
        )
    )
    kind = "total variation" if p.change.exact else "total variation, at most"
    known = p.error is not None
    error = (
        "±: the largest error on measured rows that were not fitted."
        if known
        else "The error is not known."
    )
    note = f"{kind}: {100 * p.change.tv:.2g} %. {error}"
    return Table(
        "Predicted beside the changed target",
        ("", "now", "predicted"),
        rows,
        frozenset({1, 2}),
        note,
    )


def doubts(p: Prediction) -> list[Finding]:
    """What makes the prediction weaker than its error says."""
    if p.change.tv <= FITTED_TO and p.change.exact:
        return []
    title = (
        f"the target changes by {100 * p.change.tv:.0f} %, and the prediction was measured up to"
        f" {100 * FITTED_TO:.0f} %"
        if p.change.tv > FITTED_TO
        else (
            "the comparison has no total variation: the prediction is a lower bound, from √(KL / 2)"
        )
    )
    return [
        Finding(
            "speculation.prediction",
            Severity.WARNING,
            title,
            remedies=("serve it, and run assay spec on its log",),
        )
    ]
