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
from assay.verdict import Finding


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
