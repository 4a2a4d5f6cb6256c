"""Objects of client libraries, dicts and bytes as Python prints them."""

from __future__ import annotations

import ast
import re
from typing import Any


def literal(source: str, otherwise: str) -> str:
    """The text that a Python literal holds; `otherwise` where it is none."""
    try:
        value = ast.literal_eval(source)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return otherwise
    return (
        value.decode(errors="replace")
        if isinstance(value, bytes)
        else value
        if isinstance(value, str)
        else ""
    )


MOST_LITERAL = 1 << 20
"""Code points of a Python literal that is read: its syntax tree is a hundred times as large."""
_PYTHON = re.compile(
    r"\A\[?(?:\w{1,60}\.){0,8}\w{0,60}(?:Completion|Message|Response|Output|Chunk|Reply)\w{0,60}\("
    r"\s*\w{1,60}="
)
_PYTHON_CHOICE = re.compile(r"(?=\b(?:Choices?|CompletionOutput)\((?!delta=))")
_STRING = (
    r"\"\"\".*?\"\"\"|'''.*?'''|'[^'\\]*(?:\\.[^'\\]*)*'|\"[^\"\\]*(?:\\.[^\"\\]*)*\"|None|\w+"
)
_PYTHON_FIELD = re.compile(
    rf"\b(content|text|reasoning_content|reasoning|thinking|arguments|name|finish_reason|stop_reason)=({_STRING})",
    re.DOTALL,
)


def python_fields(body: str) -> list[dict[str, str]] | None:
    """What an object of a client library says, as Python prints it, one dict a choice; None if the
    text is no such object.

    >>> python_fields("ChatCompletion(id='1', choices=[Choice(message=Message(content='Hi'))])")
    [{'content': 'Hi'}]
    """
    if not _PYTHON.match(body):
        return None
    found: list[dict[str, str]] = []
    for part in _PYTHON_CHOICE.split(body):
        said: dict[str, str] = {}
        for name, source in _PYTHON_FIELD.findall(part):
            known = {
                "text": "content",
                "reasoning_content": "reasoning",
                "thinking": "reasoning",
            }.get(name, name)
            known = "reason" if name.endswith("_reason") else known
            value = "" if source == "None" else literal(source, source)
            if known in ("reason", "name"):
                said[known] = value or said.get(known, "")
            else:
                said[known] = said.get(known, "") + value
        if said.keys() & {"content", "reasoning", "arguments"}:
            found.append(said)
    return found


def python_value(body: str) -> Any:
    """The value of a dict or list as Python prints it; None if it is none."""
    if len(body) > MOST_LITERAL or re.match(r"\[?\{\s*'", body) is None:
        return None
    try:
        return ast.literal_eval(body)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
