"""Tool calls that a model wrote as text, and what an engine's parser left of them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from assay.engines.requests import ToolCall

# Marks between which a family writes the JSON of one call or of several: Hermes and Qwen, Mistral,
# Llama 3.
_BETWEEN = (
    re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL),
    re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])", re.DOTALL),
    re.compile(r"<\|python_tag\|>\s*(\{.*\})(?:<\|eom_id\|>)?", re.DOTALL),
)


_FENCED = re.compile(r"\A\s*```(?:json|tool_call|xml)?\s*\n(.*?)\n?\s*```\s*\Z", re.DOTALL)


# Marks that no answer to a person holds: Hermes, Mistral, Llama 3, Kimi, DeepSeek, Harmony,
# Qwen3-Coder, MiniMax, GLM.
_MARKS = re.compile(
    r"</?tool_call>?|<tool_cal|\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool_calls?_(?:section_)?(?:begin|end)\|>"
    r"|<\|tool_call_argument_begin\|>|<｜tool[▁_]|<\|tool▁|to=functions\.\w|<\|constrain\|>|<\|call\|>"
    r"|</?function(?:_call|=\w+)>|<parameter=|<(?:minimax:)?invoke name=|<arg_key>|</?arg_value>"
)


# `"arguments": {…` is a part of a call wherever it stands, a schema that was offered and is echoed
# is none.
_ARGUMENTS = re.compile(
    r"[\"'](?:arguments|parameters)[\"']\s*:\s*[\"']?\s*\{(?!\s*[\"']type[\"'])"
)


_INLINE_CODE = re.compile(r"(?<!`)`[^`\n]+`(?!`)")


EXCERPT = 160
"""Characters of a text that show the parts of a call."""


@dataclass(frozen=True)
class CallText:
    """Whole calls that a text holds, the text around them, and whether marks of a family stood
    around them.
    """

    calls: tuple[ToolCall, ...]
    rest: str
    marked: bool


def read_calls(text: str, names: Collection[str], *, plain: bool = True) -> CallText:
    """The whole calls of the tools `names` that `text` holds.

    Between marks they may stand anywhere; as plain JSON (read unless `plain` is False) the text
    must be nothing else, but for a code fence around it.
    """
    for pattern in _BETWEEN:
        pieces = pattern.findall(text)
        calls = tuple(call for piece in pieces for call in _calls_of(piece, names))
        if calls and len(calls) >= len(pieces):
            return CallText(_numbered(calls), pattern.sub("", text).strip(), marked=True)
    if plain:
        fenced = _FENCED.match(text)
        calls = tuple(_calls_of(fenced.group(1) if fenced else text, names))
        if calls:
            return CallText(_numbered(calls), "", marked=False)
    return CallText((), text, marked=False)


def call_remains(text: str, names: Collection[str]) -> str:
    """The place in `text` where parts of a call of one of `names` stand; empty where there are
    none.

    Whole calls in plain JSON are no remains (`read_calls` reads them), nor is a name or a mark
    quoted as code.
    """
    if not text.strip() or (read_calls(text, names).calls and not _MARKS.search(text)):
        return ""
    prose = _INLINE_CODE.sub(lambda found: " " * len(found.group()), text)
    called = "|".join(re.escape(name) for name in names) or r"(?!)"
    patterns = (
        _MARKS,
        _ARGUMENTS,
        re.compile(rf"[\"']name[\"']\s*:\s*[\"'](?:{called})[\"'](?!\s*,\s*[\"']description[\"'])"),
        re.compile(rf"\A\s*\[?\s*(?:{called})\s*\((?:[^()\n]|\([^()\n]*\))*\)?\s*\]?\s*\Z"),
    )
    starts = [found.start() for pattern in patterns if (found := pattern.search(prose))]
    if not starts:
        return ""
    first = max(0, min(starts) - 20)
    return text[first : first + EXCERPT]


def _calls_of(piece: str, names: Collection[str]) -> Iterator[ToolCall]:
    """The calls in one piece of JSON: an object, a list of objects, or an object a line; none where
    one is not whole.
    """
    values: list[Any] = []
    piece, decoder, at = piece.strip(), json.JSONDecoder(), 0
    try:
        while at < len(piece):
            value, at = decoder.raw_decode(piece, at)
            values += value if isinstance(value, list) else [value]
            at += len(piece[at:]) - len(piece[at:].lstrip(" \t\r\n;,"))
    except (ValueError, RecursionError):
        return
    found = [_call_of(value, names) for value in values]
    if all(found):
        yield from (call for call in found if call is not None)


def _call_of(value: Any, names: Collection[str]) -> ToolCall | None:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, dict):
        return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))
    return ToolCall(value["name"], arguments) if isinstance(arguments, str) else None


def _numbered(calls: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(call.name, call.arguments, f"call_{i}") for i, call in enumerate(calls))
