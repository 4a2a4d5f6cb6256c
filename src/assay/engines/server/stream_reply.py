"""The reply in a streamed answer, with the time at which each token arrived."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from assay.bounded_json import join_halves, loads
from assay.engines import OnText, Reply, TextPiece, Timing, ToolCall
from assay.engines.server.endpoint import without_credentials
from assay.engines.server.errors import (
    InvalidStream,
    NotJson,
    NotStreamed,
    ServerInconclusive,
    StreamCut,
    StreamFailed,
)
from assay.engines.server.fields import (
    as_arguments,
    as_count,
    as_name,
    as_object,
    as_text,
    first_choice,
    logprobs_of,
    reasoning_of,
    stop_reason_of,
)
from assay.engines.server.http import Transport
from assay.engines.server.sse import SseParser
from assay.engines.server.wording import error_message, looks_like_html, one_line


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
            self._stop_reason = stop_reason_of(choice)
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
