"""The difference from a baseline: a loader fault, or something that quantization can do?

For speculative sampling the acceptance at a position is 1 − TV(p, q), with p the target's
distribution and q the draft's (Leviathan et al. 2023, arXiv:2211.17192, theorem 3.5). If a
changed target p′ replaces p, the acceptance changes by at most TV(p, p′). A fall of d points
therefore needs a target that differs by at least d points itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from assay.speculation.health import Assessment, Health
from assay.speculation.rate import Rate, difference
from assay.speculation.record import Record

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
