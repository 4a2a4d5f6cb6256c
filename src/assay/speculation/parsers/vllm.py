"""vLLM V1: the `SpecDecoding metrics` line in all its wordings since 0.8, `/metrics`, per-request statistics."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.speculation.parsers.base import Line, Parser, Sample, count, counts, from_histogram, number
from assay.speculation.record import Kind, Observation, exact_counts, infer_drafts, position_counts

# 0.8.2 wrote "Speculative metrics:" like V0, but without the V0 figures; later versions "SpecDecoding metrics:".
_HEADS = ("SpecDecoding metrics:", "Speculative metrics:")
_ENGINE = re.compile(
    r"(?:Engine (\d+)|Engines Aggregated):.*?Avg generation throughput:\s*([\d.]+).*?Running:\s*(\d+)"
)

# The wording since 0.9, read in one go; every other one is taken apart field by field.
_USUAL = re.compile(
    r" Mean acceptance length: ([\d.]+), (?:Current speculative depth: \d+, )?Accepted throughput: [\d.]+ tokens/s, "
    r"Drafted throughput: [\d.]+ tokens/s, Accepted: (\d+) tokens, Drafted: (\d+) tokens, Per-position acceptance "
    r"rate: (\d\.\d+(?:, \d\.\d+)*), Avg Draft acceptance rate: [\d.]+%$"
)
_PREFIX = re.compile(
    r"^vllm[:_]spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(?:_total)?$"
)


class VllmV1Parser(Parser):
    """Lines are windows. The engine's number stands on the line before, so it is remembered for each process."""

    engine = "vllm"
    markers = ("metrics:", "throughput:")
    own = ("SpecDecoding metrics:",)

    def __init__(self) -> None:
        self._engine_line: dict[str, tuple[str | None, float, int]] = {}

    def line(self, line: Line) -> Iterable[Observation]:
        """A window; or the line before it, which names the engine."""
        text = line.text
        head = next((h for h in _HEADS if h in text), None)
        if head is not None:
            body = text.partition(head)[2]
            usual = _USUAL.match(body)
            if usual:
                rates = tuple(map(float, usual[4].split(", ")))
                return (self._window(float(usual[1]), int(usual[2]), int(usual[3]), rates, line),)
            return () if "efficiency" in body or "emitted" in body else self._other(_fields(body), line)
        engine = _ENGINE.search(text) if "Avg generation throughput" in text else None
        if engine:
            self._engine_line[line.process] = (
                None if engine[1] is None else str(int(engine[1])),
                float(engine[2]),
                int(engine[3]),
            )
        return ()

    def _other(self, fields: Mapping[str, Sequence[str]], line: Line) -> Iterator[Observation]:
        """A window in any wording, or the values that a cut line still prints."""
        accepted = _first_count(fields, "Accepted", "Number of accepted tokens")
        drafted = _first_count(fields, "Drafted", "Number of draft tokens", "Number of draft tokens tokens")
        mean = number(fields.get("Mean acceptance length", ("",))[0])
        rates = _rates(fields.get("Per-position acceptance rate", ()))
        if accepted is not None and drafted is not None:
            yield self._window(mean, accepted, drafted, rates, line)
            return
        fraction = _fraction(fields)
        if fraction is not None or mean is not None:
            yield Observation(
                engine=self.engine, kind=Kind.VALUE, definition="vllm_v1_window", acceptance_rate=fraction,
                mean_acceptance_length=mean, rates_per_position=rates, time=line.time, replica=line.replica,
            )  # fmt: skip

    def _window(
        self, mean: float | None, accepted: int, drafted: int, rates: tuple[float, ...] | None, line: Line
    ) -> Observation:
        drafts = None
        per_position = None
        exact = exact_counts(drafted, accepted, mean, rates) if drafted and mean and rates else None
        if drafted == 0:
            drafts = 0
        elif exact is not None:
            drafts, per_position = exact
        elif mean is not None or rates:
            drafts = infer_drafts(drafted, accepted, len(rates) if rates else None, mean, rates)
            per_position = position_counts(drafts, rates, accepted) if drafts and rates else None
        number_of_engine, throughput, running = self._engine_line.get(line.process, (None, None, None))
        return Observation.of(
            engine=self.engine, kind=Kind.WINDOW, definition="vllm_v1_window",
            replica=line.replica if line.replica is not None else number_of_engine,
            drafted=drafted, accepted=accepted, drafts=drafts, accepted_per_position=per_position,
            num_speculative_tokens=len(rates) if rates else None, time=line.time,
            generation_throughput=throughput, running=running,
        )  # fmt: skip

    def samples(self, samples: Sequence[Sample]) -> Iterable[Observation]:
        """One total for each engine on the page."""
        labels = _telling_labels(samples)
        by_engine: dict[str, dict[str, Any]] = defaultdict(lambda: {"positions": {}})
        order: list[str] = []
        generated: dict[str, float] = defaultdict(float)
        for sample in samples:
            replica = "/".join(sample.labels.get(name, "") for name in labels)
            if re.fullmatch(r"vllm[:_]generation_tokens(?:_total)?", sample.name) and sample.value >= 0:
                generated[replica] += sample.value
            match = _PREFIX.match(sample.name)
            if not match or count(sample.value) is None:
                continue
            if replica not in order:
                order.append(replica)
            own = by_engine[replica]
            if match[1] == "accepted_tokens_per_pos":
                position = count(sample.labels.get("position"))
                if position is not None:
                    own["positions"][position] = own["positions"].get(position, 0.0) + sample.value
            else:
                own[match[1]] = own.get(match[1], 0.0) + sample.value
        # V0 pages have draft_tokens and accepted_tokens too, but never the number of drafts.
        if not any("drafts" in by_engine[r] or by_engine[r]["positions"] for r in order):
            return
        deepest = max((p for r in order for p in by_engine[r]["positions"]), default=-1) + 1
        for replica in order:
            own = by_engine[replica]
            found = own["positions"]
            complete = bool(found) and sorted(found) == list(range(deepest))
            drafted = count(own.get("draft_tokens"))
            yield Observation(
                engine=self.engine, kind=Kind.TOTAL, definition="vllm_counters", replica=replica or None,
                drafted=drafted, accepted=count(own.get("accepted_tokens")), drafts=count(own.get("drafts")),
                accepted_per_position=tuple(int(found[i]) for i in range(deepest)) if complete else None,
                num_speculative_tokens=deepest or None,
                generated=count(generated.get(replica)) if replica in generated else None,
                partial=drafted is None or (bool(found) and not complete),
            )  # fmt: skip

    def document(self, value: Mapping[str, Any]) -> Iterable[Observation]:
        """The statistics that `--per-request-spec-decode-metrics` adds to a response."""
        if "num_spec_steps" not in value or "num_draft_tokens" not in value:
            return
        histogram = value.get("acceptance_histogram")
        if isinstance(histogram, Mapping):  # sparse form {"0": 39, "3": 3}
            keys = {count(k): count(v) for k, v in histogram.items()}
            histogram = [
                keys.get(i) or 0 for i in range(max((k for k in keys if k is not None), default=0) + 1)
            ]
        steps = counts(histogram)
        k = count(value.get("num_spec_tokens"))
        per_position = None
        if steps:
            per_position = from_histogram(steps)[2]
            if k is not None and len(per_position) < k:
                per_position += (0,) * (k - len(per_position))
        yield Observation(
            engine=self.engine, kind=Kind.REQUEST, definition="vllm_request",
            drafted=count(value.get("num_draft_tokens")), accepted=count(value.get("num_accepted_draft_tokens")),
            drafts=count(value.get("num_spec_steps")), accepted_per_position=per_position,
            num_speculative_tokens=k,
        )  # fmt: skip


def _telling_labels(samples: Sequence[Sample]) -> list[str]:
    """Labels that tell engines apart: the engine's number, and instance or model where a page holds several."""
    names = ("instance", "model_name", "engine")
    own = [s.labels for s in samples if s.name.startswith(("vllm:", "vllm_"))]
    return [n for n in names if n == "engine" or len({labels.get(n) for labels in own}) > 1]


def _fields(body: str) -> dict[str, list[str]]:
    """`key: value, value, key: value` as lists by key."""
    fields: dict[str, list[str]] = {}
    values: list[str] = []
    for part in body.split(","):
        key, colon, value = part.partition(":")
        if colon:
            values = fields.setdefault(key.strip(), [])
            part = value
        if part and not part.isspace():
            values.append(part.strip())
    return fields


def _first_count(fields: Mapping[str, Sequence[str]], *names: str) -> int | None:
    """The count under the first of the names that is there (`117 tokens`)."""
    for name in names:
        if fields.get(name):
            return count(fields[name][0].split()[0])
    return None


def _rates(values: Sequence[str]) -> tuple[float, ...] | None:
    """Printed rates; None where there are none, or nan."""
    rates = [number(v) for v in values]
    return None if not rates or None in rates else tuple(r for r in rates if r is not None)


def _fraction(fields: Mapping[str, Sequence[str]]) -> float | None:
    """The printed acceptance rate, which one version wrote as a fraction and the others in per cent."""
    for name in ("Draft acceptance rate", "Avg Draft acceptance rate"):
        for text in fields.get(name, ())[:1]:
            value = number(text.rstrip("%"))
            return value if value is None or not text.endswith("%") else value / 100
    return None


# -----------------------------------------------------------------------------
# vLLM V0: one line of counts since start, and the old metrics names.
#
# V0 counts a draft token as accepted also when an earlier one of the same draft was rejected. What entered the text is
# `emitted − drafts`, one bonus token a step.

_HEAD = re.compile(r"Speculative metrics:(.*)", re.I)
_FIELDS = {
    "rate": re.compile(r"Draft acceptance rate:\s*(nan|[\d.]+)", re.I),
    "efficiency": re.compile(r"System efficiency:\s*(nan|[\d.]+)", re.I),
    "k": re.compile(r"Number of speculative tokens:\s*(\d+)", re.I),
    "accepted": re.compile(r"Number of accepted tokens:\s*(\d+)", re.I),
    # 0.5.3 wrote "tokens tokens".
    "drafted": re.compile(r"Number of draft tokens(?: tokens)?:\s*(\d+)", re.I),
    "emitted": re.compile(r"Number of emitted tokens(?: tokens)?:\s*(\d+)", re.I),
}
_NAME = re.compile(
    r"^vllm[:_]spec_decode_(draft_acceptance_rate|efficiency|num_accepted_tokens|num_draft_tokens|num_emitted_tokens)"
    r"(?:_total)?$"
)


class VllmV0Parser(Parser):
    """Lines are totals since start."""

    engine = "vllm"
    markers = ("Speculative metrics:",)

    def line(self, line: Line) -> Iterable[Observation]:
        """A total since start."""
        head = _HEAD.search(line.text)
        if not head or not ("efficiency" in head[1] or "emitted" in head[1]):
            return ()
        found = {name: match[1] for name, regex in _FIELDS.items() if (match := regex.search(head[1]))}
        drafted, k = count(found.get("drafted")), count(found.get("k"))
        if drafted is None:
            rate = number(found.get("rate"))
            if rate is None:
                return ()
            return (
                Observation(
                    engine=self.engine, kind=Kind.VALUE, definition="vllm_v0_total", acceptance_rate=rate,
                    num_speculative_tokens=k, time=line.time,
                ),
            )  # fmt: skip
        return (
            Observation(
                engine=self.engine, kind=Kind.TOTAL, definition="vllm_v0_total", replica=line.replica,
                stream=line.process, drafted=drafted, accepted=count(found.get("accepted")),
                drafts=drafted // k if k and drafted % k == 0 else None,
                emitted=count(found.get("emitted")), num_speculative_tokens=k, time=line.time,
            ),
        )  # fmt: skip

    def samples(self, samples: Sequence[Sample]) -> Iterable[Observation]:
        """A total since start, from the old names."""
        found: dict[str, float] = {}
        for sample in samples:
            match = _NAME.match(sample.name)
            if match:
                found[match[1]] = found.get(match[1], 0.0) + sample.value
        if "draft_acceptance_rate" not in found and "num_emitted_tokens" not in found:
            return ()
        drafted, emitted = count(found.get("num_draft_tokens")), count(found.get("num_emitted_tokens"))
        if drafted is None:
            return (
                Observation(
                    engine=self.engine, kind=Kind.VALUE, definition="vllm_v0_total",
                    acceptance_rate=number(found.get("draft_acceptance_rate")),
                ),
            )  # fmt: skip
        return (
            Observation(
                engine=self.engine, kind=Kind.TOTAL, definition="vllm_v0_total", drafted=drafted,
                accepted=count(found.get("num_accepted_tokens")), emitted=emitted,
                implied_depth=_depth(drafted, emitted, found.get("efficiency")),
            ),
        )  # fmt: skip


def _depth(drafted: int, emitted: int | None, efficiency: float | None) -> int | None:
    """Number of speculative tokens k that the efficiency gauge implies.

    efficiency = emitted / (drafts · (k + 1)) with drafts = drafted / k, so (k + 1) / k = emitted / (drafted · efficiency).
    """
    if not drafted or not emitted or not efficiency or not 0 < efficiency <= 1:
        return None
    ratio = emitted / (drafted * efficiency)
    if ratio <= 1:
        return None
    k = 1 / (ratio - 1)
    return round(k) if round(k) >= 1 and abs(k - round(k)) < 0.15 else None


# -----------------------------------------------------------------------------
# vLLM summaries of a finished run: `vllm bench serve` and the offline example.

_SUMMARY_FIELDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("rate", re.compile(r"^\s*Acceptance rate \(%\):\s*([\d.]+)")),
    ("length", re.compile(r"^\s*(?:Mean acceptance length|Acceptance length):\s*([\d.]+)\s*$")),
    ("drafts", re.compile(r"^\s*(?:Drafts|Number of draft proposals|num_drafts):\s*([\d,]+)\s*$")),
    (
        "drafted",
        re.compile(r"^\s*(?:Draft tokens|Number of draft tokens generated|num_draft_tokens):\s*([\d,]+)\s*$"),
    ),
    (
        "accepted",
        re.compile(r"^\s*(?:Accepted tokens|Number of accepted tokens|num_accepted_tokens):\s*([\d,]+)\s*$"),
    ),
)
_POSITION = re.compile(
    r"^\s*(?:Position (\d+):\s*([\d.]+)|Acceptance (?:rate )?at token (\d+):\s*([\d.]+))\s*$", re.I
)


@dataclass
class _Block:
    """The figures of one summary as they come in."""

    fields: dict[str, str] = field(default_factory=dict)
    positions: dict[int, float] = field(default_factory=dict)


class VllmSummaryParser(Parser):
    """A summary spans lines, so a total is sent after each; the last one is the whole."""

    engine = "vllm"
    markers = ("cceptance", "raft", "Accepted tokens", "accepted tokens", "Position ")

    def __init__(self) -> None:
        self._block = _Block()
        self._blocks = 0

    def line(self, line: Line) -> Iterable[Observation]:
        """The summary as far as it has come."""
        if "metrics:" in line.text:
            return ()
        position = _POSITION.match(line.text)
        if position:
            percent = position[1] is not None
            index = int(position[1] if percent else position[3])
            rate = number(position[2] if percent else position[4])
            if rate is not None:
                self._block.positions[index] = rate / 100 if percent else rate
            return self._observe()
        for name, regex in _SUMMARY_FIELDS:
            match = regex.match(line.text)
            if match:
                if name in self._block.fields:
                    # The same figure again: the summary of another run.
                    self._block = _Block()
                    self._blocks += 1
                self._block.fields[name] = match[1]
                return self._observe()
        return ()

    def _observe(self) -> Iterable[Observation]:
        block = self._block
        drafts, drafted = count(block.fields.get("drafts")), count(block.fields.get("drafted"))
        accepted = count(block.fields.get("accepted"))
        if drafts is None or drafted is None or accepted is None:
            return ()
        rates = tuple(block.positions[i] for i in range(len(block.positions)) if i in block.positions)
        k = drafted // drafts if drafts and drafted % drafts == 0 else None
        return (
            Observation(
                engine=self.engine, kind=Kind.SUMMARY, definition="vllm_summary", stream=f"run {self._blocks}",
                drafted=drafted, accepted=accepted, drafts=drafts, num_speculative_tokens=k,
                accepted_per_position=position_counts(drafts, rates, accepted, complete=len(rates) == k)
                if rates and drafts
                else None,
            ),
        )  # fmt: skip
