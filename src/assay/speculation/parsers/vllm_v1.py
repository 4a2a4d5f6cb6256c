"""vLLM V1: the `SpecDecoding metrics` line in all wordings since 0.8, `/metrics`, replies."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from assay.speculation.parsers.counts import count, counts, number, positions_from
from assay.speculation.rounding import exact_counts, infer_drafts, position_counts

WINDOW = Definition(
    "vllm_v1_window",
    "vLLM V1 log: counts of one interval; length = 1 + accepted / drafts",
    steps_estimated=True,
)
SINCE_START = Definition(
    "vllm_counters", "vLLM counters since start; length = 1 + accepted / drafts"
)
REQUEST = Definition(
    "vllm_request", "vLLM counts of one request; histogram[i] = steps that accepted i drafts"
)


# 0.8.2 wrote "Speculative metrics:" like V0, but without the V0 figures; later versions "SpecDecoding metrics:".  # noqa: E501
_HEADS = ("SpecDecoding metrics:", "Speculative metrics:")

_ENGINE = re.compile(
    r"(?:Engine (\d{1,9})|Engines Aggregated):.{0,200}?Avg generation"
    r" throughput:\s?([\d.]{1,20}).{0,200}?Running:\s?(\d{1,9})"
)

# The wording since 0.9, read in one go; every other one is taken apart field by field.
_USUAL = re.compile(
    r" Mean acceptance length: ([\d.]+), (?:Current speculative depth: \d+, )?Accepted throughput:"
    r" ([\d.]+) tokens/s, "
    r"Drafted throughput: ([\d.]+) tokens/s, Accepted: (\d{1,15}) tokens, Drafted: (\d{1,15})"
    r" tokens, Per-position acceptance "
    r"rate: (\d\.\d+(?:, \d\.\d+)*), Avg Draft acceptance rate: [\d.]+%$"
)

USUAL_INTERVAL = 10.0
"""Seconds between two log lines; with a longer one too few tokens are taken for generated, and all
steps for drafting.
"""

_PREFIX = re.compile(
    r"^vllm[:_]spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(?:_total)?$"
)


_DRAFT_TENSORS = (
    r"(?:mtp|nextn|eagle|draft|medusa|eh_proj|enorm|hnorm|shared_head|pre_fc_norm|fc\.)"
)
_START_UP = (
    StartUp("version", ("version",), re.compile(r"(vLLM API server version \S+)", re.I)),
    StartUp(
        "version",
        ("llm engine (",),
        re.compile(r"(Initializing a V\d LLM engine \(v[^)]+\))", re.I),
    ),
    StartUp(
        "weights_skipped",
        ("params_dict",),
        re.compile(rf"{_DRAFT_TENSORS}.*not found in params_dict", re.I),
    ),
    StartUp(
        "weights_uninitialised",
        ("not initialized",),
        re.compile(rf"weights? .{{0,400}}(?:were|was) not initialized.*{_DRAFT_TENSORS}", re.I),
    ),
    StartUp(
        "weights_cast",
        ("attempted to load weight",),
        re.compile(
            rf"(Attempted to load weight \S*{_DRAFT_TENSORS}\S* with dtype \S+ into parameter with"
            r" dtype \S+)",
            re.I,
        ),
    ),
    StartUp(
        "layer_reused",
        ("same mtp layer",),
        re.compile(
            r"(num_speculative_tokens > 1 will run multiple times of forward on same MTP layer)"
        ),
    ),
    StartUp(
        "draft_context",
        ("overriding draft",),
        re.compile(r"(Overriding draft model max model len from \d+ to \d+)"),
    ),
    StartUp(
        "speculation_on",
        ("speculative",),
        re.compile(r"(speculative_config=SpeculativeConfig\([^)]*\))"),
    ),
    StartUp("speculation_off", ("speculative",), re.compile(r"(speculative_config=None)")),
)


class VllmV1Parser(Parser):
    """Lines are windows. The engine's number stands on the line before, so it is remembered for
    each process.
    """

    engine = "vllm"
    metric_words = ("spec_decode", "generation_tokens")
    needles = ("accept",)
    company = ("specdecoding metrics:", "speculative metrics:", "drafted:")
    near = ("avg generation throughput",)
    heads = _HEADS
    metrics = ("vllm",)
    reads = r"vllm[:_]"
    replies = re.compile(
        r"Avg generation throughput: (?!0\.0 )[\d.]+ tokens/s, Running: [1-9]\d* reqs"
    )
    speed = re.compile(r"Avg generation throughput:\s*([\d.]+) tokens/s, Running: (\d+) reqs")
    start_up = _START_UP

    def __init__(self) -> None:
        self._engine_line: dict[str, tuple[str | None, float | None, int]] = {}
        self._spoken: list[
            tuple[str | None, int]
        ] = []  # engine and generated tokens of each window
        self._interval = USUAL_INTERVAL

    def line(self, line: Line) -> Iterable[Observation] | None:
        """A window; or the line before it, which names the engine."""
        text = line.text
        head = next((h for h in _HEADS if h in text), None)
        if head is None and "Drafted:" in text and "Accepted:" in text:
            head = (
                text[: text.find("Mean acceptance length")]
                if "Mean acceptance length" in text
                else ""
            )
        if head is not None:
            body = text[len(head) :] if text.startswith(head) else text.partition(head)[2]
            usual = _USUAL.match(body)
            if usual:
                accepted, drafted = int(usual[4]), int(usual[5])
                rates = tuple(map(float, usual[6].split(", ")))
                seconds = _seconds((accepted, usual[2]), (drafted, usual[3]))
                return (self._window(float(usual[1]), accepted, drafted, rates, line, seconds),)
            return (
                None
                if "efficiency" in body or "emitted" in body
                else list(self._other(_fields(body), line))
            )
        engine = _ENGINE.search(text) if "Avg generation throughput" in text else None
        if engine is None:
            return None
        number_of_engine = None if engine[1] is None else str(int(engine[1]))
        self._engine_line[line.process] = (number_of_engine, number(engine[2]), int(engine[3]))
        return ()

    def _other(self, fields: Mapping[str, Sequence[str]], line: Line) -> Iterator[Observation]:
        """A window in any wording, or the values that a cut line still prints."""
        accepted = _first_count(fields, "Accepted", "Number of accepted tokens")
        drafted = _first_count(
            fields, "Drafted", "Number of draft tokens", "Number of draft tokens tokens"
        )
        mean = number(next(iter(fields.get("Mean acceptance length", ())), None))
        rates = _rates(fields.get("Per-position acceptance rate", ()))
        if accepted is not None and drafted is not None:
            yield self._window(mean, accepted, drafted, rates, line)
            return
        fraction = _fraction(fields)
        if fraction is not None or mean is not None:
            yield Observation(
                engine=self.engine,
                kind=Kind.VALUE,
                definition=WINDOW,
                time=line.time,
                replica=line.replica,
                printed=Printed(
                    acceptance_rate=fraction, mean_acceptance_length=mean, rates_per_position=rates
                ),
            )

    def _window(
        self,
        mean: float | None,
        accepted: int,
        drafted: int,
        rates: tuple[float, ...] | None,
        line: Line,
        seconds: float | None = None,
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
        engine, throughput, running = self._engine_line.get(line.process, (None, None, None))
        generated = None
        if throughput is not None and seconds is not None:
            # The engine's line counts all tokens, those of steps without a draft too; it serves one
            # window.
            generated = max(round(throughput * seconds), accepted)
            self._interval = seconds
            self._spoken.append((engine, generated))
            self._engine_line[line.process] = (engine, None, running or 0)
        return Observation(
            engine=self.engine,
            kind=Kind.WINDOW,
            definition=WINDOW,
            replica=line.replica if line.replica is not None else engine,
            num_speculative_tokens=len(rates) if rates else None,
            time=line.time,
            counts=Counts(
                drafted=drafted,
                accepted=accepted,
                drafts=drafts,
                at_position=per_position,
                generated=generated,
            ),
            load=Load(generation_throughput=throughput, running=running),
        )

    def silent(self, head: str) -> Iterator[Observation]:
        """Tokens of the intervals in which requests ran and nothing was drafted: no window is
        printed for them.
        """
        windows = sum(head.count(h) for h in _HEADS)
        if not self._spoken or not windows:
            return
        spoken: dict[str | None, list[int]] = defaultdict(
            lambda: [0, 0]
        )  # in the head, and in the whole log
        for i, (engine, tokens) in enumerate(self._spoken):
            spoken[engine][0] += tokens if i < windows else 0
            spoken[engine][1] += tokens
        generated: dict[str | None, float] = defaultdict(float)
        for match in _ENGINE.finditer(head):
            generated[None if match[1] is None else str(int(match[1]))] += number(match[2]) or 0.0
        for engine, (in_head, whole) in spoken.items():
            silent = generated[engine] * self._interval - in_head
            if in_head and silent > 0.05 * in_head:
                yield Observation(
                    engine=self.engine,
                    kind=Kind.WINDOW,
                    definition=WINDOW,
                    replica=engine,
                    counts=Counts(
                        drafted=0, accepted=0, drafts=0, generated=round(silent * whole / in_head)
                    ),
                )

    def samples(self, samples: Sequence[Sample]) -> Iterable[Observation]:
        """One total for each engine on the page."""
        labels = _telling_labels(samples)
        by_engine: dict[str, dict[str, Any]] = defaultdict(lambda: {"positions": {}})
        order: list[str] = []
        generated: dict[str, float] = defaultdict(float)
        for sample in samples:
            replica = "/".join(sample.labels.get(name, "") for name in labels)
            if (
                re.fullmatch(r"vllm[:_]generation_tokens(?:_total)?", sample.name)
                and sample.value >= 0
            ):
                generated[replica] += sample.value
            match = _PREFIX.match(sample.name)
            if not match or count(sample.value) is None:
                continue
            if replica not in order:
                order.append(replica)
            own = by_engine[replica]
            if match[1] == "accepted_tokens_per_pos":
                position = count(sample.labels.get("position"))
                if position is not None and position < MOST_POSITIONS:
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
                engine=self.engine,
                kind=Kind.TOTAL,
                definition=SINCE_START,
                replica=replica or None,
                num_speculative_tokens=deepest or None,
                counts=Counts(
                    drafted=drafted,
                    accepted=count(own.get("accepted_tokens")),
                    drafts=count(own.get("drafts")),
                    at_position=tuple(int(found[i]) for i in range(deepest)) if complete else None,
                    generated=count(generated.get(replica)) if replica in generated else None,
                    partial=drafted is None or (bool(found) and not complete),
                ),
            )

    def document(self, value: Mapping[str, Any]) -> Iterable[Observation]:
        """The statistics that `--per-request-spec-decode-metrics` adds to a response."""
        if "num_spec_steps" not in value or "num_draft_tokens" not in value:
            return
        steps, k = counts(value.get("acceptance_histogram")), count(value.get("num_spec_tokens"))
        yield Observation(
            engine=self.engine,
            kind=Kind.REQUEST,
            definition=REQUEST,
            num_speculative_tokens=k,
            counts=Counts(
                drafted=count(value.get("num_draft_tokens")),
                accepted=count(value.get("num_accepted_draft_tokens")),
                drafts=count(value.get("num_spec_steps")),
                at_position=positions_from(steps, k),
            ),
        )


def _seconds(*pairs: tuple[int, str]) -> float | None:
    """The interval of a window: tokens over tokens per second, from the pair that is
    rounded least.
    """
    tokens, pace = max(pairs, key=lambda pair: number(pair[1]) or 0.0)
    speed = number(pace)
    # After idle intervals, for which no window is printed, the pace is taken over all of them.
    return min(tokens / speed, USUAL_INTERVAL) if speed and tokens else None


def _telling_labels(samples: Sequence[Sample]) -> list[str]:
    """Labels that tell engines apart: the engine's number, and instance or model where a page holds
    several.
    """
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
    whole = bool(rates) and all(r is not None and r <= 1 for r in rates)
    return tuple(r for r in rates if r is not None) if whole else None


def _fraction(fields: Mapping[str, Sequence[str]]) -> float | None:
    """The printed acceptance rate, which one version wrote as a fraction and the others in per
    cent.
    """
    for name in ("Draft acceptance rate", "Avg Draft acceptance rate"):
        for text in fields.get(name, ())[:1]:
            value = number(text.rstrip("%"))
            return value if value is None or not text.endswith("%") else value / 100
    return None
