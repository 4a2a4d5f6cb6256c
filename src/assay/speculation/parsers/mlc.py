"""MLC's counts per draft slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from assay.speculation.observation import Counts, Definition, Kind, Observation
from assay.speculation.parsers.base import Parser
from assay.speculation.parsers.counts import counts

SLOTS = Definition(
    "mlc_counts",
    "MLC: accept_count[i] / draft_count[i]; entry 0 is the slot that is always accepted",
    depth_unknown=True,
)


class MlcParser(Parser):
    """MLC's counts per draft slot. Slot 0 is the token that the target itself adds, so position i
    is slot i + 1.
    """

    engine = "mlc-llm"

    def document(self, value: Mapping[str, Any]) -> Iterable[Observation]:
        """Counts of every slot."""
        tried, accepted = counts(value.get("draft_count")), counts(value.get("accept_count"))
        if not tried or not accepted or len(tried) != len(accepted):
            return
        if all(a <= n for a, n in zip(accepted, tried, strict=True)):
            yield Observation(
                engine=self.engine,
                kind=Kind.TOTAL,
                definition=SLOTS,
                counts=Counts(
                    at_position=accepted[1:] or None, tried_at_position=tried[1:] or None
                ),
            )
