"""Ask the same requests whole and streamed, and compare what a client gets of both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

from assay.coherence.conversation import side_by_side, user
from assay.coherence.probes import WEATHER
from assay.coherence.record import HEAD_CHARS, StreamCheck
from assay.coherence.replies import shown_text
from assay.coherence.stream_faults import (
    CERTAIN,
    StreamFault,
    choices_fault,
    notes_on,
    stream_fault,
)
from assay.engines import Capability, CapabilityReport, Reply, Request
from assay.engines.server.errors import RequestRefused
from assay.engines.server.trace import StreamTrace
from assay.errors import AssayError

TOKENS = 48
"""Tokens of one answer: enough for a piece to be lost, few enough to be asked often."""
STREAM_CASES = 5
ROUNDS = 4
"""How often a case is asked whose stream differs from the whole answer."""
_SKY = "Explain in two sentences why the sky is blue."
_SKY_PROMPT = "The sky is blue because"
_LETTERS = "Write the word for water in Chinese, in Russian and in Greek, and then five emoji."
_LETTERS_PROMPT = "水 火 山 川 日 月 木 人 вода огонь гора νερό φωτιά 🌧️ ☀️ 🌈 水 火 山 川"
_COMPARED = frozenset({"differs", "lost", "other_field", "repeated", "tool_lost"})
"""Kinds that rest on a comparison, so that a server must have one answer to one request."""
_UNFINISHED = frozenset({"server.timeout", "server.rate_limited"})


@runtime_checkable
class StreamingEngine(Protocol):
    """An engine whose streams can be looked at event by event."""

    @property
    def capabilities(self) -> CapabilityReport:
        """What it can do."""

    def generate(self, request: Request) -> Reply:
        """Answer in one piece."""

    def trace(self, request: Request, deadline: float = float("inf")) -> StreamTrace:
        """Answer piece by piece, and record every event."""


@dataclass(frozen=True)
class StreamCase:
    """One request that is asked whole and streamed."""

    name: str
    request: Request
    choices: int = 1


def stream_cases(engine: StreamingEngine, *, thinking: bool = True) -> tuple[StreamCase, ...]:
    """The cases that an engine can answer: text, letters of several bytes, two choices, a tool
    call, a raw prompt.
    """
    able = engine.capabilities
    extra = {} if thinking else {"chat_template_kwargs": {"enable_thinking": False}}

    def asked(question: str, prompt: str, **more: object) -> Request:
        chat = Capability.CHAT in able
        return Request(
            messages=(user(question),) if chat else None,
            prompt=None if chat else prompt,
            max_tokens=TOKENS,
            seed=0,
            extra={**(extra if chat else {}), **more},
        )

    logprobs: dict[str, object] = {}
    if Capability.LOGPROBS in able:
        logprobs = {"logprobs": True} if Capability.CHAT in able else {"logprobs": 1}
    cases = [
        StreamCase("text", asked(_SKY, _SKY_PROMPT, **logprobs)),
        StreamCase("letters", asked(_LETTERS, _LETTERS_PROMPT)),
        # vLLM takes n=2 only where something is drawn.
        StreamCase(
            "two choices", replace(asked(_SKY, _SKY_PROMPT, n=2), temperature=0.7), choices=2
        ),
    ]
    if Capability.TOOLS in able and Capability.CHAT in able:
        question = "What is the weather in Oslo right now? Use the tool."
        request = replace(asked(question, ""), tools=(WEATHER,), max_tokens=2 * TOKENS)
        cases.append(StreamCase("tool call", request))
    if Capability.CHAT in able and Capability.COMPLETIONS in able:
        cases.append(
            StreamCase("raw prompt", Request(prompt=_LETTERS_PROMPT, max_tokens=TOKENS, seed=0))
        )
    return tuple(cases)


def check_streams(
    engine: StreamingEngine,
    parallel: int,
    on_done: Callable[[], None],
    deadline: float = float("inf"),
    *,
    thinking: bool = True,
) -> Iterator[StreamCheck]:
    """Ask all cases, `parallel` at once, and judge each stream by its whole answer."""
    cases = stream_cases(engine, thinking=thinking)
    work = [partial(check_case, engine, case, deadline) for case in cases]
    for found in side_by_side(work, parallel, deadline):
        on_done()
        yield found


def check_case(
    engine: StreamingEngine, case: StreamCase, deadline: float = float("inf")
) -> StreamCheck:
    """Judge one stream. A fault is looked for again, since a server may have several answers."""
    try:
        whole = engine.generate(_single(case))
        if not shown_text(whole).strip():
            return StreamCheck(case.name, "skipped", says="the whole answer has no text")
        first = _asked(engine, case, whole, deadline)
        if isinstance(first, StreamCheck) or first.fault is None:
            return first if isinstance(first, StreamCheck) else _told(case, first, "good")
        rounds = [first]
        while len(rounds) < (ROUNDS if first.fault.kind in _COMPARED else 2):
            if time.monotonic() > deadline:
                return _told(case, first, "unclear")
            again = _asked(engine, case, engine.generate(_single(case)), deadline)
            if isinstance(again, StreamCheck):
                return _told(case, first, "unclear")
            rounds.append(again)
            if again.fault is None:
                break
    except AssayError as error:
        state = "skipped" if isinstance(error, RequestRefused) else "unfinished"
        return StreamCheck(case.name, state, says=error.message)
    return _decided(case, rounds)


@dataclass(frozen=True)
class _Round:
    """One whole answer, the stream of the same request, and the fault of the stream."""

    whole: Reply
    trace: StreamTrace
    fault: StreamFault | None


def _decided(case: StreamCase, rounds: Sequence[_Round]) -> StreamCheck:
    """The judgement on a stream that had a fault at first.

    Sampling, rounding or another batch give a server several answers, and a stream that is another
    one of them is whole. So a text that differs counts only where all whole answers are one text.
    """
    first, last = rounds[0], rounds[-1]
    assert first.fault is not None
    one_answer = len({_texts(r.whole) for r in rounds}) == 1
    certain = first.fault.kind in CERTAIN
    compared = first.fault.kind in _COMPARED
    if last.fault is None:
        return _told(case, last, "good") if not certain else _told(case, first, "unclear")
    if certain and sum(r.fault is not None and r.fault.kind in CERTAIN for r in rounds) < 2:
        return _told(case, first, "unclear")
    if compared and not one_answer:
        return _told(case, first, "unclear") if certain else _told(case, first, "good", quiet=True)
    if not certain and len({_joined(r.trace) for r in rounds}) > 1:
        return _told(case, first, "unclear")
    return _told(case, last, "fault")


def _single(case: StreamCase) -> Request:
    """The request for one choice in one piece."""
    extra = {name: value for name, value in case.request.extra.items() if name != "n"}
    return replace(case.request, extra=extra)


def _asked(
    engine: StreamingEngine, case: StreamCase, whole: Reply, deadline: float
) -> _Round | StreamCheck:
    """One stream with its fault, or why there is none to judge."""
    try:
        trace = engine.trace(case.request, deadline)
    except RequestRefused as error:
        return StreamCheck(case.name, "skipped", says=error.message)
    except AssayError as error:
        if error.finding_id in _UNFINISHED:
            return StreamCheck(case.name, "unfinished", says=error.message)
        return _Round(whole, StreamTrace(), StreamFault("error", error.message))
    if trace.kind == "not_streamed":
        return StreamCheck(case.name, "skipped", says=trace.error)
    if trace.kind == "unfinished":
        return StreamCheck(case.name, "unfinished", says=trace.error)
    judge = choices_fault if case.choices > 1 else stream_fault
    return _Round(whole, trace, judge(whole, trace))


def _texts(reply: Reply) -> tuple[str, ...]:
    calls = tuple(f"{call.name}({call.arguments})" for call in reply.tool_calls)
    return (reply.content, reply.reasoning, *calls)


def _joined(trace: StreamTrace) -> tuple[str, ...]:
    choice = trace.choice()
    calls = tuple(f"{d.index} {d.name} {d.arguments}" for d in choice.calls)
    return (choice.text, choice.thought, *calls)


def _told(case: StreamCase, asked: _Round, state: str, *, quiet: bool = False) -> StreamCheck:
    """The check of one round; `quiet`: its fault is none, since the server has several answers."""
    trace, fault = asked.trace, None if quiet else asked.fault
    event = fault.event if fault is not None else None
    shown = trace.events[event] if event is not None and event < len(trace.events) else ""
    choice = trace.choice()
    noted = asked.fault is None and case.choices == 1
    return StreamCheck(
        case=case.name,
        state=state,
        kind=fault.kind if fault is not None else "",
        says=fault.says[:300] if fault is not None else "",
        event=event,
        event_text=shown,
        events=len(trace.events),
        whole_head=shown_text(asked.whole)[:HEAD_CHARS],
        stream_head=(choice.text or choice.thought)[:HEAD_CHARS],
        notes="; ".join(notes_on(asked.whole, trace)) if noted else "",
    )
