"""mlx-vlm: timings with the number of draft rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from assay.speculation.parsers.base import Parser, count
from assay.speculation.record import Kind, Observation


class MlxVlmParser(Parser):
    """llama.cpp's field names plus `draft_rounds`, the verify steps."""

    engine = "mlx-vlm"

    def document(self, value: Mapping[str, Any]) -> Iterable[Observation]:
        """A `timings` object with rounds."""
        drafts, drafted = count(value.get("draft_rounds")), count(value.get("draft_n"))
        if drafts is None or drafted is None:
            return ()
        return (
            Observation(
                engine=self.engine, kind=Kind.REQUEST, definition="mlx_request", drafts=drafts, drafted=drafted,
                accepted=count(value.get("draft_n_accepted")) or 0, generated=count(value.get("predicted_n")),
            ),
        )  # fmt: skip
