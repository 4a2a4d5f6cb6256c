"""The usage object of the OpenAI API, which counts predicted tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from assay.speculation.parsers.base import Line, Parser, count, counts, number
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


# -----------------------------------------------------------------------------
# The line that guides of the field quote: `Spec decode metrics: draft_acceptance_rate=…, system_efficiency=…`.
#
# No engine of today prints it, but scripts and dashboards do. Keys may come in any order.

_HEAD = re.compile(r"spec(?:ulative)?[ _-]?decod(?:e|ing)[ _-]metrics\b:?(.*)", re.I)
_PAIR = re.compile(r"\b([a-z_]+)\s*=\s*(nan|[\d.]+)\s*(%?)", re.I)
_RATE = ("draft_acceptance_rate", "acceptance_rate", "accept_rate", "avg_draft_acceptance_rate")
_LENGTH = ("mean_acceptance_length", "acceptance_length", "accept_length", "tokens_per_step")
_MULTIPLIER = ("system_efficiency", "net_multiplier", "speedup")


class QuotedRatesParser(Parser):
    """Printed rates, with counts where the line has them."""

    engine = "vllm"
    markers = ("rate=", "rate =", "length=", "efficiency=", "efficiency =", "tokens=")

    def line(self, line: Line) -> Iterable[Observation]:
        """Key-value pairs in any order."""
        head = _HEAD.search(line.text)
        if not head:
            return ()
        found: dict[str, float] = {}
        for name, text, percent in _PAIR.findall(head[1]):
            value = number(text)
            if value is not None:
                found[name.lower()] = value / 100 if percent else value
        rate, length = _first(found, _RATE), _first(found, _LENGTH)
        multiplier = _first(found, _MULTIPLIER)
        drafted = count(_first(found, ("num_draft_tokens", "draft_tokens", "drafted")))
        accepted = count(_first(found, ("num_accepted_tokens", "accepted_tokens", "accepted")))
        if rate is None and length is None and multiplier is None and drafted is None:
            return ()
        counted = drafted is not None and accepted is not None
        return (
            Observation(
                engine=self.engine, kind=Kind.WINDOW if counted else Kind.VALUE, definition="quoted_rates",
                drafted=drafted if counted else None, accepted=accepted if counted else None, acceptance_rate=rate,
                mean_acceptance_length=length, multiplier=multiplier, time=line.time, replica=line.replica,
                num_speculative_tokens=count(_first(found, ("num_spec_tokens", "num_speculative_tokens"))),
            ),
        )  # fmt: skip


def _first(found: dict[str, float], names: tuple[str, ...]) -> float | None:
    return next((found[name] for name in names if name in found), None)


# -----------------------------------------------------------------------------
# Engines that give up drafting for a request by themselves, and say so.

_GAVE_UP = re.compile(r"\b(spec-[\w-]+): req \S+ gave up \((.*?)verifies=(\d+) accepted=(\d+)/(\d+)")


class GuardParser(Parser):
    """`spec-ngram: req N gave up (…: verifies=8 accepted=0/8 …)`."""

    engine = "imp"
    markers = ("gave up",)

    def line(self, line: Line) -> Iterable[Observation]:
        """A request that gave up drafting."""
        match = _GAVE_UP.search(line.text)
        if not match:
            return ()
        return (
            Observation(
                engine=self.engine, kind=Kind.REQUEST, definition="guard_request", drafts=int(match[3]),
                accepted=int(match[4]), drafted=int(match[5]), time=line.time,
                note="the engine stops drafting by itself after useless drafts; later requests look like speculation off",
            ),
        )  # fmt: skip


# -----------------------------------------------------------------------------
# MLC: counts per draft slot.


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


# -----------------------------------------------------------------------------
# mlx-vlm: timings with the number of draft rounds.


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
