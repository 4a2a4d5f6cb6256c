"""What is asked of an engine and what it answers: messages, a request, a timed reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool as the model wrote it; `arguments` is the raw text, which need not be
    valid JSON.
    """

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True)
class Message:
    """One turn of a conversation, in the roles of the OpenAI chat API."""

    role: str
    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """One generation. Exactly one of `messages` (chat) and `prompt` (text or token ids, completed
    as it is) is set.

    `tools` are OpenAI tool schemas. `ignore_eos` asks for exactly `max_tokens` tokens where the
    engine can. `extra` is passed through as it is (for a server: more fields of the JSON body).
    """

    messages: tuple[Message, ...] | None = None
    prompt: str | tuple[int, ...] | None = None
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("a request needs exactly one of messages and prompt")
        if self.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        if self.tools and self.messages is None:
            raise ValueError("tools need messages, not a prompt")


@dataclass(frozen=True)
class Timing:
    """When the pieces of one streamed reply arrived, in seconds of one monotonic clock.

    `chunk_times` are the arrivals of the chunks that carried text; the first and the last of them
    are `first_token` and `last_token`. `first_chunk_tokens` counts the tokens that had arrived at
    `first_token` (a speculating server sends several at once); `first_chunk_source` says how it is
    known: from the server's usage counts, by tokenizing the text, or assumed to be 1. `finished` is
    when the reply was complete, trailing usage included.
    """

    started: float
    first_token: float
    last_token: float
    first_chunk_tokens: int
    chunk_times: tuple[float, ...]
    first_chunk_source: Literal["usage", "tokenize", "assumed"] = "assumed"
    finished: float | None = None

    @property
    def ttft(self) -> float:
        """Time to first token, in seconds."""
        return self.first_token - self.started

    @property
    def decode_seconds(self) -> float:
        """Seconds from the first token to the last."""
        return self.last_token - self.first_token

    def decode_tokens_per_s(self, completion_tokens: int) -> float | None:
        """Decode speed: (n − tokens in the first chunk) / (t_last − t_first); None where there was
        no decode.
        """
        tokens = completion_tokens - self.first_chunk_tokens
        if tokens <= 0 or self.decode_seconds <= 0.0:
            return None
        return tokens / self.decode_seconds

    def time_per_output_token(self, completion_tokens: int) -> float | None:
        """Mean inter-token latency in seconds, the inverse of the decode speed."""
        speed = self.decode_tokens_per_s(completion_tokens)
        return None if speed is None else 1.0 / speed


GIVEN_UP = "given_up"
"""The finish reason of a reply that was not waited for to its end."""


@dataclass(frozen=True)
class Reply:
    """What an engine answered. Token counts are the engine's own (None where it does not say).

    `reasoning_field` is the field in which a server sent the reasoning (`reasoning` or
    `reasoning_content`). `token_logprobs` are those of the generated tokens, where they were asked
    for and came.
    """

    content: str
    finish_reason: str | None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    timing: Timing | None = None
    raw_usage: Mapping[str, Any] = field(default_factory=dict)
    reasoning_field: str | None = None
    token_logprobs: tuple[float, ...] | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class TextPiece:
    """One piece of a streamed reply as it arrives, and the field it belongs to."""

    field: Literal["content", "reasoning", "tool_call"]
    text: str


OnText = Callable[[TextPiece], None]
"""Called with each piece of a streamed reply, on the thread that streams."""
