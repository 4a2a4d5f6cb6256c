"""MLC: counts per draft slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from assay.speculation.parsers.base import Parser, counts
from assay.speculation.record import Kind, Observation


class MlcParser(Parser):
    """Slot 0 is the token that the target itself adds, so draft position i is slot i + 1."""

    engine = "mlc-llm"

    def document(self, value: Mapping[str, Any]) -> Iterable[Observation]:
        """Counts of every slot."""
        tried, accepted = counts(value.get("draft_count")), counts(value.get("accept_count"))
        if not tried or not accepted or len(tried) != len(accepted):
            return ()
        if any(a > n for a, n in zip(accepted, tried, strict=True)):
            return ()
        return (
            Observation(
                engine=self.engine, kind=Kind.TOTAL, definition="mlc_counts",
                accepted_per_position=accepted[1:] or None, drafts_per_position=tried[1:] or None,
            ),
        )  # fmt: skip
