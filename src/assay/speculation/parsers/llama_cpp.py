"""llama.cpp: request lines, lifetime statistics of each drafting method, timings in replies, `/metrics`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from assay.speculation.parsers.base import Line, Parser, Sample, count
from assay.speculation.record import Kind, Observation, position_counts

_REQUEST = re.compile(
    r"draft acceptance(?: rate)?\s*=\s*(nan|[\d.]+)\s*\(\s*(\d+)\s+accepted\s*/\s*(\d+)\s+generated\s*\)"
)
_LENGTH = re.compile(r"mean (?:acceptance )?len(?:gth)?\s*=\s*([\d.]+)")
_POSITIONS = re.compile(r"(?:acceptance rate per position|#acc rate/pos)\s*=\s*\(([\d.,\s]+)\)")
_EVAL = re.compile(
    r"(?<!prompt )\beval time\s*=\s*([\d.]+)\s*ms\s*/\s*(\d+)\s*(?:tokens|runs).*?([\d.]+) tokens per second"
)
_STATISTICS = re.compile(
    r"statistics\s+([\w-]+):.*?#gen drafts\s*=\s*(\d+),\s*#acc drafts\s*=\s*\d+,\s*"
    r"#gen tokens\s*=\s*(\d+),\s*#acc tokens\s*=\s*(\d+)"
)
# llama-speculative and llama-lookup print one figure a line.
_CLI = re.compile(r"^\s*(?:\S+ I )?(n_draft|n_predict|n_drafted|n_accept)\s*[=:]\s*(\d+)\s*$")
_NAME = re.compile(
    r"^llamacpp[:_]spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(?:_total)?$"
)


class LlamaCppParser(Parser):
    """A request line counts one request; `statistics` lines count since start and are never added to it."""

    engine = "llama.cpp"
    markers = ("draft acceptance", "eval time", "statistics", "n_draft", "n_predict", "n_accept")

    def __init__(self) -> None:
        self._eval: dict[str, tuple[int, float]] = {}
        self._cli: dict[str, int] = {}

    def line(self, line: Line) -> Iterable[Observation]:
        """A request, a total of one method, or the speed on the line before."""
        text = line.text
        timing = _EVAL.search(text)
        if timing:
            self._eval[line.process] = (int(timing[2]), float(timing[3]))
            return ()
        request = _REQUEST.search(text)
        if request:
            return (self._request(request, line),)
        statistics = _STATISTICS.search(text)
        if statistics:
            return (self._statistics(statistics, line),)
        return self._cli_line(text)

    def _request(self, match: re.Match[str], line: Line) -> Observation:
        length, positions = _LENGTH.search(line.text), _POSITIONS.search(line.text)
        generated, speed = self._eval.pop(line.process, (None, None))
        return Observation(
            engine=self.engine, kind=Kind.REQUEST, definition="llamacpp_request",
            accepted=int(match[2]), drafted=int(match[3]),
            mean_acceptance_length=float(length[1]) if length else None,
            rates_per_position=_rates(positions), generated=generated, generation_throughput=speed, time=line.time,
        )  # fmt: skip

    def _statistics(self, match: re.Match[str], line: Line) -> Observation:
        drafts, drafted, accepted = int(match[2]), int(match[3]), int(match[4])
        rates = _rates(_POSITIONS.search(line.text))
        # Only part of the positions may be printed for a long draft.
        complete = rates is not None and abs(sum(rates) * drafts - accepted) <= len(rates) * (
            1 + drafts / 1000
        )
        return Observation(
            engine=self.engine, kind=Kind.TOTAL, definition="llamacpp_total", stream=match[1].replace("_", "-"),
            replica=line.replica, drafts=drafts, drafted=drafted, accepted=accepted,
            accepted_per_position=position_counts(drafts, rates, accepted) if rates and complete else None,
            time=line.time,
        )  # fmt: skip

    def _cli_line(self, text: str) -> Iterable[Observation]:
        match = _CLI.match(text)
        if not match:
            return ()
        self._cli[match[1]] = int(match[2])
        if match[1] != "n_accept" or "n_drafted" not in self._cli:
            return ()
        found, self._cli = self._cli, {}
        return (
            Observation(
                engine=self.engine, kind=Kind.REQUEST, definition="llamacpp_request", drafted=found["n_drafted"],
                accepted=found["n_accept"], generated=found.get("n_predict"),
                num_speculative_tokens=found.get("n_draft"),
            ),
        )  # fmt: skip

    def document(self, value: Mapping[str, Any]) -> Iterable[Observation]:
        """A `timings` object."""
        drafted = count(value.get("draft_n"))
        if drafted is None or "draft_rounds" in value:
            return ()
        return (
            Observation(
                engine=self.engine, kind=Kind.REQUEST, definition="llamacpp_request", drafted=drafted,
                accepted=count(value.get("draft_n_accepted")) or 0, generated=count(value.get("predicted_n")),
            ),
        )  # fmt: skip

    def samples(self, samples: Sequence[Sample]) -> Iterable[Observation]:
        """A total since start."""
        found: dict[str, int] = {}
        positions: dict[int, int] = {}
        for sample in samples:
            match = _NAME.match(sample.name)
            value = count(sample.value)
            if not match or value is None:
                continue
            if match[1] == "accepted_tokens_per_pos":
                positions[count(sample.labels.get("position")) or 0] = value
            else:
                found[match[1]] = value
        if not found:
            return ()
        complete = positions and sorted(positions) == list(range(len(positions)))
        return (
            Observation(
                engine=self.engine, kind=Kind.TOTAL, definition="llamacpp_counters", drafts=found.get("drafts"),
                drafted=found.get("draft_tokens"), accepted=found.get("accepted_tokens"),
                accepted_per_position=tuple(positions[i] for i in range(len(positions))) if complete else None,
                partial="draft_tokens" not in found,
            ),
        )  # fmt: skip

    def settle(self, observations: Sequence[Observation]) -> Sequence[Observation]:
        """Give the requests the drafts that only the statistics count, where both cover the same tokens."""
        requests = [o for o in observations if o.kind is Kind.REQUEST]
        totals = {o.stream: o for o in observations if o.definition == "llamacpp_total"}
        if not requests or not totals:
            return observations
        drafted, accepted = _sum(requests, "drafted"), _sum(requests, "accepted")
        last = list(totals.values())
        same = _sum(last, "drafted") == drafted and _sum(last, "accepted") == accepted
        if not same:
            return observations
        # The whole equals the statistics, so the statistics, which know the drafts, speak for it.
        return [replace(o, kind=Kind.SUMMARY) for o in requests] + [
            o for o in observations if o.kind is not Kind.REQUEST
        ]


def _rates(match: re.Match[str] | None) -> tuple[float, ...] | None:
    if not match:
        return None
    values = tuple(float(v) for v in re.findall(r"[\d.]+", match[1]))
    return values or None


def _sum(observations: Sequence[Observation], name: str) -> int:
    return sum(getattr(o, name) or 0 for o in observations)
