"""The reply in an answer that came in one piece."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assay.engines import Reply, ToolCall
from assay.engines.server.errors import NotJson
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
from assay.engines.server.wording import error_message, one_line


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
        stop_reason=stop_reason_of(choice),
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
