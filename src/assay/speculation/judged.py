"""All that the findings are made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from assay.speculation.baseline import Comparison
from assay.speculation.benefit import Benefit
from assay.speculation.clues import Clue
from assay.speculation.combine import Evidence
from assay.speculation.health import Assessment, Health
from assay.speculation.record import Record
from assay.verdict import Finding, Verdict


@dataclass(frozen=True)
class Judged:
    """All that the findings are made from: `unread` lines with their number, `asked` speculative
    tokens.
    """

    evidence: Evidence
    assessment: Assessment
    clues: Sequence[Clue] = ()
    benefit: Benefit | None = None
    comparison: Comparison | None = None
    checkpoint: Sequence[Finding] = ()
    unread: Sequence[tuple[str, int]] = ()
    asked: int | None = None
    temperature: float | None = None

    @property
    def record(self) -> Record:
        """The record of the whole source."""
        return self.evidence.record

    @property
    def earns(self) -> bool:
        """Whether speculation is worth keeping although few drafts are accepted."""
        a, b = self.assessment, self.benefit
        hidden = a.dead_engines or a.all_or_nothing or a.collapse is not None
        if b is None or not b.earns or hidden:
            return False
        measured = b.measured_multiplier is not None
        return a.health is Health.DEGRADED or (a.health is Health.INSUFFICIENT and measured)

    @property
    def verdict(self) -> Verdict:
        """What the user should do: keep it (pass), repair it or switch it off (fail),
        look again.
        """
        health = self.assessment.health
        if self.earns:
            return Verdict.PASS
        if health.bad or (self.assessment.judged and self.benefit and self.benefit.loses):
            return Verdict.FAIL
        return Verdict.PASS if health is Health.HEALTHY else Verdict.INCONCLUSIVE

    @property
    def advice(self) -> str | None:
        """What to do, in one line; None where nothing can be said."""
        a = self.assessment
        if a.health is Health.BROKEN:
            return "disable speculation until the head is repaired"
        if a.health is Health.DEGRADED and a.dead_engines:
            return f"repair {', '.join(a.dead_engines)} first; the other engines are worth keeping"
        if a.health is Health.DEGRADED and a.collapse is not None:
            return "find out what happened at the collapse first; until then disable speculation"
        return None if self.benefit is None or not a.judged else self.benefit.advice
