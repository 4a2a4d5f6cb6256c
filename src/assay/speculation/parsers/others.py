"""Engines with one form of their own: llama.cpp, TensorRT-LLM, MLC, FastDeploy, usage objects,
drafting that gives up.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from assay.speculation.parsers import Line, Parser, Sample, count, counts, number, positions_from
from assay.speculation.record import MOST_POSITIONS, Kind, Observation, position_counts


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
                engine=self.engine,
                kind=Kind.REQUEST,
                definition="openai_usage",
                drafted=accepted + rejected,
                accepted=accepted,
                generated=count(value.get("completion_tokens")),
            )


_GAVE_UP = re.compile(
    r"\b(spec-[\w-]+): req \S+ gave up \((.*?)verifies=(\d+) accepted=(\d+)/(\d+)"
)


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
                engine=self.engine,
                kind=Kind.REQUEST,
                definition="guard_request",
                drafts=count(match[3]),
                accepted=count(match[4]),
                drafted=count(match[5]),
                time=line.time,
                note=(
                    "the engine stops drafting by itself after useless drafts; later requests look"
                    " like speculation off"
                ),
            ),
        )


class MlcParser(Parser):
    """MLC's counts per draft slot. Slot 0 is the token that the target itself adds, so position i
    is slot i + 1.
    """

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
    """FastDeploy's `speculate_metrics`: `accepted_tokens` are all tokens of the reply, bonus tokens
    included, and head 0 of `accepted_tokens_per_head` counts the steps.
    """

    engine = "fastdeploy"

    def document(self, value: Mapping[str, Any]) -> Iterable[Observation]:
        """A `speculate_metrics` object."""
        heads, emitted = (
            counts(value.get("accepted_tokens_per_head")),
            count(value.get("accepted_tokens")),
        )
        rejected = count(value.get("rejected_tokens"))
        if not heads or emitted is None or rejected is None or heads[0] > emitted:
            return
        accepted = emitted - heads[0]
        yield Observation(
            engine=self.engine,
            kind=Kind.REQUEST,
            definition="fastdeploy_request",
            drafts=heads[0],
            accepted=accepted,
            drafted=accepted + rejected,
            accepted_per_position=heads[1:] or None,
            generated=emitted,
        )


# TensorRT-LLM.


_AVERAGE = re.compile(
    r"(?:average|avg|mean) accept(?:ance|ed) length[:=]?\s*([\d.]+)(?:\s*/\s*(\d+))?", re.I
)
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
                engine=self.engine,
                kind=Kind.VALUE,
                definition="trtllm_average",
                weight=None,
                time=line.time,
                mean_acceptance_length=number(match[1]),
                num_speculative_tokens=count(match[2]),
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
                definition="trtllm_iteration",
                drafted=drafted,
                accepted=accepted,
                drafts=drafts,
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
                engine=self.engine, kind=Kind.VALUE, definition="trtllm_average", weight=None,
                mean_acceptance_length=length,
            )  # fmt: skip

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
                definition="trtllm_counters",
                drafted=own.get("draft"),
                accepted=own.get("accepted"),
                partial=len(own) < 2,
                stream=where,
                replica=where if len(found) > 1 else None,
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
        definition="trtllm_request",
        drafted=drafted,
        accepted=accepted,
        drafts=drafts,
        accepted_per_position=per_position,
        num_speculative_tokens=depth,
    )


# llama.cpp: request lines, lifetime statistics of each drafting method, timings in replies,
# `/metrics`.


_REQUEST = re.compile(
    r"draft acceptance(?:"
    r" rate)?\s*=\s*(nan|[\d.]+)\s*\(\s*(\d+)\s+accepted\s*/\s*(\d+)\s+generated\s*\)"
)
_LENGTH = re.compile(r"mean (?:acceptance )?len(?:gth)?\s*=\s*([\d.]+)")
_POSITIONS = re.compile(r"(?:acceptance rate per position|#acc rate/pos)\s*=\s*\(([\d.,\s]+)\)")
_EVAL = re.compile(
    r"(?<!prompt )\beval time\s*=\s*([\d.]+)\s*ms\s*/\s*(\d+)\s*(?:tokens|runs).{0,80}?([\d.]+)"
    r" tokens per second"
)
# `#calls(b,g,a) = 6 1690 26`: sequences begun, steps that were asked for a draft, drafts that were
# verified.
_STATISTICS = re.compile(
    r"statistics\s{1,20}([\w-]+):.{0,80}?#calls(?:\(b,g,a\) =\s*\d+| =)\s*(\d+).{0,80}?#gen"
    r" drafts\s*=\s*(\d+),\s*#acc drafts\s*=\s*(\d+),"
    r"\s*#gen tokens\s*=\s*(\d+),\s*#acc tokens\s*=\s*(\d+)"
)
# llama-speculative and llama-lookup print one figure a line.
_CLI = re.compile(r"^\s*(?:\S+ I )?(n_draft|n_predict|n_drafted|n_accept)\s*[=:]\s*(\d+)\s*$")
_NAME = re.compile(
    r"^llamacpp[:_]spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(?:_total)?$"
)


class LlamaCppParser(Parser):
    """A request line counts one request; `statistics` lines count since start and are never added
    to it.
    """

    engine = "llama.cpp"
    also = ("mlx-vlm",)
    needles = ("draft acceptance", "#acc tokens", "n_accept")
    near = ("eval time", "n_predict", "n_draft")

    def __init__(self) -> None:
        self._eval: dict[str, tuple[int | None, float | None]] = {}
        self._cli: dict[str, int | None] = {}

    def line(self, line: Line) -> Iterable[Observation] | None:
        """A request, a total of one method, or the speed on the line before."""
        text = line.text
        timing = _EVAL.search(text)
        if timing:
            self._eval[line.process] = (count(timing[2]), number(timing[3]))
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
            engine=self.engine,
            kind=Kind.REQUEST,
            definition="llamacpp_request",
            replica=line.replica or line.port,
            accepted=count(match[2]),
            drafted=count(match[3]),
            mean_acceptance_length=number(length[1]) if length else None,
            rates_per_position=_rates(positions),
            generated=generated,
            generation_throughput=speed,
            time=line.time,
        )

    def _statistics(self, match: re.Match[str], line: Line) -> Observation:
        calls, drafts, first, drafted, accepted = (count(match[i]) for i in range(2, 7))
        rates = _rates(_POSITIONS.search(line.text))
        positions = None
        # Only part of the positions may be printed for a long draft.
        if rates and drafts and accepted is not None:
            complete = abs(sum(rates) * drafts - accepted) <= len(rates) * (1 + drafts / 1000)
            positions = position_counts(drafts, rates, accepted) if complete else None
        return Observation(
            engine=self.engine,
            kind=Kind.TOTAL,
            definition="llamacpp_total",
            stream=match[1].replace("_", "-"),
            replica=line.replica or line.port,
            drafts=drafts,
            drafted=drafted,
            accepted=accepted,
            steps=calls,
            accepted_first=first,
            accepted_per_position=positions,
            time=line.time,
        )

    def _cli_line(self, text: str) -> Iterable[Observation] | None:
        match = _CLI.match(text)
        if not match:
            return None
        self._cli[match[1]] = count(match[2])
        if match[1] != "n_accept" or "n_drafted" not in self._cli:
            return ()
        found, self._cli = self._cli, {}
        return (
            Observation(
                engine=self.engine,
                kind=Kind.REQUEST,
                definition="llamacpp_request",
                drafted=found["n_drafted"],
                accepted=found["n_accept"],
                generated=found.get("n_predict"),
                num_speculative_tokens=found.get("n_draft"),
            ),
        )

    def document(self, value: Mapping[str, Any]) -> Iterable[Observation]:
        """A `timings` object. mlx-vlm counts the verify steps in it as well (`draft_rounds`)."""
        drafted, rounds = count(value.get("draft_n")), count(value.get("draft_rounds"))
        if drafted is None and "predicted_per_second" in value:
            drafted = 0  # the key is left out where nothing was drafted
        if drafted is not None:
            yield Observation(
                engine=self.engine if rounds is None else "mlx-vlm",
                kind=Kind.REQUEST,
                drafts=rounds,
                drafted=drafted,
                definition="llamacpp_request" if rounds is None else "mlx_request",
                accepted=count(value.get("draft_n_accepted")) or 0,
                generated=count(value.get("predicted_n")),
            )

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
            return
        generated = [
            count(s.value)
            for s in samples
            if re.fullmatch(r"llamacpp[:_]tokens_predicted_total", s.name)
        ]
        complete = len(positions) <= MOST_POSITIONS and sorted(positions) == list(
            range(len(positions))
        )
        yield Observation(
            engine=self.engine,
            kind=Kind.TOTAL,
            definition="llamacpp_counters",
            drafts=found.get("drafts"),
            drafted=found.get("draft_tokens"),
            accepted=found.get("accepted_tokens"),
            accepted_per_position=(
                tuple(positions[i] for i in range(len(positions))) or None if complete else None
            ),
            generated=generated[0] if generated else None,
            partial="draft_tokens" not in found,
        )

    def settle(self, observations: Sequence[Observation]) -> Sequence[Observation]:
        """Let the statistics, which know the drafts, speak where they count the very tokens of the
        requests.

        Methods are asked in turn at every step, so the steps are those of the method that was asked
        most.
        """
        requests: dict[str | None, list[Observation]] = defaultdict(list)
        totals: dict[str | None, dict[str, Observation]] = defaultdict(dict)
        for o in observations:
            if o.definition == "llamacpp_total":
                totals[o.replica][o.stream] = o
            elif o.kind is Kind.REQUEST and o.engine == self.engine:
                requests[o.replica].append(o)
        if not totals:
            return observations
        main = {
            r: max(own.values(), key=lambda o: o.steps or 0).stream for r, own in totals.items()
        }
        same = {
            r
            for r, own in requests.items()
            if r in totals
            and all(_sum(totals[r].values(), n) == _sum(own, n) for n in ("drafted", "accepted"))
        }
        settled = []
        for o in observations:
            if o.definition == "llamacpp_total" and o.stream != main[o.replica]:
                o = replace(o, steps=0)
            elif o.kind is Kind.REQUEST and o.replica in same and len(same) == len(requests):
                o = replace(o, kind=Kind.SUMMARY)
            settled.append(o)
        return settled


def _rates(match: re.Match[str] | None) -> tuple[float, ...] | None:
    values = [number(v) for v in re.findall(r"[\d.]+", match[1])] if match else []
    return tuple(v for v in values if v is not None)[:MOST_POSITIONS] or None


def _sum(observations: Iterable[Observation], name: str) -> int:
    return sum(getattr(o, name) or 0 for o in observations)
