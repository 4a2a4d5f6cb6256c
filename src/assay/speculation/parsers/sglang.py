"""SGLang: decode-batch lines, gauges, `meta_info` in responses and Finish lines, the average of
`/get_server_info`.

Lines print the accept length over the last interval, and up to about January 2026 an accept rate
that meant length / draft tokens (0.25 with nothing accepted); later it means accepted / proposed
drafts. The length is trusted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from assay.speculation.observation import Counts, Definition, Kind, Load, Observation, Printed
from assay.speculation.parsers.base import Line, Parser, Sample, StartUp
from assay.speculation.parsers.counts import count, counts, from_histogram, number

ACCEPT_LEN = Definition(
    "sglang_accept_len", "SGLang: accept len = tokens per verify step, bonus token included"
)
GAUGES = Definition("sglang_gauges", "SGLang gauges: the last interval only")
REQUEST = Definition("sglang_request", "SGLang counts of one request")
AVERAGE = Definition(
    "sglang_average", "SGLang average length since start, printed without a weight"
)


_BATCH = re.compile(r"Decode batch\b")
_LENGTH = re.compile(r"\baccept len:\s*(nan|[\d.]+)")
_RATE = re.compile(r"\baccept rate:\s*(nan|[\d.]+)")
_RUNNING = re.compile(r"#running-req:\s*(\d+)")
_TOKENS = re.compile(r"#(?:full )?token:\s*(\d+)")
_SPEED = re.compile(r"gen throughput \(token/s\):\s*([\d.]+)")
_RANK = re.compile(r"\bDP(\d+)\b")
_STEPS = re.compile(r"speculative_num_steps=(\d+)")
_INTERVAL = re.compile(r"decode_log_interval=(\d+)")
_META = re.compile(r"['\"]?\b((?:avg_)?spec_\w+|completion_tokens)['\"]?\s*[:=]\s*(\d+(?:\.\d+)?)")
_META_LIST = re.compile(r"['\"]?\b(spec_\w+histogram)['\"]?\s*[:=]\s*\[([\d,\s]+)\]")

DEFAULT_STEPS = 3
"""Draft steps that SGLang chooses for MTP heads unless told otherwise."""
DEFAULT_INTERVAL = 40
"""Decode steps between two log lines."""


class SglangParser(Parser):
    """Printed values; counts only where they are certain (nothing accepted at all)."""

    engine = "sglang"
    metric_words = ("spec_",)
    needles = (
        "accept len",
        "accept rate",
        "spec_accept",
        "spec_verify_ct",
        "speculative_num_steps=",
    )

    heads = ("Decode batch",)
    metrics = ("sglang",)
    reads = r"sglang[:_]"
    replies = re.compile(r"Decode batch.{0,400}gen throughput.*")
    start_up = (
        StartUp("version", ("version",), re.compile(r"(sglang[ _]version[=:]\s*\S+)", re.I)),
        StartUp(
            "weights_missing",
            ("weights missing", "weight missing"),
            re.compile(r"(?:MTP|nextn|speculative) (?:layer \S+ )?weights? missing", re.I),
        ),
        StartUp("speculation_on", ("speculative",), re.compile(r"(speculative_algorithm='[^']+')")),
        StartUp("speculation_off", ("speculative",), re.compile(r"(speculative_algorithm=None)")),
    )

    def __init__(self) -> None:
        self._steps: int | None = None
        self._interval = DEFAULT_INTERVAL

    def line(self, line: Line) -> Iterable[Observation] | None:
        """A decode batch, a finished request, or the server arguments, which fix the depth."""
        text = line.text
        if "speculative_num_steps=" in text:
            steps, interval = _STEPS.search(text), _INTERVAL.search(text)
            self._steps = (count(steps[1]) if steps else None) or None
            self._interval = (count(interval[1]) if interval else None) or DEFAULT_INTERVAL
            return ()
        length = _LENGTH.search(text)
        if not length or not _BATCH.search(text):
            # `Finish: … out={'meta_info': {'spec_verify_ct': 12, …}}` is Python's form of the
            # object in a response.
            values: dict[str, Any] = dict(_META.findall(text))
            values |= {key: value.split(",") for key, value in _META_LIST.findall(text)}
            return list(self.document(values)) or None if values else None
        value = number(length[1])
        rate, running, tokens = _RATE.search(text), _RUNNING.search(text), _TOKENS.search(text)
        speed, rank = _SPEED.search(text), _RANK.search(text)
        requests = (count(running[1]) if running else None) or 1
        return (
            Observation(
                engine=self.engine,
                kind=Kind.VALUE,
                definition=ACCEPT_LEN,
                replica=f"DP{rank[1]}" if rank else line.replica,
                time=line.time,
                idle=value is None or value < 1,
                printed=Printed(
                    mean_acceptance_length=value or None,
                    acceptance_rate=number(rate[1]) if rate else None,
                    weight=float(requests),
                ),
                load=Load(
                    running=requests,
                    context_tokens=count(tokens[1]) if tokens else None,
                    generation_throughput=number(speed[1]) if speed else None,
                ),
            ),
        )

    def samples(self, samples: Sequence[Sample]) -> Iterable[Observation]:
        """Gauges of the last interval, one rank of each engine."""
        gauges: dict[str, dict[str, float]] = {}
        for sample in samples:
            name = sample.name.replace("sglang_", "sglang:", 1)
            if not name.startswith("sglang:spec_") or name.endswith("_created"):
                continue
            # The draft worker exports the same gauges; only one rank of a tensor-parallel group
            # counts.
            if (
                sample.labels.get("engine_type") == "draft"
                or sample.labels.get("tp_rank", "0") != "0"
            ):
                continue
            own = gauges.setdefault(sample.labels.get("dp_rank", ""), {})
            own[name.removeprefix("sglang:spec_").removesuffix("_total")] = sample.value
        for rank, own in gauges.items():
            length = number(own.get("accept_length"))
            if length is None and "accept_rate" not in own:
                continue
            drafted = count(own.get("num_draft_tokens"))
            yield Observation(
                engine=self.engine,
                kind=Kind.VALUE,
                definition=GAUGES,
                replica=rank or None,
                num_speculative_tokens=count(own.get("num_steps"))
                or (drafted - 1 if drafted else None),
                idle=length is not None and length < 1,
                printed=Printed(
                    mean_acceptance_length=length or None,
                    acceptance_rate=number(own.get("accept_rate")),
                ),
            )

    def document(self, value: Mapping[str, Any]) -> Iterable[Observation]:
        """A `meta_info` object, or an internal state with the average since start."""
        average = number(value.get("avg_spec_accept_length"))
        if average is not None:
            yield Observation(
                engine=self.engine,
                kind=Kind.VALUE,
                definition=AVERAGE,
                idle=average < 1,
                printed=Printed(mean_acceptance_length=average or None),
            )
        drafts = count(value.get("spec_verify_ct"))
        if drafts is None:
            return
        drafted = _first(
            value, ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
        )
        accepted = _first(
            value, ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
        )
        histogram = counts(
            value.get("spec_correct_drafts_histogram") or value.get("spec_accept_histogram")
        )
        generated = count(value.get("completion_tokens"))
        per_position = None
        if histogram and sum(histogram) == drafts:
            _, total, per_position = from_histogram(histogram)
            accepted = total if accepted is None else accepted
        if accepted is None and generated is not None and drafts:
            # Every step emits its accepted drafts and one bonus token.
            accepted = max(0, generated - drafts)
        yield Observation(
            engine=self.engine,
            kind=Kind.REQUEST,
            definition=REQUEST,
            counts=Counts(
                drafts=drafts,
                drafted=drafted if drafts else 0,
                accepted=accepted,
                at_position=per_position,
                generated=generated,
            ),
            printed=Printed(mean_acceptance_length=number(value.get("spec_accept_length"))),
        )

    def settle(self, observations: Sequence[Observation]) -> Sequence[Observation]:
        """Decide what the printed rate means, and turn a run in which nothing was accepted into
        counts.
        """
        values = [
            o
            for o in observations
            if o.kind is Kind.VALUE and not o.idle and o.definition != AVERAGE
        ]
        if not values:
            return observations
        depth = self._steps or _known_depth(values)
        depth = depth or infer_depth(
            [(o.printed.mean_acceptance_length, o.printed.acceptance_rate) for o in values]
        )
        dead = self._nothing_accepted(values, depth)
        settled = []
        for o in observations:
            if o.kind is not Kind.VALUE or o.idle or o.definition == AVERAGE:
                settled.append(o)
            elif dead is not None:
                drafts = self._interval * (o.load.running or 1)
                settled.append(
                    replace(
                        o,
                        kind=Kind.WINDOW,
                        num_speculative_tokens=dead,
                        counts=Counts(
                            drafts=drafts, drafted=drafts * dead, accepted=0, estimated=True
                        ),
                        printed=replace(o.printed, reported_rate=o.printed.acceptance_rate),
                        note=f"counts derived: {self._interval} steps a line, {dead} drafts a step",
                    )
                )
            else:
                rate = _true_rate(o, depth)
                own = replace(
                    o.printed, acceptance_rate=rate, reported_rate=o.printed.acceptance_rate
                )
                settled.append(replace(o, printed=own, num_speculative_tokens=depth))
        return settled

    def _nothing_accepted(self, values: Sequence[Observation], depth: int | None) -> int | None:
        """Drafts a step if every line says that nothing was accepted and the token counts bear it
        out; else None.

        With exactly one token a step the context grows by one token a step and request, which fixes
        the steps.
        """
        if any(
            o.printed.mean_acceptance_length != 1.0 or o.definition != ACCEPT_LEN for o in values
        ):
            return None
        last: dict[str | None, Load] = {}
        grown = 0
        for o in values:
            before, now = last.get(o.replica), o.load
            last[o.replica] = now
            if before is None or before.running != now.running or now.context_tokens is None:
                continue
            more = now.context_tokens - (before.context_tokens or 0)
            grown += more == self._interval * (now.running or 1)
        return (depth or DEFAULT_STEPS) if grown else None


def infer_depth(pairs: Sequence[tuple[float | None, float | None]]) -> int | None:
    """Draft steps that make every printed (length, rate) pair agree; None if none does or several
    do.

    New meaning: rate = (length − 1) / steps. Old meaning: rate = length / draft tokens, with draft
    tokens = steps + 1. Both figures are rounded to two decimals.
    """
    fitting: set[int] = set()
    for offset, base in ((0, 1.0), (1, 0.0)):
        allowed: set[int] | None = None
        for length, rate in pairs:
            if length is None or rate is None:
                continue
            span = _whole_numbers(length - base, rate)
            if span is not None:
                allowed = span if allowed is None else allowed & span
        fitting |= {n - offset for n in allowed or () if n - offset >= 1}
    return fitting.pop() if len(fitting) == 1 else None


def _whole_numbers(numerator: float, rate: float, half: float = 0.005 + 1e-9) -> set[int] | None:
    """Whole numbers n with numerator / n = rate within rounding; None where the pair allows any."""
    if rate <= half:
        return None if numerator <= half else set()
    low, high = (numerator - half) / (rate + half), (numerator + half) / (rate - half)
    return {n for n in range(max(1, math.ceil(low)), math.floor(high) + 1) if n <= 64}


def _true_rate(o: Observation, depth: int | None) -> float | None:
    """Accepted / proposed drafts: from the length where the depth is known; 0 where nothing was
    accepted.
    """
    length = o.printed.mean_acceptance_length
    if length is not None and depth:
        return min(1.0, max(0.0, (length - 1) / depth))
    return 0.0 if length == 1.0 else None


def _known_depth(values: Sequence[Observation]) -> int | None:
    return next((o.num_speculative_tokens for o in values if o.num_speculative_tokens), None)


def _first(value: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((n for name in names if (n := count(value.get(name))) is not None), None)
