"""The limits of a contract, each judged on the interval of its figure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from assay.gates.figures import Figure, short
from assay.stats import Interval
from assay.verdict import Verdict

# A limit of a contract, judged on the interval of its figure.

BOUNDED = {
    "min_tokens_per_s": ("decode_tokens_per_s", "throughput.below_contract"),
    "max_ttft_s": ("ttft_s", "throughput.below_contract"),
    "min_schema_valid": ("schema_valid", "coherence.below_contract"),
    "min_right": ("right", "coherence.below_contract"),
    "min_acceptance": ("acceptance", "speculation.below_contract"),
}
"""The figure that a limit bounds, and the finding of one that does not hold."""
SHARES = ("min_schema_valid", "min_right", "min_acceptance")
"""Limits that a contract gives as a share, and a report shows in per cent."""


@dataclass(frozen=True)
class Ruled:
    """A limit and what became of it: pass, fail, or inconclusive where its figure is unknown or its
    interval holds the limit.
    """

    name: str
    limit: float
    figure: Figure | None
    verdict: Verdict
    finding_id: str

    @property
    def title(self) -> str:
        """`coherent tokens a second ≥ 30`."""
        figure = self.figure
        unit = figure.unit if figure else "%" if self.name in SHARES else ""
        shown = short(self.limit) + (f" {unit}" if unit else "")
        return (
            f"{figure.title if figure else self.name}"
            f" {'≥' if self.name.startswith('min_') else '≤'} {shown}"
        )

    def to_json(self) -> dict[str, Any]:
        """One of `limits` of a part."""
        figure = self.figure.to_json() if self.figure else None
        return {
            "name": self.name,
            "limit": self.limit,
            "verdict": self.verdict.value,
            "figure": figure,
        }


def rule(name: str, limit: float, measured: Iterable[Figure]) -> Ruled:
    """Judge a limit: it holds, or does not, only where the whole interval says so."""
    key, finding_id = BOUNDED[name]
    figure = next((f for f in measured if f.key == key), None)
    scaled = 100 * limit if name in SHARES else limit
    return Ruled(
        name, scaled, figure, _verdict(figure, scaled, name.startswith("min_")), finding_id
    )


def _verdict(figure: Figure | None, limit: float, least: bool) -> Verdict:
    if figure is None or figure.lo is None or figure.hi is None:
        return Verdict.INCONCLUSIVE
    interval = Interval(figure.value, figure.lo, figure.hi)
    lo, hi = (limit, math.inf) if least else (-math.inf, limit)
    if interval.within(lo, hi):
        return Verdict.PASS
    return Verdict.FAIL if interval.outside(lo, hi) else Verdict.INCONCLUSIVE
