"""The usage object of the OpenAI API, which counts predicted tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from assay.speculation.parsers.base import Parser, count
from assay.speculation.record import Kind, Observation


class OpenAIUsageParser(Parser):
    """`completion_tokens_details` with accepted and rejected prediction tokens (both 0 means no speculation)."""

    engine = "openai-compatible"

    def document(self, value: Mapping[str, Any]) -> Iterable[Observation]:
        """A `usage` object."""
        details = value.get("completion_tokens_details")
        if not isinstance(details, Mapping):
            return ()
        accepted = count(details.get("accepted_prediction_tokens"))
        rejected = count(details.get("rejected_prediction_tokens"))
        if accepted is None or rejected is None or accepted + rejected == 0:
            return ()
        return (
            Observation(
                engine=self.engine, kind=Kind.REQUEST, definition="openai_usage", drafted=accepted + rejected,
                accepted=accepted, generated=count(value.get("completion_tokens")),
            ),
        )  # fmt: skip
