"""OpenAI's `usage` object with accepted and rejected prediction tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from assay.speculation.observation import Counts, Definition, Kind, Observation
from assay.speculation.parsers.base import Parser
from assay.speculation.parsers.counts import count

USAGE = Definition(
    "openai_usage",
    "OpenAI usage: accepted and rejected prediction tokens of one request",
    repeats=True,
)


class OpenAIUsageParser(Parser):
    """`completion_tokens_details` with accepted and rejected prediction tokens."""

    fallback = 3
    engine = "openai-compatible"

    def document(self, value: Mapping[str, Any]) -> Iterable[Observation]:
        """A `usage` object."""
        details = value.get("completion_tokens_details")
        if not isinstance(details, Mapping):
            return
        accepted = count(details.get("accepted_prediction_tokens"))
        rejected = count(details.get("rejected_prediction_tokens"))
        if accepted is not None and rejected is not None:
            yield Observation(
                engine=self.engine,
                kind=Kind.REQUEST,
                definition=USAGE,
                counts=Counts(
                    drafted=accepted + rejected,
                    accepted=accepted,
                    generated=count(value.get("completion_tokens")),
                ),
            )
