"""What goes to a server and comes back: a request as its JSON body, an answer, whole or streamed,
as one `Reply`.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from assay.bounded_json import join_halves, loads
from assay.engines import Message, OnText, Reply, Request, TextPiece, Timing, ToolCall
from assay.engines.server.http import (
    InvalidStream,
    NotJson,
    NotStreamed,
    ServerInconclusive,
    StreamCut,
    StreamFailed,
    Transport,
    error_message,
    looks_like_html,
    one_line,
    without_credentials,
)

Route = Literal["chat/completions", "completions"]
CHAT: Route = "chat/completions"
COMPLETIONS: Route = "completions"

NEUTRAL: Mapping[str, float | int] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "top_k": -1,
}
"""Sampling fields with the value that switches them off.

A server fills in what a request leaves out from its own or the model's defaults; a penalty among
them would hide the loops that assay looks for.
"""

STREAM_OPTIONS: Mapping[str, bool] = {"include_usage": True, "continuous_usage_stats": True}


@dataclass(frozen=True)
class Dialect:
    """What one route of one server accepts beyond the fields that every server must know."""

    neutral: Mapping[str, float | int] = field(default_factory=lambda: dict(NEUTRAL))
    stream_options: Mapping[str, bool] = field(default_factory=lambda: dict(STREAM_OPTIONS))
    seed: bool = True

    @property
    def optional(self) -> tuple[str, ...]:
        """The body fields that can be left out."""
        return (*self.neutral, *(("seed",) if self.seed else ()))

    def keeping(self, names: Collection[str]) -> Dialect:
        """The dialect with only those of its optional fields."""
        return Dialect(
            neutral={name: value for name, value in self.neutral.items() if name in names},
            stream_options=self.stream_options,
            seed=self.seed and "seed" in names,
        )

    def to_json(self) -> dict[str, Any]:
        """What is sent, for the record."""
        return {
            "neutral": dict(self.neutral),
            "stream_options": dict(self.stream_options),
            "seed": self.seed,
        }


def route_of(request: Request) -> Route:
    """The route that a request takes."""
    return CHAT if request.messages is not None else COMPLETIONS


def body_of(request: Request, model: str, dialect: Dialect, *, stream: bool) -> dict[str, Any]:
    """The JSON body of a request; `request.extra` comes last and overrides."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        **dialect.neutral,
    }
    if request.messages is not None:
        body["messages"] = [_message_json(message) for message in request.messages]
    else:
        body["prompt"] = (
            request.prompt if isinstance(request.prompt, str) else list(request.prompt or ())
        )
    if request.seed is not None and dialect.seed:
        body["seed"] = request.seed
    if request.stop:
        body["stop"] = list(request.stop)
    if request.ignore_eos:
        body["ignore_eos"] = True
    if request.tools:
        body["tools"] = [dict(tool) for tool in request.tools]
    if stream:
        body["stream"] = True
        if dialect.stream_options:
            body["stream_options"] = dict(dialect.stream_options)
    body.update(request.extra)
    return body


def _message_json(message: Message) -> dict[str, Any]:
    """A message in the form of the OpenAI chat API."""
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "id": call.id or f"call_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(message.tool_calls)
        ]
    optional = {"tool_call_id": message.tool_call_id, "name": message.name}
    return out | {name: value for name, value in optional.items() if value is not None}


class SseParser:
    """Turns pieces of a byte stream into the `data` of its server-sent events (WHATWG HTML, section
    9.2.6).

    The bytes may be cut anywhere. Lines end in LF, CRLF or CR; several `data:` lines of one event
    are joined by LF; comments and other fields are skipped. The specification drops an event that
    the end of the stream cuts off; `close` returns it nevertheless, since many servers leave out
    the last empty line.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._text = ""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> Iterator[str]:
        """The events that `piece` completes."""
        new = self._decoder.decode(piece)
        whole = (
            "\n" in new or "\r" in self._text[-1:] + new
        )  # else a long line would be searched again with every piece
        self._text += new
        if whole:
            # A CR at the very end may be half of a CRLF.
            *lines, self._text = re.split(r"\r\n|\n|\r(?!\Z)", self._text)
            yield from self._events(lines)

    def close(self) -> Iterator[str]:
        """The event, if any, that the end of the stream leaves open."""
        text, self._text = self._text + self._decoder.decode(b"", final=True), ""
        yield from self._events([*re.split(r"\r\n|\n|\r", text), ""])

    def _events(self, lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            name, _, value = line.partition(":")
            if name == "data":
                self._data.append(value.removeprefix(" "))
            elif not line and self._data:
                data, self._data = "\n".join(self._data), []
                yield data


_LARGEST_COUNT = 2**53


def as_object(value: Any) -> Mapping[str, Any]:
    """`value` if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_text(value: Any) -> str:
    """Text of a content field: a string, null, or a list of parts of which those of type text are
    joined.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(as_text(part.get("text")) for part in value if isinstance(part, dict))
    return ""


def as_name(value: Any) -> str | None:
    """`value` if it is a string."""
    return value if isinstance(value, str) else None


def as_count(value: Any) -> int | None:
    """A token count: a whole number of at least 0 that a float holds exactly."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 0 <= value <= _LARGEST_COUNT and int(value) == value else None


def as_number(value: Any) -> float | None:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def as_arguments(value: Any) -> str:
    """Arguments of a tool call as raw text; some servers send the object itself."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def first_choice(answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The choice with index 0; None if the answer has none."""
    choices = answer.get("choices")
    if not isinstance(choices, list):
        return None
    return next((c for c in choices if isinstance(c, dict) and c.get("index", 0) == 0), None)


def reasoning_of(part: Mapping[str, Any]) -> tuple[str, str | None]:
    """The reasoning in a message or a delta, and the name of the field that held it."""
    for name in ("reasoning", "reasoning_content"):
        text = as_text(part.get(name))
        if text:
            return text, name
    return "", None


def logprobs_of(choice: Mapping[str, Any]) -> list[float]:
    """Log-probabilities of the generated tokens in a choice, in the chat or the completions shape."""
    holder = as_object(choice.get("logprobs"))
    content = holder.get("content")
    values = (
        [as_object(item).get("logprob") for item in content]
        if isinstance(content, list)
        else holder.get("token_logprobs")
    )
    return [n for n in map(as_number, values if isinstance(values, list) else []) if n is not None]


# Answers of both routes.


def whole_reply(answer: Any, where: str) -> Reply:
    """The reply in a complete answer of either route."""
    choice = first_choice(as_object(answer))
    if choice is None:
        said = one_line(error_message(answer)) or "no choices in it"
        raise NotJson(f"{where} answered JSON that is no completion: {said}")
    message = as_object(choice.get("message"))
    reasoning, reasoning_field = reasoning_of(message)
    usage = as_object(as_object(answer).get("usage"))
    calls = message.get("tool_calls")
    return Reply(
        content=as_text(message.get("content")) if message else as_text(choice.get("text")),
        reasoning=reasoning,
        reasoning_field=reasoning_field,
        tool_calls=tuple(_call(as_object(c)) for c in calls) if isinstance(calls, list) else (),
        finish_reason=as_name(choice.get("finish_reason")),
        stop_reason=_stop_reason(choice),
        prompt_tokens=as_count(usage.get("prompt_tokens")),
        completion_tokens=as_count(usage.get("completion_tokens")),
        raw_usage=usage,
        token_logprobs=tuple(logprobs_of(choice)) or None,
    )


def _stop_reason(choice: Mapping[str, Any]) -> str | int | None:
    stop = choice.get("stop_reason")
    return stop if isinstance(stop, str | int) else None


def _call(call: Mapping[str, Any]) -> ToolCall:
    function = as_object(call.get("function"))
    return ToolCall(
        name=as_text(function.get("name")),
        arguments=as_arguments(function.get("arguments")),
        id=as_name(call.get("id")),
    )


@dataclass
class _CallInProgress:
    """A tool call whose deltas still arrive."""

    name: str = ""
    arguments: str = ""
    id: str | None = None

    def add(self, delta: Mapping[str, Any]) -> str:
        """Take one delta; returns the text that it added."""
        function = as_object(delta.get("function"))
        name = as_text(function.get("name"))
        # Some servers repeat the whole name in every delta.
        added = "" if name == self.name else name
        self.name += added
        arguments = as_arguments(function.get("arguments"))
        self.arguments += arguments
        self.id = self.id or as_name(delta.get("id"))
        return added + arguments


@dataclass
class StreamAssembler:
    """Puts the chunks of one stream together and notes when its tokens arrived.

    A chunk is an arrival of tokens if it carries text, or if the server's running count has grown
    with it: text can stay empty while tokens are generated (special tokens are stripped, half a
    character is held back). Without a running count the chunk with the finish reason is an arrival
    too, being the end-of-text token that usage counts.
    """

    where: str
    started: float
    on_text: OnText | None = None
    is_done: bool = False
    """Whether the server's end mark has come."""
    chunks: int = 0
    running_counts: bool = False
    """Whether the server counts tokens with every chunk."""
    first_text: str = ""
    """The text that had arrived with the first tokens."""
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _reasoning_field: str | None = None
    _calls: dict[int, _CallInProgress] = field(default_factory=dict)
    _logprobs: list[float] = field(default_factory=list)
    _usage: Mapping[str, Any] = field(default_factory=dict)
    _finish_reason: str | None = None
    _stop_reason: str | int | None = None
    _counted: int = 0
    _arrivals: list[float] = field(default_factory=list)
    _first_chunks: int = 0
    _first_counted: int = 0

    @property
    def text(self) -> str:
        """All text so far, reasoning first."""
        return join_halves("".join(self._reasoning) + "".join(self._content))

    def feed(self, chunk: Mapping[str, Any], at: float) -> None:
        """Take one chunk, which arrived at the monotonic time `at`."""
        if chunk.get("error") or chunk.get("object") == "error":
            said = one_line(error_message(chunk)) or "no message"
            raise StreamFailed(
                f"{self.where} reported an error in its stream: {said}", partial_text=self.text
            )
        self.chunks += 1
        usage = as_object(chunk.get("usage"))
        if usage:
            self._usage = usage
        choice = first_choice(chunk)
        if choice is None:
            return
        delta = as_object(choice.get("delta"))
        added = self._texts(choice, delta)
        self._logprobs += logprobs_of(choice)
        finish = as_name(choice.get("finish_reason"))
        if finish is not None:
            self._finish_reason = finish
            self._stop_reason = _stop_reason(choice)
        counted = as_count(usage.get("completion_tokens")) if usage else None
        if counted is not None and finish is None:
            self.running_counts = True
        grown = counted is not None and counted > self._counted
        ends = finish is not None and not self.running_counts and bool(self._arrivals)
        if added or grown or ends:
            self._arrive(at, added, counted)

    def _arrive(self, at: float, added: str, counted: int | None) -> None:
        self._arrivals.append(at)
        if counted is not None:
            self._counted = max(self._counted, counted)
        # Chunks of one network read share their time: together they are what had arrived first.
        if at == self._arrivals[0]:
            self._first_chunks += 1
            self._first_counted = self._counted
            self.first_text += added

    def _texts(self, choice: Mapping[str, Any], delta: Mapping[str, Any]) -> str:
        """Collect the texts of a chunk, tell the listener, and return them joined."""
        content = as_text(delta.get("content")) if delta else as_text(choice.get("text"))
        reasoning, name = reasoning_of(delta)
        called = ""
        deltas = delta.get("tool_calls")
        for position, item in enumerate(deltas if isinstance(deltas, list) else []):
            index = as_count(as_object(item).get("index"))
            key = position if index is None else index
            called += self._calls.setdefault(key, _CallInProgress()).add(as_object(item))
        self._content.append(content)
        self._reasoning.append(reasoning)
        self._reasoning_field = name or self._reasoning_field
        pieces = (
            TextPiece("reasoning", reasoning),
            TextPiece("content", content),
            TextPiece("tool_call", called),
        )
        for piece in pieces:
            if piece.text and self.on_text is not None:
                self.on_text(piece)
        return reasoning + content + called

    def reply(self, finished: float) -> Reply:
        """The reply, once the stream has ended; raises if it ended before its time."""
        if not self.is_done and self._finish_reason is None:
            raise StreamCut(
                f"{self.where} ended its stream without a finish reason after {self.chunks} chunks",
                evidence={"chunks": self.chunks, "characters": len(self.text)},
                partial_text=self.text,
            )
        return Reply(
            content=join_halves("".join(self._content)),
            reasoning=join_halves("".join(self._reasoning)),
            reasoning_field=self._reasoning_field,
            tool_calls=tuple(
                ToolCall(join_halves(call.name), join_halves(call.arguments), call.id)
                for _, call in sorted(self._calls.items())
            ),
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            prompt_tokens=as_count(self._usage.get("prompt_tokens")),
            completion_tokens=as_count(self._usage.get("completion_tokens")),
            raw_usage=self._usage,
            token_logprobs=tuple(self._logprobs) or None,
            timing=self._timing(finished),
        )

    def _timing(self, finished: float) -> Timing | None:
        if not self._arrivals:
            return None
        counted = self._first_counted > 0
        return Timing(
            started=self.started,
            first_token=self._arrivals[0],
            last_token=self._arrivals[-1],
            first_chunk_tokens=self._first_counted if counted else self._first_chunks,
            chunk_times=tuple(self._arrivals),
            first_chunk_source="usage" if counted else "assumed",
            finished=finished,
        )


_HEAD = 4096
_END = "[DONE]"


def stream_reply(
    transport: Transport, url: str, body: Mapping[str, Any], on_text: OnText | None = None
) -> tuple[Reply, StreamAssembler]:
    """POST `body` and put the stream that answers together; the assembler tells how the server
    counts.
    """
    parser = SseParser()
    head = b""
    where = without_credentials(url)
    with transport.stream(url, body) as pieces:
        assembler = StreamAssembler(where, pieces.started, on_text)
        try:
            for at, piece in pieces:
                if len(head) < _HEAD:
                    head += piece[:_HEAD]
                for data in parser.feed(piece):
                    _take(data, at, assembler, where)
        except ServerInconclusive as exc:
            # After its end mark a stream has told everything, however it closes.
            if not assembler.is_done:
                exc.partial_text = assembler.text
                raise
    for data in parser.close():
        _take(data, time.monotonic(), assembler, where)
    if assembler.chunks == 0 and not assembler.is_done:
        raise _no_events(transport, head, where)
    return assembler.reply(time.monotonic()), assembler


def _take(data: str, at: float, assembler: StreamAssembler, where: str) -> None:
    text = data.strip()
    if not text:
        return
    if text == _END:
        assembler.is_done = True
        return
    try:
        chunk = loads(text, numbers="null", halves="keep")
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise InvalidStream(
            f"{where} streams an event that is not a JSON object: {one_line(text, 80)}"
        )
    assembler.feed(chunk, at)


def _no_events(transport: Transport, head: bytes, where: str) -> InvalidStream | NotJson:
    """The error for an answer without a single event."""
    said = transport.said(head)
    if looks_like_html(head.decode("utf-8", "replace")):
        return NotJson(f"{where} answered a web page instead of a stream: {said}")
    if head.lstrip().startswith(b"{"):
        return NotStreamed(f"{where} answered in one piece, though a stream was asked for: {said}")
    return InvalidStream(f"{where} answered no server-sent events: {said}")
