"""Single values of a server's JSON, taken only where they are what they should be."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

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
    """Log-probabilities of the generated tokens in a choice, in the chat or the
    completions shape.
    """
    holder = as_object(choice.get("logprobs"))
    content = holder.get("content")
    values = (
        [as_object(item).get("logprob") for item in content]
        if isinstance(content, list)
        else holder.get("token_logprobs")
    )
    return [n for n in map(as_number, values if isinstance(values, list) else []) if n is not None]


def stop_reason_of(choice: Mapping[str, Any]) -> str | int | None:
    """What stopped a choice: a stop string, a token id, or None."""
    stop = choice.get("stop_reason")
    return stop if isinstance(stop, str | int) else None
