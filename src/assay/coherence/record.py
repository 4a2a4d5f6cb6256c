"""What `assay check` measured, apart from what it makes of it.

A `CheckRecord` is written into the result of every run and read back from it, so that an earlier
healthy run can be the reference of a later one (`--reference run.json`), and so that the verdict is
a pure function of two records.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from assay.coherence.detection import Family

T = TypeVar("T")


def from_fields(cls: type[T], data: Mapping[str, Any], **given: Any) -> T:
    """A `cls` from the fields that `data` has; others of `data` are left out, and `given` is taken
    as it is.

    A damaged file is named and not believed: TypeError where a value is of another type than its
    field, or a field without a default is missing.
    """
    accepted = _accepted(cls)
    values = {name: data[name] for name in accepted if name in data and name not in given}
    for name, value in values.items():
        # In JSON a whole number may stand for a float; true and false are no numbers.
        if not isinstance(value, accepted[name]) or (
            isinstance(value, bool) and bool not in accepted[name]
        ):
            raise TypeError(f"{name} is {type(value).__name__}")
    return cls(**values, **given)


def _accepted(cls: type[Any]) -> Mapping[str, tuple[type, ...]]:
    """For each field that holds one plain value: the types it may have."""
    fields = {}
    for name, hint in get_type_hints(cls).items():
        kinds = set(get_args(hint) or (hint,))
        if kinds <= {str, int, float, bool, NoneType}:
            fields[name] = tuple(kinds | ({int} if float in kinds else set()))
    return fields


HEAD_CHARS = 200
"""Characters of each text that are shown and kept."""


@dataclass(frozen=True)
class AnswerCheck:
    """One check beyond form: was the answer right? `detail` says what was expected and
    what came.
    """

    name: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True)
class GradedReply:
    """One graded text of one probe.

    `label` and `kind` are those of `assay grade`; counts are in code points and in the engine's own
    tokens. `text_chars` counts everything that was received: content, reasoning and tool calls.
    """

    label: str
    kind: str | None
    onset_char: int | None
    finish_reason: str | None
    completion_tokens: int | None
    text_head: str
    text_chars: int
    coherent_chars: int
    temperature: float
    seed: int | None
    prompt_tokens: int | None = None
    checks: tuple[AnswerCheck, ...] = ()
    variant: str = ""
    """Which of several forms of the probe this is, such as a needle's depth and length."""
    tool_form: str = ""
    """Where tools were offered: `parsed` by the engine, `unread` (a whole call left in the text),
    `remains` (parts of one), or nothing."""
    tool_text: str = ""
    """The text in which an unparsed call, or parts of one, stand."""
    words: int = 0
    """Words of the prose of all replies, of which `stutters` are said twice, whole or in part; and
    examples of these.
    """
    stutters: int = 0
    stutter_text: str = ""
    think_tag: bool = False
    """Whether the content holds reasoning up to a `</think>` that nothing in it opened."""
    family: str = ""
    """The family of the fault, as the detector names it; empty in results before 0.3.0."""
    causes: tuple[str, ...] = ()
    """What a detector of another package says that the fault comes from."""

    @property
    def is_loop(self) -> bool:
        """Whether the text is a loop, which a small whole model writes too, rather than a flood,
        a salad or a leak.
        """
        return self.known_family == Family.LOOP

    @property
    def known_family(self) -> str:
        """The family of the fault; of an earlier result, by the name of its kind."""
        if self.family or self.kind is None:
            return self.family
        return next((f for pattern, f in _FAMILIES if re.search(pattern, self.kind)), Family.OTHER)

    @property
    def greedy(self) -> bool:
        """Whether the text was decoded at temperature 0."""
        return self.temperature == 0.0

    @property
    def degenerate(self) -> bool:
        """Whether the text is degenerate, or empty where there should be text."""
        return self.label in ("degenerate", "empty")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GradedReply:
        """Read one sample of an earlier result; missing optional fields take their defaults."""
        checks = tuple(from_fields(AnswerCheck, check) for check in data.get("checks", ()))
        causes = tuple(str(cause) for cause in data.get("causes", ()))
        return from_fields(cls, data, checks=checks, causes=causes)


_FAMILIES = (
    (r"^special_token_flood", Family.TOKEN_FLOOD),
    (r"flood", Family.FLOOD),
    (r"^(?:newline_loop|delimiter_loop|asterisk_attractor|few_characters)", Family.MARKS),
    (r"loop|^(?:the_the_the|a_a_a|few_words|repeated_tool_call|.*_tail)$", Family.LOOP),
    (r"salad|soup|script|drift", Family.SALAD),
    (r"leak|^malformed_arguments", Family.LEAK),
    (r"^(?:replacement|control)_characters|^tokenizer_marks", Family.BYTES),
    (r"^stutter", Family.STUTTER),
)
"""Families of kinds in results before 0.3.0, which hold none, by patterns; the first that fits."""


@dataclass(frozen=True)
class ProbeResult:
    """All samples of one probe, or why it was skipped."""

    name: str
    title: str
    samples: tuple[GradedReply, ...] = ()
    skipped: str | None = None
    failed: str | None = None
    """Why the probe could not be finished (a time-out, a stream cut half-way); what it has is kept.
    """

    @property
    def status(self) -> str:
        """`run` or `skipped`."""
        return "skipped" if self.skipped is not None else "run"

    def with_(self, more: ProbeResult) -> ProbeResult:
        """This probe and what another stage measured of it; what was measured at all is not
        skipped.
        """
        samples = self.samples + more.samples
        skipped = None if samples else self.skipped or more.skipped
        return replace(self, samples=samples, skipped=skipped, failed=self.failed or more.failed)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProbeResult:
        """Read one probe of an earlier result."""
        return cls(
            name=data["name"],
            title=data.get("title", data["name"]),
            samples=tuple(GradedReply.from_json(sample) for sample in data.get("samples", ())),
            skipped=data.get("reason") if data.get("status") == "skipped" else None,
            failed=data.get("unfinished"),
        )


@dataclass(frozen=True)
class PassageScore:
    """How well the model predicts one fixed text: `nats` over `bytes` bytes, from `depth` tokens
    into the context.
    """

    passage: str
    depth: int
    nats: float
    bytes: int

    @property
    def bits_per_byte(self) -> float:
        """Negative log-likelihood in bits for each byte of UTF-8."""
        return self.nats / (self.bytes * 0.6931471805599453)


@dataclass(frozen=True)
class TimedText:
    """One text whose speed was measured, with its grade. Times in seconds, speeds in tokens a
    second.

    The times are None where nothing was timed: on the reference side, or where no text came.
    """

    label: str
    kind: str | None
    onset_char: int | None
    text_head: str
    text_chars: int
    coherent_chars: int
    prompt_tokens: int | None
    completion_tokens: int
    ttft_s: float | None = None
    e2e_s: float | None = None
    itl_s: float | None = None
    decode_tokens_per_s: float | None = None
    first_chunk_source: str = "assumed"
    round: int = 0

    @property
    def degenerate(self) -> bool:
        """Whether the text is degenerate, or empty."""
        return self.label in ("degenerate", "empty")

    @property
    def useful_tokens_per_s(self) -> float | None:
        """Tokens before the onset of degeneration, by their share of the characters, over the whole
        time.
        """
        if not self.e2e_s:
            return None
        if not self.text_chars:
            return 0.0
        return self.completion_tokens * (self.coherent_chars / self.text_chars) / self.e2e_s


@dataclass(frozen=True)
class ToolAnswer:
    """What came of one case of the tools suite: a call, or a JSON object of a given schema."""

    case: str
    parsed: bool
    """A call in `tool_calls` with arguments that are JSON, or a text that is one JSON object."""
    schema_valid: bool
    right: bool
    form: str = ""
    """That of `GradedReply.tool_form`."""
    text_head: str = ""
    """The beginning of an answer that was not right."""


@dataclass(frozen=True)
class ToolLevel:
    """The tools suite at one concurrency; `failed` counts the requests that got no answer."""

    concurrency: int
    answers: tuple[ToolAnswer, ...] = ()
    failed: int = 0
    error: str = ""

    def count(self, name: str) -> int:
        """How many answers are `parsed`, `schema_valid` or `right`."""
        return sum(bool(getattr(answer, name)) for answer in self.answers)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ToolLevel:
        """Read one level of an earlier result."""
        answers = tuple(from_fields(ToolAnswer, answer) for answer in data.get("answers", ()))
        return from_fields(cls, data, answers=answers)


@dataclass(frozen=True)
class StreamCheck:
    """What came of one request that was asked whole and streamed.

    `state` is `good`, `fault`, `unclear`, `skipped` or `unfinished`; `event` counts the chunks of
    the stream from 0, and `event_text` is the beginning of the one that shows the fault.
    """

    case: str
    state: str
    kind: str = ""
    says: str = ""
    event: int | None = None
    event_text: str = ""
    events: int = 0
    whole_head: str = ""
    stream_head: str = ""
    notes: str = ""


@dataclass(frozen=True)
class NeedCheck:
    """Whether the server can do a thing that is needed: `good`, `bad` or `unclear`."""

    name: str
    state: str
    says: str = ""
    asked: int = 0


@dataclass(frozen=True)
class CheckRecord:
    """Everything one run of `assay check` measured."""

    probes: tuple[ProbeResult, ...] = ()
    passages: tuple[PassageScore, ...] = ()
    passages_skipped: str | None = None
    passages_failed: str | None = None
    """Why the fixed texts could not be scored to the end, where the server can score; what it has
    is kept.
    """
    timed: tuple[TimedText, ...] = ()
    timed_skipped: str | None = None
    timed_failed: str | None = None
    """Why the timing could not be finished, where the server can stream; what it has is kept."""
    concurrency: int = 1
    prefill_tokens_per_s: float | None = None
    counters: Mapping[str, float] = field(default_factory=dict)
    """Server-side counters of corruption (NaN in logits and the like) that moved during the run."""
    tools: tuple[ToolLevel, ...] = ()
    tools_skipped: str | None = None
    streams: tuple[StreamCheck, ...] = ()
    streams_skipped: str | None = None
    needs: tuple[NeedCheck, ...] = ()

    @property
    def samples(self) -> tuple[GradedReply, ...]:
        """The samples of all probes."""
        return tuple(sample for probe in self.probes for sample in probe.samples)

    @property
    def written_tokens(self) -> int:
        """Tokens that were written for the probes; about four characters each where the server does
        not count them.
        """
        return sum(s.completion_tokens or s.text_chars // 4 for s in self.samples)

    def probe(self, name: str) -> ProbeResult | None:
        """The result of one probe; None where it is not in this record."""
        return next((probe for probe in self.probes if probe.name == name), None)

    @classmethod
    def from_json(cls, results: Mapping[str, Any]) -> CheckRecord:
        """Read the record back from the `results` of an earlier `assay check --json`.

        Raises KeyError or TypeError where the object is not such a result.
        """
        throughput: Mapping[str, Any] = results.get("throughput") or {}
        scores: Mapping[str, Any] = results.get("bits_per_byte") or {}
        passages: Sequence[Mapping[str, Any]] = scores.get("passages") or ()
        texts: Sequence[Mapping[str, Any]] = throughput.get("texts") or ()
        return cls(
            probes=tuple(ProbeResult.from_json(probe) for probe in results["probes"]),
            passages=tuple(from_fields(PassageScore, passage) for passage in passages),
            passages_skipped=scores.get("skipped"),
            passages_failed=scores.get("unfinished"),
            timed=tuple(from_fields(TimedText, text) for text in texts),
            timed_skipped=throughput.get("skipped"),
            timed_failed=throughput.get("unfinished"),
            concurrency=throughput.get("concurrency", 1),
            prefill_tokens_per_s=throughput.get("prefill_tokens_per_s"),
            counters=dict(results.get("counters") or {}),
            tools=tuple(ToolLevel.from_json(level) for level in results.get("tools") or ()),
            tools_skipped=results.get("tools_skipped"),
            streams=tuple(
                from_fields(StreamCheck, check)
                for check in (results.get("streaming") or {}).get("checks") or ()
            ),
            streams_skipped=(results.get("streaming") or {}).get("skipped"),
            needs=tuple(from_fields(NeedCheck, need) for need in results.get("needs") or ()),
        )

    def like(self, other: CheckRecord) -> CheckRecord:
        """This record with only the texts whose counterparts `other` has: the same probes, forms
        and numbers of each.
        """
        probes = []
        for probe in self.probes:
            theirs = other.probe(probe.name)
            room = Counter((s.variant, s.greedy) for s in theirs.samples) if theirs else Counter()
            kept = []
            for sample in probe.samples:
                room[sample.variant, sample.greedy] -= 1
                if room[sample.variant, sample.greedy] >= 0:
                    kept.append(sample)
            probes.append(replace(probe, samples=tuple(kept)))
        return replace(self, probes=tuple(probes))

    def with_(self, more: CheckRecord) -> CheckRecord:
        """This record and what another stage measured."""
        probes = {probe.name: probe for probe in self.probes}
        for probe in more.probes:
            known = probes.get(probe.name)
            probes[probe.name] = known.with_(probe) if known else probe
        return CheckRecord(
            probes=tuple(probes.values()),
            passages=self.passages + more.passages,
            passages_skipped=self.passages_skipped or more.passages_skipped,
            passages_failed=self.passages_failed or more.passages_failed,
            timed=self.timed + more.timed,
            timed_skipped=self.timed_skipped or more.timed_skipped,
            timed_failed=self.timed_failed or more.timed_failed,
            concurrency=more.concurrency,
            prefill_tokens_per_s=more.prefill_tokens_per_s or self.prefill_tokens_per_s,
            counters=self.counters or more.counters,
            tools=tuple(sorted(self.tools + more.tools, key=lambda level: level.concurrency)),
            tools_skipped=self.tools_skipped or more.tools_skipped,
            streams=self.streams + more.streams,
            streams_skipped=self.streams_skipped or more.streams_skipped,
            needs=self.needs + more.needs,
        )


@dataclass(frozen=True)
class Reference:
    """A reference record, where it came from, and the settings of the server it was measured on, if
    it was one.
    """

    record: CheckRecord
    origin: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
