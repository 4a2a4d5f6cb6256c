"""llama.cpp: request lines, lifetime statistics of each drafting method, timings, `/metrics`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from assay.speculation.observation import (
    MOST_POSITIONS,
    Counts,
    Definition,
    Kind,
    Load,
    Observation,
    Printed,
)
from assay.speculation.parsers.base import Line, Parser, Sample, StartUp
from assay.speculation.parsers.counts import count, number
from assay.speculation.rounding import position_counts

REQUEST = Definition(
    "llamacpp_request",
    "llama.cpp counts of one request (the denominator is the number of drafted tokens)",
)
METHOD = Definition(
    "llamacpp_total", "llama.cpp statistics of one drafting method since start", by_method=True
)
SINCE_START = Definition("llamacpp_counters", "llama.cpp counters since start")
MLX_REQUEST = Definition("mlx_request", "mlx-vlm counts of one request; a round is one verify step")


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
    metric_words = ("spec_decode", "tokens_predicted")
    also = ("mlx-vlm",)
    needles = ("draft acceptance", "#acc tokens", "n_accept")
    near = ("eval time", "n_predict", "n_draft")
    heads = ("draft acceptance",)
    metrics = ("llamacpp",)
    reads = r"llamacpp[:_]spec_decode_num_"
    replies = re.compile(r"(?<!prompt )\beval time\s{0,20}=.*")
    start_up = (
        StartUp("version", ("build: ",), re.compile(r"(build: \d+ \(\w+\))", re.I)),
        StartUp(
            "speculation_on",
            ("mtp draft context", "speculative"),
            re.compile(r"(creating MTP draft context|adding speculative implementation '[\w-]+')"),
        ),
        StartUp(
            "sparse_method",
            ("speculative",),
            re.compile(r"(?:implementation|statistics) '?(ngram[\w-]*)", re.I),
        ),
    )

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
            definition=REQUEST,
            replica=line.replica or line.port,
            time=line.time,
            counts=Counts(accepted=count(match[2]), drafted=count(match[3]), generated=generated),
            printed=Printed(
                mean_acceptance_length=number(length[1]) if length else None,
                rates_per_position=_rates(positions),
            ),
            load=Load(generation_throughput=speed),
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
            definition=METHOD,
            stream=match[1].replace("_", "-"),
            replica=line.replica or line.port,
            time=line.time,
            counts=Counts(
                drafts=drafts,
                drafted=drafted,
                accepted=accepted,
                steps=calls,
                accepted_first=first,
                at_position=positions,
            ),
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
                definition=REQUEST,
                num_speculative_tokens=found.get("n_draft"),
                counts=Counts(
                    drafted=found["n_drafted"],
                    accepted=found["n_accept"],
                    generated=found.get("n_predict"),
                ),
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
                definition=REQUEST if rounds is None else MLX_REQUEST,
                counts=Counts(
                    drafts=rounds,
                    drafted=drafted,
                    accepted=count(value.get("draft_n_accepted")) or 0,
                    generated=count(value.get("predicted_n")),
                ),
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
            definition=SINCE_START,
            counts=Counts(
                drafts=found.get("drafts"),
                drafted=found.get("draft_tokens"),
                accepted=found.get("accepted_tokens"),
                at_position=tuple(positions[i] for i in range(len(positions))) or None
                if complete
                else None,
                generated=generated[0] if generated else None,
                partial="draft_tokens" not in found,
            ),
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
            if o.definition == METHOD:
                totals[o.replica][o.stream] = o
            elif o.kind is Kind.REQUEST and o.engine == self.engine:
                requests[o.replica].append(o)
        if not totals:
            return observations
        main = {
            r: max(own.values(), key=lambda o: o.counts.steps or 0).stream
            for r, own in totals.items()
        }
        same = {
            r
            for r, own in requests.items()
            if r in totals
            and all(_sum(totals[r].values(), n) == _sum(own, n) for n in ("drafted", "accepted"))
        }
        settled = []
        for o in observations:
            if o.definition == METHOD and o.stream != main[o.replica]:
                o = replace(o, counts=replace(o.counts, steps=0))
            elif o.kind is Kind.REQUEST and o.replica in same and len(same) == len(requests):
                o = replace(o, kind=Kind.SUMMARY)
            settled.append(o)
        return settled


def _rates(match: re.Match[str] | None) -> tuple[float, ...] | None:
    values = [number(v) for v in re.findall(r"[\d.]+", match[1])] if match else []
    return tuple(v for v in values if v is not None)[:MOST_POSITIONS] or None


def _sum(observations: Iterable[Observation], name: str) -> int:
    return sum(getattr(o.counts, name) or 0 for o in observations)
