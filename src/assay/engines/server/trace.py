"""One stream of a server as a client sees it: each event with its place, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from assay.bounded_json import loads
from assay.engines.server.errors import RequestRefused
from assay.engines.server.fields import (
    as_count,
    as_name,
    as_object,
    as_text,
    logprobs_of,
    reasoning_of,
)
from assay.engines.server.http import Transport
from assay.engines.server.sse import SseParser
from assay.engines.server.wording import error_message, looks_like_html, one_line
from assay.errors import AssayError

SHOWN = 200
"""Characters of an event that are kept to be shown."""
_HEAD = 4096
_END = "[DONE]"


@dataclass
class StreamedPiece:
    """Text of one field that one event brought; `event` counts events from 0."""

    event: int
    text: str


@dataclass
class CallDelta:
    """One delta of a tool call, with the index exactly as the server sent it."""

    event: int
    index: int | None
    id: str | None
    name: str
    arguments: str


@dataclass
class StreamedChoice:
    """All that the events of one choice brought."""

    content: list[StreamedPiece] = field(default_factory=list)
    reasoning: list[StreamedPiece] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    logprobs: int = 0
    """Log-probabilities of tokens that came."""

    @property
    def text(self) -> str:
        """The content, joined as clients join it."""
        return "".join(piece.text for piece in self.content)

    @property
    def thought(self) -> str:
        """The reasoning, joined as clients join it."""
        return "".join(piece.text for piece in self.reasoning)


@dataclass
class StreamTrace:
    """A stream from its first event to its end."""

    events: list[str] = field(default_factory=list)
    """The beginning of each event's data."""
    choices: dict[int, StreamedChoice] = field(default_factory=dict)
    usage: Mapping[str, Any] = field(default_factory=dict)
    done: int = 0
    """How many end marks came."""
    after_done: int | None = None
    """The first event that came after the end mark."""
    error: str = ""
    """The error that an event reported, or that ended the connection."""
    kind: str = ""
    """What went wrong with the stream as a whole: `error`, `cut`, `web_page`, `not_streamed`,
    `invalid`, `no_events`, or `unfinished` where the time was spent.
    """

    @property
    def completion_tokens(self) -> int | None:
        """Tokens that the stream's usage counts."""
        return as_count(self.usage.get("completion_tokens"))

    def choice(self, index: int = 0) -> StreamedChoice:
        """The choice of this index; an empty one where nothing of it came."""
        return self.choices.get(index) or StreamedChoice()

    def fail(self, kind: str, error: str) -> None:
        """Note the first thing that went wrong."""
        if not self.kind:
            self.kind, self.error = kind, error

    def take(self, data: str) -> None:
        """Take the data of one event."""
        text = data.strip()
        if not text:
            return
        if text == _END:
            self.done += 1
            return
        number = len(self.events)
        self.events.append(text[:SHOWN])
        if self.done and self.after_done is None:
            self.after_done = number
        try:
            chunk = loads(text, numbers="null", halves="keep")
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            self.fail("invalid", f"an event that is not a JSON object: {one_line(text, 80)}")
            return
        if chunk.get("error") or chunk.get("object") == "error":
            self.fail("error", one_line(error_message(chunk)) or "an error without a message")
            return
        self.usage = as_object(chunk.get("usage")) or self.usage
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            if isinstance(choice, dict):
                self._take_choice(choice, number)

    def _take_choice(self, choice: Mapping[str, Any], number: int) -> None:
        index = as_count(choice.get("index", 0))
        kept = self.choices.setdefault(index or 0, StreamedChoice())
        delta = as_object(choice.get("delta"))
        if content := as_text(delta.get("content")) if delta else as_text(choice.get("text")):
            kept.content.append(StreamedPiece(number, content))
        if thought := reasoning_of(delta)[0]:
            kept.reasoning.append(StreamedPiece(number, thought))
        deltas = delta.get("tool_calls")
        for call in deltas if isinstance(deltas, list) else []:
            function = as_object(as_object(call).get("function"))
            arguments = function.get("arguments")
            kept.calls.append(
                CallDelta(
                    number,
                    as_count(as_object(call).get("index")),
                    as_name(as_object(call).get("id")),
                    as_text(function.get("name")),
                    arguments if isinstance(arguments, str) else "",
                )
            )
        if (finish := as_name(choice.get("finish_reason"))) is not None:
            kept.finish_reasons.append(finish)
        kept.logprobs += len(logprobs_of(choice))


def trace_stream(
    transport: Transport, url: str, body: Mapping[str, Any], deadline: float = float("inf")
) -> StreamTrace:
    """POST `body` and record the stream that answers; what goes wrong is a part of the record.

    Args:
        transport: The connection.
        url: The route.
        body: The request; it must ask for a stream.
        deadline: Time by `time.monotonic` after which the rest is not waited for.

    Raises:
        AssayError: The request was refused, or no answer began.
    """
    trace, parser, head = StreamTrace(), SseParser(), b""
    began = False
    try:
        with transport.stream(url, body) as pieces:
            began = True
            for _, piece in pieces:
                head += piece[: max(0, _HEAD - len(head))]
                for data in parser.feed(piece):
                    trace.take(data)
                if time.monotonic() > deadline:
                    trace.fail("unfinished", "the time for this stream was spent")
                    return trace
    except RequestRefused:
        raise
    except AssayError as error:
        if not began or error.finding_id == "server.timeout":
            raise
        if not trace.done:  # after its end mark a stream has told everything
            trace.fail("cut", error.message)
    for data in parser.close():
        trace.take(data)
    if not trace.events and not trace.done:
        text = head.decode("utf-8", "replace")
        if looks_like_html(text):
            trace.fail("web_page", f"a web page instead of a stream: {transport.said(head)}")
        elif text.lstrip().startswith("{"):
            trace.fail("not_streamed", f"one piece instead of a stream: {transport.said(head)}")
        else:
            trace.fail("no_events", f"no server-sent events: {transport.said(head)}")
    elif not trace.done and not any(c.finish_reasons for c in trace.choices.values()):
        trace.fail("cut", f"no finish reason and no end mark after {len(trace.events)} events")
    return trace
