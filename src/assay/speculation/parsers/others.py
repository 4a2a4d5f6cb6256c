"""Engines with one form of their own: drafting that gives up, counts per slot, usage objects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from assay.speculation.parsers.base import Line, Parser, Sample, count, counts, number, positions_from
from assay.speculation.record import Kind, Observation


class OpenAIUsageParser(Parser):
    """`completion_tokens_details` with accepted and rejected prediction tokens."""

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
                engine=self.engine, kind=Kind.REQUEST, definition="openai_usage", drafted=accepted + rejected,
                accepted=accepted, generated=count(value.get("completion_tokens")),
            )  # fmt: skip


_GAVE_UP = re.compile(r"\b(spec-[\w-]+): req \S+ gave up \((.*?)verifies=(\d+) accepted=(\d+)/(\d+)")


class GuardParser(Parser):
    """An engine that stops drafting: `spec-ngram: req N gave up (…: verifies=8 accepted=0/8 …)`."""

    engine = "imp"
    needles = ("accepted=",)
    company = ("gave up",)

    def line(self, line: Line) -> Iterable[Observation] | None:
        """A request that gave up drafting."""
        match = _GAVE_UP.search(line.text)
        if not match:
            return None
        return (
            Observation(
                engine=self.engine, kind=Kind.REQUEST, definition="guard_request", drafts=count(match[3]),
                accepted=count(match[4]), drafted=count(match[5]), time=line.time,
                note="the engine stops drafting by itself after useless drafts; later requests look like speculation off",
            ),
        )  # fmt: skip


class MlcParser(Parser):
    """MLC's counts per draft slot. Slot 0 is the token that the target itself adds, so position i is slot i + 1."""

    engine = "mlc-llm"

    def document(self, value: Mapping[str, Any]) -> Iterable[Observation]:
        """Counts of every slot."""
        tried, accepted = counts(value.get("draft_count")), counts(value.get("accept_count"))
        if not tried or not accepted or len(tried) != len(accepted):
            return
        if all(a <= n for a, n in zip(accepted, tried, strict=True)):
            yield Observation(
                engine=self.engine, kind=Kind.TOTAL, definition="mlc_counts",
                accepted_per_position=accepted[1:] or None, drafts_per_position=tried[1:] or None,
            )  # fmt: skip


class FastDeployParser(Parser):
    """FastDeploy's `speculate_metrics`: `accepted_tokens` are all tokens of the reply, bonus tokens included, and head 0
    of `accepted_tokens_per_head` counts the steps.
    """

    engine = "fastdeploy"

    def document(self, value: Mapping[str, Any]) -> Iterable[Observation]:
        """A `speculate_metrics` object."""
        heads, emitted = counts(value.get("accepted_tokens_per_head")), count(value.get("accepted_tokens"))
        rejected = count(value.get("rejected_tokens"))
        if not heads or emitted is None or rejected is None or heads[0] > emitted:
            return
        accepted = emitted - heads[0]
        yield Observation(
            engine=self.engine, kind=Kind.REQUEST, definition="fastdeploy_request", drafts=heads[0], accepted=accepted,
            drafted=accepted + rejected, accepted_per_position=heads[1:] or None, generated=emitted,
        )  # fmt: skip


# -----------------------------------------------------------------------------
# TensorRT-LLM.


_AVERAGE = re.compile(r"(?:average|avg|mean) accept(?:ance|ed) length[:=]?\s*([\d.]+)(?:\s*/\s*(\d+))?", re.I)
_TOTAL = re.compile(r"^trtllm[:_]spec_decode_num_(draft|accepted)_tokens(?:_total)?$")


class TensorRTParser(Parser):
    """One JSON object an iteration: every request with draft tokens is one draft."""

    engine = "tensorrt-llm"
    needles = ("acceptance length", "accepted length")
    company = (" / ",)

    def line(self, line: Line) -> Iterable[Observation] | None:
        """A printed average."""
        match = _AVERAGE.search(line.text)
        # vLLM's offline example prints "Mean acceptance length:" too, without the draft length.
        if not match or match[2] is None:
            return None
        return (
            Observation(
                engine=self.engine, kind=Kind.VALUE, definition="trtllm_average", weight=None, time=line.time,
                mean_acceptance_length=number(match[1]), num_speculative_tokens=count(match[2]),
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
        yield from _request(value)
        # A choice without the block above; a server that does not speculate prints 1.0 here.
        length = number(value.get("avg_decoded_tokens_per_iter"))
        if length is not None and length > 1 and not isinstance(value.get("speculative_decoding"), Mapping):
            yield Observation(
                engine=self.engine, kind=Kind.VALUE, definition="trtllm_average", weight=None,
                mean_acceptance_length=length,
            )  # fmt: skip

    def samples(self, samples: Sequence[Sample]) -> Iterable[Observation]:
        """Totals since start, one for each server on the page. The page does not count drafts (verify steps)."""
        found: dict[str, dict[str, int]] = {}
        for sample in samples:
            match, value = _TOTAL.match(sample.name), count(sample.value)
            if match and value is not None:
                where = "/".join(sample.labels.get(n, "") for n in ("instance", "engine_type", "model_name"))
                found.setdefault(where, {})[match[1]] = value
        for where, own in found.items():
            yield Observation(
                engine=self.engine, kind=Kind.TOTAL, definition="trtllm_counters", drafted=own.get("draft"),
                accepted=own.get("accepted"), partial=len(own) < 2, stream=where,
                replica=where if len(found) > 1 else None,
            )  # fmt: skip


def _request(value: Mapping[str, Any]) -> Iterable[Observation]:
    """The block `speculative_decoding` of a response or of `/perf_metrics`; newer servers add a histogram to it."""
    drafted = count(value.get("total_draft_tokens"))
    accepted = count(value.get("total_accepted_draft_tokens"))
    if drafted is None or accepted is None:
        return
    drafts, depth = count(value.get("num_spec_steps")), count(value.get("num_spec_tokens"))
    steps = counts(value.get("acceptance_histogram"))
    per_position = positions_from(steps, depth) if steps and drafts == sum(steps) else None
    yield Observation(
        engine=TensorRTParser.engine, kind=Kind.REQUEST, definition="trtllm_request", drafted=drafted,
        accepted=accepted, drafts=drafts, accepted_per_position=per_position, num_speculative_tokens=depth,
    )  # fmt: skip
