"""What a whole source adds up to, in NVIDIA AIPerf's names where they fit.

Rates are fractions. Lengths count the bonus token, so a step that accepted nothing has length 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from assay.speculation.observation import DEFINITIONS


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a source adds up to. Unknown values are None.

    `positions[i]` is (accepted, drafts) of draft position i. `tokens_per_step` is the mean
    acceptance length, or what can be derived in its place (from the generated tokens of the
    replies). `leading_accepted` are the drafts that entered the text where that differs from
    `accepted` (vLLM V0). `first` is position 0 where only that is known. `steps` are all decode
    steps, also those without a draft (estimated from the throughput that a log prints). `windows`
    counts observations with drafts.
    """

    engine: str | None = None
    drafted: int | None = None
    accepted: int | None = None
    drafts: int | None = None
    acceptance_rate: float | None = None
    mean_acceptance_length: float | None = None
    per_position: tuple[float, ...] | None = None
    num_speculative_tokens: int | None = None
    windows: int = 0
    counts: bool = False
    positions: tuple[tuple[int, int], ...] | None = None
    first: tuple[int, int] | None = None
    steps: int | None = None
    steps_estimated: bool = False
    tokens_per_step: float | None = None
    leading_accepted: int | None = None
    emitted: int | None = None
    generated: int | None = None
    multiplier: float | None = None
    reported_accept_rate: float | None = None
    generation_throughput: float | None = None
    partial: bool = False
    estimated: bool = False
    definitions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    per_implementation: Mapping[str, Mapping[str, int | None]] = field(default_factory=dict)

    @property
    def nothing_drafted(self) -> bool:
        """Whether the source shows that no token was drafted."""
        if self.counts:
            return not self.drafted and not self.drafts and self.positions is None
        return self.acceptance_rate is None and self.tokens_per_step is None and self.windows == 0

    @property
    def impossible(self) -> bool:
        """Whether more was accepted than drafted, beyond what counters of one page run ahead of
        each other.
        """
        return (
            self.drafted is not None
            and self.accepted is not None
            and self.accepted > self.drafted + max(8, self.drafted // 50)
        )

    @property
    def coverage(self) -> float | None:
        """Share of all decode steps that drafted at all; None where it is not known."""
        return min(1.0, self.drafts / self.steps) if self.drafts and self.steps else None

    @property
    def overall(self) -> float | None:
        """Tokens per decode step, steps without a draft included; None where they are not counted."""
        if self.leading is None or not self.steps:
            return None
        return (max(self.steps, self.drafts or 0) + self.leading) / max(
            self.steps, self.drafts or 0
        )

    @property
    def leading(self) -> int | None:
        """Accepted drafts that entered the text."""
        return self.accepted if self.leading_accepted is None else self.leading_accepted

    def to_json(self) -> dict[str, Any]:
        """The object `results.record`."""
        own = {name: getattr(self, name) for name in _IN_JSON}
        own |= {
            "overall_tokens_per_step": self.overall,
            "coverage_estimated": self.coverage is not None and self.steps_estimated,
            "reported_multiplier": self.multiplier,
            "definitions": {name: DEFINITIONS.get(name, name) for name in self.definitions},
        }
        return own | (
            {"per_implementation": self.per_implementation} if self.per_implementation else {}
        )


_IN_JSON = (
    "engine",
    "drafted",
    "accepted",
    "drafts",
    "acceptance_rate",
    "mean_acceptance_length",
    "per_position",
    "num_speculative_tokens",
    "windows",
    "counts",
    "tokens_per_step",
    "coverage",
    "emitted",
    "reported_accept_rate",
    "generation_throughput",
    "partial",
    "estimated",
    "notes",
)
