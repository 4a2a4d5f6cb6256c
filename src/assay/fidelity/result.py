"""One candidate's result, and the verdict that it means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.fidelity.breakdown.bins import Bin
from assay.fidelity.breakdown.floors import Floors
from assay.fidelity.breakdown.greedy import Greedy
from assay.fidelity.engaged import Engaged
from assay.fidelity.observation import WindowObservation
from assay.fidelity.power import Power
from assay.fidelity.routing import RoutingResult
from assay.fidelity.summary import Summary, per_window
from assay.stats.equivalence import Grade
from assay.verdict import Verdict


@dataclass(frozen=True)
class CandidateResult:
    """One candidate against the reference. `label` is how it is named in tables,
    without folders.
    """

    label: str
    summary: Summary
    engaged: Engaged
    seen: Sequence[WindowObservation]
    self_test: bool
    engine: Mapping[str, Any]
    breakdowns: Mapping[str, Sequence[Bin]]
    worst: Sequence[Mapping[str, Any]]
    floors: Floors
    greedy: Greedy | None = None
    """Where its greedy continuations leave the reference's, if that was asked for."""
    routing: RoutingResult | None = None
    """Which tokens go to other experts, if that was asked for."""
    power: Power | None = None
    """What its first windows said that the run would resolve."""
    certain: bool = False
    """Whether it was ended early, since its verdict was certain."""
    blocks: Sequence[int] | None = None
    """The cluster of each window by its index; None: every window is one."""

    @property
    def floor(self) -> float:
        """The largest of the known floors, in nats."""
        return self.floors.largest

    def to_json(self) -> dict[str, Any]:
        """The object that `assay compare` promises for one candidate."""
        return {
            **self.summary.to_json(),
            "candidate": self.label,
            "engine": dict(self.engine),
            "self_kld": self.floors.self_kld,
            "floors": self.floors.to_json(),
            "engaged": self.engaged.to_json(),
            "self_test": self.self_test,
            "breakdowns": {
                name: [b.to_json() for b in bins] for name, bins in self.breakdowns.items()
            },
            "worst_tokens": list(self.worst),
            "per_window": per_window(self.seen, self.blocks),
            "power": self.power.to_json() if self.power else None,
            **({"greedy": self.greedy.to_json()} if self.greedy else {}),
            **({"routing": self.routing.to_json()} if self.routing else {}),
        }


def verdict_of(result: CandidateResult, allow_marginal: bool) -> Verdict:
    """ACCEPT passes, MARGINAL where it is allowed; a reference against itself passes with any
    number of windows.
    """
    if result.summary.nonfinite:
        return Verdict.FAIL
    grade = result.summary.judgement.grade
    if grade is Grade.ACCEPT or result.self_test or (grade is Grade.MARGINAL and allow_marginal):
        return Verdict.PASS
    if grade is Grade.INCONCLUSIVE and (
        allow_marginal or not result.summary.judgement.accept_excluded
    ):
        return Verdict.INCONCLUSIVE
    return Verdict.FAIL
