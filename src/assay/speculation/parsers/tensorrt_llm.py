"""TensorRT-LLM: iteration statistics, per-request statistics, and the printed average acceptance length."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from assay.speculation.parsers.base import Line, Parser, count, number
from assay.speculation.record import Kind, Observation

_AVERAGE = re.compile(r"(?:average|avg|mean) accept(?:ance|ed) length[:=]?\s*([\d.]+)(?:\s*/\s*(\d+))?", re.I)


class TensorRTParser(Parser):
    """One JSON object an iteration: every request with draft tokens is one draft."""

    engine = "tensorrt-llm"
    markers = (" / ",)

    def line(self, line: Line) -> Iterable[Observation]:
        """A printed average."""
        match = _AVERAGE.search(line.text)
        # vLLM's offline example prints "Mean acceptance length:" too, without the draft length.
        if not match or match[2] is None:
            return ()
        return (
            Observation(
                engine=self.engine, kind=Kind.VALUE, definition="trtllm_average", weight=None, time=line.time,
                mean_acceptance_length=number(match[1]), num_speculative_tokens=int(match[2]),
            ),
        )  # fmt: skip

    def document(self, value: Mapping[str, Any]) -> Iterable[Observation]:
        """Statistics of an iteration or a request."""
        drafted = count(value.get("numDraftTokens", value.get("num_draft_tokens")))
        accepted = count(value.get("numAcceptedTokens", value.get("num_accepted_tokens")))
        drafts = count(value.get("numRequestsWithDraftTokens", value.get("num_requests_with_draft_tokens")))
        if drafted is not None and drafts is not None:
            yield Observation(
                engine=self.engine, kind=Kind.WINDOW, definition="trtllm_iteration", drafted=drafted,
                accepted=accepted, drafts=drafts,
            )  # fmt: skip
        speculative = value.get("speculative_decoding")
        if isinstance(speculative, Mapping) and "total_draft_tokens" in speculative:
            yield Observation(
                engine=self.engine, kind=Kind.REQUEST, definition="trtllm_request",
                drafted=count(speculative.get("total_draft_tokens")),
                accepted=count(speculative.get("total_accepted_draft_tokens")),
            )  # fmt: skip
