"""Text Generation Inference: the histogram of tokens that speculation let it skip."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from assay.speculation.observation import Counts, Definition, Kind, Observation
from assay.speculation.parsers.base import Parser, Sample
from assay.speculation.parsers.counts import count

SKIPPED = Definition(
    "tgi_skipped",
    "TGI since start: a decode step skips its accepted drafts; drafted is not counted",
)
_NAME = "tgi_request_skipped_tokens"


class TgiParser(Parser):
    """`tgi_request_skipped_tokens`: each step adds the number of drafts that it accepted."""

    engine = "tgi"
    metric_words = ("skipped_tokens",)
    reads = r"tgi_"

    def samples(self, samples: Sequence[Sample]) -> Iterable[Observation]:
        """Totals since start; a histogram without any skipped token is a server that drafts
        nothing, or nothing right.
        """
        own = {s.name: count(s.value) for s in samples if s.name.startswith(_NAME)}
        steps, skipped = own.get(f"{_NAME}_count"), own.get(f"{_NAME}_sum")
        if not steps or not skipped:
            return ()
        below = {
            count(s.labels["le"]): count(s.value)
            for s in samples
            if s.name == f"{_NAME}_bucket" and s.labels.get("le", "+Inf") != "+Inf"
        }
        depth = max((le for le in below if le is not None), default=0)
        at = [steps - (below.get(i) or 0) for i in range(depth)]
        whole = bool(at) and set(range(depth)) <= below.keys() and sum(at) == skipped
        return (
            Observation(
                engine=self.engine,
                kind=Kind.TOTAL,
                definition=SKIPPED,
                num_speculative_tokens=depth if whole else None,
                counts=Counts(
                    drafts=steps, accepted=skipped, at_position=tuple(at) if whole else None
                ),
            ),
        )
