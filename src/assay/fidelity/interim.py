"""Interim analyses: how often a comparison was extended because it stayed undecided."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from assay.errors import AssayError
from assay.fidelity.names import fingerprint
from assay.fidelity.plan import Plan
from assay.fidelity.summary import Summary
from assay.files import read_json
from assay.runs import Kept, cache_path


class InterimAnalyses:
    """The interim analyses of one candidate: on how many of the same windows it stayed undecided.

    A run that is extended until it is decided is judged several times, and each analysis can err:
    it spends a part of the error (alpha spending, `assay.stats.multiplicity`).
    """

    def __init__(self, plan: Plan, spec: str, windows: int) -> None:
        same = (
            plan.path,
            plan.scored,
            str(plan.length),
            *map(fingerprint, (plan.reference, spec, *plan.text)),
        )
        self._kept, self._key = Kept(cache_path("looks")), ["undecided", *same]
        self._windows = windows
        found = self._kept.get(self._key)
        self._undecided: set[int] = set(_counts_of_0_2(same) if found is None else found)

    @property
    def number(self) -> int:
        """Which analysis this one is, from 1."""
        return 1 + sum(count < self._windows for count in self._undecided)

    def record(self, summary: Summary) -> None:
        """Remember that so many windows left the candidate undecided."""
        if summary.judgement.aim is not None:
            self._kept.put(self._key, sorted(self._undecided | {self._windows}))


def _counts_of_0_2(same: Sequence[str]) -> list[int]:
    """What assay 0.2.0 has kept of it; nothing where that file cannot be read."""
    name = f"{sha256(chr(10).join(same).encode()).hexdigest()[:32]}.json"
    try:
        found = read_json(cache_path("looks") / name)
    except AssayError:
        return []
    counts = found if isinstance(found, list) else []
    return [count for count in counts if isinstance(count, int) and not isinstance(count, bool)]
