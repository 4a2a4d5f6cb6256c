"""A request as the JSON body that goes to a server."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from assay.engines import Message, Request

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
