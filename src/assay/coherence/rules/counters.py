"""Did the server itself count corrupted answers?"""

from __future__ import annotations

from collections.abc import Sequence

from assay.coherence.record import CheckRecord
from assay.coherence.rules.ruling import Ruling
from assay.verdict import Finding, Severity


def counters(record: CheckRecord) -> Sequence[Ruling]:
    """A counter of corrupted requests that moved during the run."""
    moved = {name: value for name, value in record.counters.items() if value > 0}
    if not moved:
        return ()
    text = ", ".join(f"{name} +{value:g}" for name, value in sorted(moved.items()))
    finding = Finding(
        id="coherence.corrupted_requests",
        severity=Severity.ERROR,
        title=f"the server itself counted corrupted answers during the run: {text}",
        evidence={"counters": moved},
        causes=("NaN in the logits: overflow in float16, a corrupt shard, a faulty kernel",),
    )
    return (Ruling("server_counters", "bad", text, (finding,)),)
