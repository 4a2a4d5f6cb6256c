"""Answers of both routes, whole or streamed, as one `Reply`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from assay.engines.base import OnText, Reply, TextPiece, Timing, ToolCall
from assay.engines.server.errors import NotJson, StreamCut, StreamFailed
from assay.engines.server.excerpt import error_message, one_line
from assay.engines.server.fields import (
    as_arguments,
    as_count,
    as_name,
    as_object,
    as_text,
    first_choice,
    logprobs_of,
    reasoning_of,
)


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
    stop = choice.get("stop_reason")
    return Reply(
        content=as_text(message.get("content")) if message else as_text(choice.get("text")),
        reasoning=reasoning,
        reasoning_field=reasoning_field,
        tool_calls=tuple(_call(as_object(c)) for c in calls) if isinstance(calls, list) else (),
        finish_reason=as_name(choice.get("finish_reason")),
        stop_reason=stop if isinstance(stop, str | int) else None,
        prompt_tokens=as_count(usage.get("prompt_tokens")),
        completion_tokens=as_count(usage.get("completion_tokens")),
        raw_usage=usage,
        token_logprobs=tuple(logprobs_of(choice)) or None,
    )


def _call(call: Mapping[str, Any]) -> ToolCall:
    function = as_object(call.get("function"))
    return ToolCall(
        name=as_text(function.get("name")),
        arguments=as_arguments(function.get("arguments")),
        id=as_name(call.get("id")),
    )


class _CallInProgress:
    """A tool call whose deltas still arrive."""

    def __init__(self) -> None:
        self.name = ""
        self.arguments = ""
        self.id: str | None = None

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


class StreamAssembler:
    """Puts the chunks of one stream together and notes when its tokens arrived.

    A chunk is an arrival of tokens if it carries text, or if the server's running count has grown with it: text can
    stay empty while tokens are generated (special tokens are stripped, half a character is held back). Without a
    running count the chunk with the finish reason is an arrival too, being the end-of-text token that usage counts.
    """

    def __init__(self, where: str, started: float, on_text: OnText | None = None) -> None:
        self._where = where
        self._started = started
        self._on_text = on_text
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._reasoning_field: str | None = None
        self._calls: dict[int, _CallInProgress] = {}
        self._logprobs: list[float] = []
        self._usage: Mapping[str, Any] = {}
        self._finish_reason: str | None = None
        self._stop_reason: str | int | None = None
        self._counted = 0
        self._arrivals: list[float] = []
        self._first_chunks = 0
        self._first_counted = 0
        self._first_text = ""
        self.is_done = False
        """Whether the server's end mark has come."""
        self.chunks = 0
        self.running_counts = False
        """Whether the server counts tokens with every chunk."""

    @property
    def text(self) -> str:
        """All text so far, reasoning first."""
        return "".join(self._reasoning) + "".join(self._content)

    @property
    def first_text(self) -> str:
        """The text that had arrived with the first tokens."""
        return self._first_text

    def done(self) -> None:
        """The server said that the stream is complete."""
        self.is_done = True

    def feed(self, chunk: Mapping[str, Any], at: float) -> None:
        """Take one chunk, which arrived at the monotonic time `at`."""
        if chunk.get("error") or chunk.get("object") == "error":
            said = one_line(error_message(chunk)) or "no message"
            raise StreamFailed(
                f"{self._where} reported an error in its stream: {said}", partial_text=self.text
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
            stop = choice.get("stop_reason")
            self._stop_reason = stop if isinstance(stop, str | int) else None
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
            self._first_text += added

    def _texts(self, choice: Mapping[str, Any], delta: Mapping[str, Any]) -> str:
        """Collect the texts of a chunk, tell the listener, and return them joined."""
        content = as_text(delta.get("content")) if delta else as_text(choice.get("text"))
        reasoning, field = reasoning_of(delta)
        called = ""
        deltas = delta.get("tool_calls")
        for position, item in enumerate(deltas if isinstance(deltas, list) else []):
            index = as_count(as_object(item).get("index"))
            key = position if index is None else index
            called += self._calls.setdefault(key, _CallInProgress()).add(as_object(item))
        if reasoning:
            self._reasoning.append(reasoning)
            self._reasoning_field = field
            self._tell("reasoning", reasoning)
        if content:
            self._content.append(content)
            self._tell("content", content)
        if called:
            self._tell("tool_call", called)
        return reasoning + content + called

    def _tell(self, field: Literal["content", "reasoning", "tool_call"], text: str) -> None:
        if self._on_text is not None:
            self._on_text(TextPiece(field, text))

    def reply(self, finished: float) -> Reply:
        """The reply, once the stream has ended; raises if it ended before its time."""
        if not self.is_done and self._finish_reason is None:
            raise StreamCut(
                f"{self._where} ended its stream without a finish reason after {self.chunks} chunks",
                evidence={"chunks": self.chunks, "characters": len(self.text)},
                partial_text=self.text,
            )
        return Reply(
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            reasoning_field=self._reasoning_field,
            tool_calls=tuple(
                ToolCall(call.name, call.arguments, call.id) for _, call in sorted(self._calls.items())
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
            started=self._started,
            first_token=self._arrivals[0],
            last_token=self._arrivals[-1],
            first_chunk_tokens=self._first_counted if counted else self._first_chunks,
            chunk_times=tuple(self._arrivals),
            first_chunk_source="usage" if counted else "assumed",
            finished=finished,
        )
