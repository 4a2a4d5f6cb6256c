"""What a whole source adds up to, in NVIDIA AIPerf's names where they fit.

Rates are fractions. Lengths count the bonus token, so a step that accepted nothing has length 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from assay.speculation.observation import NO_COUNTS, NOT_PRINTED, Counts, Definition, Printed


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a source adds up to. Unknown values are None.

    `counts` are sums; their `steps` are all decode steps, also those without a draft. `counted`
    tells whether anything was counted at all. `positions[i]` is (accepted, drafts) of draft
    position i. `tokens_per_step` is the mean acceptance length, or what can be derived in its place
    (from the generated tokens of the replies). `windows` counts observations with drafts. `methods`
    holds the counts since start of each drafting method that prints its own. `sources` quote the
    words from which figures without a form of their own were read.
    """

    engine: str | None = None
    counts: Counts = NO_COUNTS
    counted: bool = False
    positions: tuple[tuple[int, int], ...] | None = None
    acceptance_rate: float | None = None
    mean_acceptance_length: float | None = None
    tokens_per_step: float | None = None
    per_position: tuple[float, ...] | None = None
    num_speculative_tokens: int | None = None
    printed: Printed = NOT_PRINTED
    generation_throughput: float | None = None
    windows: int = 0
    definitions: tuple[Definition, ...] = ()
    notes: tuple[str, ...] = ()
    methods: Mapping[str, Counts] = field(default_factory=dict)
    sources: tuple[str, ...] = ()

    @property
    def nothing_drafted(self) -> bool:
        """Whether the source shows that no token was drafted."""
        if self.counted:
            return not self.counts.drafted and not self.counts.drafts and self.positions is None
        return self.acceptance_rate is None and self.tokens_per_step is None and self.windows == 0

    @property
    def impossible(self) -> bool:
        """Whether more was accepted than drafted, beyond what counters of one page run ahead of
        each other.
        """
        drafted, accepted = self.counts.drafted, self.counts.accepted
        return (
            drafted is not None
            and accepted is not None
            and accepted > drafted + max(8, drafted // 50)
        )

    @property
    def steps_estimated(self) -> bool:
        """Whether the number of steps comes from a printed speed."""
        return any(d.steps_estimated for d in self.definitions)

    @property
    def first(self) -> tuple[int, int] | None:
        """(accepted, drafts) of position 0; None where it is not counted."""
        if self.positions:
            return self.positions[0]
        if self.counts.accepted_first is None or not self.counts.drafts:
            return None
        return self.counts.accepted_first, self.counts.drafts

    @property
    def coverage(self) -> float | None:
        """Share of all decode steps that drafted at all; None where it is not known."""
        drafts, steps = self.counts.drafts, self.counts.steps
        return min(1.0, drafts / steps) if drafts and steps else None

    @property
    def overall(self) -> float | None:
        """Tokens per decode step, steps without a draft included; None where they are not
        counted.
        """
        if self.leading is None or not self.counts.steps:
            return None
        steps = max(self.counts.steps, self.counts.drafts or 0)
        return (steps + self.leading) / steps

    @property
    def leading(self) -> int | None:
        """Accepted drafts that entered the text."""
        emitted, drafts = self.counts.emitted, self.counts.drafts
        return emitted - drafts if emitted is not None and drafts else self.counts.accepted

    def to_json(self) -> dict[str, Any]:
        """The object `results.record`."""
        own: dict[str, Any] = {
            "engine": self.engine,
            "drafted": self.counts.drafted,
            "accepted": self.counts.accepted,
            "drafts": self.counts.drafts,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "per_position": self.per_position,
            "num_speculative_tokens": self.num_speculative_tokens,
            "windows": self.windows,
            "counts": self.counted,
            "tokens_per_step": self.tokens_per_step,
            "coverage": self.coverage,
            "emitted": self.counts.emitted,
            "reported_accept_rate": self.printed.reported_rate,
            "generation_throughput": self.generation_throughput,
            "partial": self.counts.partial,
            "estimated": self.counts.estimated,
            "notes": self.notes,
            "overall_tokens_per_step": self.overall,
            "coverage_estimated": self.coverage is not None and self.steps_estimated,
            "reported_multiplier": self.printed.multiplier,
            "definitions": {d.id: d.text for d in self.definitions},
        }
        if self.methods:
            own["per_implementation"] = {
                name: {"accepted": c.accepted, "drafted": c.drafted, "drafts": c.drafts}
                for name, c in self.methods.items()
            }
        if self.sources:
            own["read_from"] = list(self.sources)
        return own
