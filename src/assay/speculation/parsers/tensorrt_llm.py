"""TensorRT-LLM: iteration statistics, counters, blocks of responses, printed averages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from assay.speculation.observation import Counts, Definition, Kind, Observation, Printed
from assay.speculation.parsers.base import Line, Parser, Sample
from assay.speculation.parsers.counts import count, counts, number, positions_from

ITERATION = Definition(
    "trtllm_iteration", "TensorRT-LLM counts of one iteration; one draft a request"
)
SINCE_START = Definition(
    "trtllm_counters", "TensorRT-LLM counters since start; verify steps are not counted"
)
REQUEST = Definition("trtllm_request", "TensorRT-LLM counts of one request")
AVERAGE = Definition(
    "trtllm_average", "TensorRT-LLM average acceptance length, printed without a weight"
)


# TensorRT-LLM.


_AVERAGE = re.compile(
    r"(?:average|avg|mean) accept(?:ance|ed) length[:=]?\s*([\d.]+)(?:\s*/\s*(\d+))?", re.I
)

_TOTAL = re.compile(r"^trtllm[:_]spec_decode_num_(draft|accepted)_tokens(?:_total)?$")


class TensorRTParser(Parser):
    """One JSON object an iteration: every request with draft tokens is one draft."""

    engine = "tensorrt-llm"
    metric_words = ("spec_decode",)
    needles = ("acceptance length", "accepted length")
    company = (" / ",)
    metrics = ("trtllm",)
    reads = r"trtllm[:_]"

    def line(self, line: Line) -> Iterable[Observation] | None:
        """A printed average."""
        match = _AVERAGE.search(line.text)
        # vLLM's offline example prints "Mean acceptance length:" too, without the draft length.
        if not match or match[2] is None:
            return None
        return (
            Observation(
                engine=self.engine,
                kind=Kind.VALUE,
                definition=AVERAGE,
                time=line.time,
                num_speculative_tokens=count(match[2]),
                printed=Printed(weight=None, mean_acceptance_length=number(match[1])),
            ),
        )

    def document(self, value: Mapping[str, Any]) -> Iterable[Observation]:
        """Statistics of an iteration or a request."""
        drafted = count(value.get("numDraftTokens", value.get("num_draft_tokens")))
        accepted = count(value.get("numAcceptedTokens", value.get("num_accepted_tokens")))
        drafts = count(
            value.get("numRequestsWithDraftTokens", value.get("num_requests_with_draft_tokens"))
        )
        if drafted is not None and drafts is not None:
            yield Observation(
                engine=self.engine,
                kind=Kind.WINDOW,
                definition=ITERATION,
                counts=Counts(drafted=drafted, accepted=accepted, drafts=drafts),
            )
        yield from _request(value)
        # A choice without the block above; a server that does not speculate prints 1.0 here.
        length = number(value.get("avg_decoded_tokens_per_iter"))
        if (
            length is not None
            and length > 1
            and not isinstance(value.get("speculative_decoding"), Mapping)
        ):
            yield Observation(
                engine=self.engine,
                kind=Kind.VALUE,
                definition=AVERAGE,
                printed=Printed(weight=None, mean_acceptance_length=length),
            )

    def samples(self, samples: Sequence[Sample]) -> Iterable[Observation]:
        """Totals since start, one for each server on the page. The page does not count drafts
        (verify steps).
        """
        found: dict[str, dict[str, int]] = {}
        for sample in samples:
            match, value = _TOTAL.match(sample.name), count(sample.value)
            if match and value is not None:
                where = "/".join(
                    sample.labels.get(n, "") for n in ("instance", "engine_type", "model_name")
                )
                found.setdefault(where, {})[match[1]] = value
        for where, own in found.items():
            yield Observation(
                engine=self.engine,
                kind=Kind.TOTAL,
                definition=SINCE_START,
                stream=where,
                replica=where if len(found) > 1 else None,
                counts=Counts(
                    drafted=own.get("draft"), accepted=own.get("accepted"), partial=len(own) < 2
                ),
            )


def _request(value: Mapping[str, Any]) -> Iterable[Observation]:
    """The block `speculative_decoding` of a response or of `/perf_metrics`; newer servers add a
    histogram to it.
    """
    drafted = count(value.get("total_draft_tokens"))
    accepted = count(value.get("total_accepted_draft_tokens"))
    if drafted is None or accepted is None:
        return
    drafts, depth = count(value.get("num_spec_steps")), count(value.get("num_spec_tokens"))
    steps = counts(value.get("acceptance_histogram"))
    per_position = positions_from(steps, depth) if steps and drafts == sum(steps) else None
    yield Observation(
        engine=TensorRTParser.engine,
        kind=Kind.REQUEST,
        definition=REQUEST,
        num_speculative_tokens=depth,
        counts=Counts(drafted=drafted, accepted=accepted, drafts=drafts, at_position=per_position),
    )
