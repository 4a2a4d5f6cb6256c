"""Answers under construction: what the API formats add to, message by message and event
by event.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from assay.bounded_json import join_halves

Value = Mapping[str, Any]
TOKEN = 12
"""Code points of one token, at most: what is longer and comes again is all that came before."""


@dataclass
class Answer:
    """One answer: the text of each field in pieces, and the tool calls by their place in the
    message.
    """

    name: str = ""
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[str, dict[str, str]] = field(default_factory=dict)
    finish_reason: str | None = None
    whole: bool = False
    """Whether the server said that this was all."""

    def call(self, key: Any, name: Any, arguments: Any) -> None:
        """Add a piece of a tool call; arguments that are no string are written as JSON."""
        call = self.calls.setdefault(str(key), {"name": "", "arguments": ""})
        call["name"] = name if isinstance(name, str) and name else call["name"]
        if arguments is not None:
            call["arguments"] += arguments if isinstance(arguments, str) else json.dumps(arguments)

    def grow(self, text: str) -> None:
        """Add content from a stream whose events may each repeat all that came before."""
        before = self.content[0] if len(self.content) == 1 else None
        if before and text.startswith(before) and (len(text) > len(before) or len(text) > TOKEN):
            self.content.clear()
        self.content.append(text)

    @property
    def blank(self) -> bool:
        """Whether nothing at all arrived."""
        return not (any(self.content) or any(self.reasoning) or self.calls)


@dataclass
class Assembly:
    """Answers under construction. Streams whose events carry no id are told apart by their order,
    by `turn`.
    """

    answers: dict[tuple[str, ...], Answer] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    apis: dict[str, int] = field(default_factory=dict)
    turns: dict[tuple[str, ...], int] = field(default_factory=dict)
    turn: int = 0
    open: int = 0
    overlapping: bool = False
    """A stream without ids began before the last one had ended."""
    disorder: bool = False
    """Text came after the event that ended its answer."""
    textless: int = 0
    """Values that are understood and hold no text: scores, images, a task that has not begun."""

    def answer(self, *key: Any) -> Answer:
        """The answer under `key`, begun where there is none."""
        key = tuple(map(str, key))
        return self.answers.setdefault(
            key, Answer(join_halves(" ".join(k for k in key if k not in ("None", "", "turn 1"))))
        )

    def in_turn(self, *key: Any) -> Answer:
        """The answer under `key` that is still open; one that was finished is followed by a new
        one.
        """
        name = tuple(map(str, key))
        found = self.answers.get((*name, f"turn {self.turns.get(name)}"))
        if found is None or found.whole:
            self.turns[name] = self.turns.get(name, 0) + 1
        return self.answer(*name, f"turn {self.turns[name]}")

    def is_open(self, *key: Any) -> bool:
        """Whether `in_turn` would go on with an answer that has begun."""
        name = tuple(map(str, key))
        found = self.answers.get((*name, f"turn {self.turns.get(name)}"))
        return found is not None and not found.whole

    def notice_second_end(self, *key: Any) -> None:
        """An end without a text after the end of a stream: two streams were written in turns, and
        their texts are mixed.
        """
        name = tuple(map(str, key))
        turn = self.turns.get(name, 0)
        last, own = (self.answers.get((*name, f"turn {n}")) for n in (turn - 1, turn))
        if last is not None and own is not None and last.whole and own.whole and own.blank:
            self.overlapping |= sum(map(bool, last.content)) > 1

    def begin(self) -> None:
        """A stream without ids begins."""
        self.overlapping |= self.open > 0
        self.open += 1
        self.turn += 1


def finish(answer: Answer, reason: Any) -> None:
    """An answer came to its end, for a reason in the words of its API."""
    if reason:
        answer.finish_reason, answer.whole = _REASONS.get(str(reason), str(reason)), True


_REASONS = {
    "max_tokens": "length",
    "MAX_TOKENS": "length",
    "max_output_tokens": "length",
    "limit": "length",
    "model_context_window_exceeded": "length",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "end_turn": "stop",
    "eos": "stop",
    "word": "stop",
    "STOP": "stop",
    "COMPLETE": "stop",
    "completed": "stop",
    "tool_use": "tool_calls",
    "tool-calls": "tool_calls",
}


def speech(message: Value, answer: Answer) -> None:
    """Add what a message, or a piece of one, says: content, refusal, reasoning and tool calls."""
    content = message.get("content")
    for place, part in enumerate(content if isinstance(content, list) else (content,)):
        _part(place, part, answer)
    answer.content.append(string(message.get("refusal")))
    names = ("reasoning_content", "reasoning", "thinking", "reasoning_details")
    answer.reasoning.append(next((text for n in names if (text := string(message.get(n)))), ""))
    calls, old = message.get("tool_calls"), message.get("function_call")
    for place, call in enumerate(calls if isinstance(calls, list) else [old]):
        if has(call):
            inner = call["function"] if has(call.get("function")) else call
            answer.call(call.get("index", place), inner.get("name"), inner.get("arguments"))


def _part(place: int, part: Any, answer: Answer) -> None:
    """Add one part of a message's content, of any API."""
    if not isinstance(part, Mapping):
        answer.content.append(string(part))
        return
    kind = str(part.get("type") or "")
    tool = part if kind.endswith("tool_use") else part.get("functionCall") or part.get("toolUse")
    thinks = part.get("thinking") or part.get("reasoningContent")
    if isinstance(tool, Mapping):
        answer.call(place, tool.get("name"), tool.get("input", tool.get("args")))
    elif thinks or part.get("thought") or "reasoning" in kind:
        answer.reasoning.append(string(thinks or part))
    else:
        answer.content.append(string(part))


def string(part: Any) -> str:
    """The text of a part, wherever it keeps it."""
    if isinstance(part, list):
        return "".join(map(string, part))
    if isinstance(part, Mapping):
        return string(
            next(
                (
                    part[n]
                    for n in ("text", "refusal", "reasoningText", "transcript", "summary")
                    if part.get(n)
                ),
                "",
            )
        )
    return part if isinstance(part, str) else ""


def has(value: Any, keys: Iterable[str] = ()) -> TypeGuard[Value]:
    """Whether a value is an object, and holds one of `keys` where any are given."""
    return isinstance(value, Mapping) and (not keys or any(key in value for key in keys))
