"""Grade one chat-completion (or text-completion) response, as the JSON object that a server sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from assay.coherence.grading import Grade, Label, grade

_WORST_FIRST = (Label.DEGENERATE, Label.EMPTY, Label.TRUNCATED_REASONING, Label.OK)


RESPONSES = ("chat.completion", "text_completion")
"""What a server writes as `object` into a response."""


def is_completion(value: Any) -> bool:
    """Whether a JSON value is a server's response, and not a model's answer that happens to be JSON."""
    choices = value.get("choices") if isinstance(value, Mapping) else None
    if not isinstance(choices, Sequence) or isinstance(choices, str) or not choices:
        return False
    return all(
        isinstance(c, Mapping) and (isinstance(c.get("message"), Mapping) or "text" in c) for c in choices
    )


def grade_completion(response: Mapping[str, Any]) -> Grade:
    """The grade of a response; of several choices the worst.

    `reasoning` and `reasoning_content` are one field under two names. Text completions (`text`) are content.

    >>> grade_completion({"choices": [{"finish_reason": "stop", "message": {"content": None}}]}).label.value
    'empty'
    """
    grades = [_grade_choice(choice) for choice in response["choices"]]
    return min(grades, key=lambda g: _WORST_FIRST.index(g.label))


def _grade_choice(choice: Mapping[str, Any]) -> Grade:
    message = _message(choice)
    return grade(
        _plain(message.get("content")),
        reasoning=_reasoning(message),
        tool_calls=_calls(message),
        finish_reason=reason if isinstance(reason := choice.get("finish_reason"), str) else None,
    )


def _message(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    message = choice.get("message")
    return message if isinstance(message, Mapping) else {"content": choice.get("text")}


def _reasoning(message: Mapping[str, Any]) -> str:
    return _plain(message.get("reasoning") or message.get("reasoning_content"))


def _calls(message: Mapping[str, Any]) -> Sequence[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else ()


def _plain(content: Any) -> str:
    """Text of a content field: a string, or the text parts of a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return ""


def graded_part(response: Mapping[str, Any], result: Grade) -> str:
    """The text that decided `result`, a grade of this response."""
    for choice in response["choices"]:
        if _grade_choice(choice) == result:
            message = _message(choice)
            if result.part == "reasoning":
                return _reasoning(message)
            return _plain(message.get("content"))
    return ""
