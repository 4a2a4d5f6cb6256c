"""Engines with one form of their own: drafting that gives up, counts per slot, usage objects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from assay.speculation.parsers.base import Line, Parser, count, counts
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
