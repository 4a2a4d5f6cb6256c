"""The JSON values in the text of a file: a body, JSON lines, or the events of a stream.

What was lost (an event that is no JSON, a value that breaks off) is counted beside the values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from assay.bounded_json import MOST_DEPTH, BoundsError, Decoder, loads
from assay.coherence.python_reprs import python_value

_SSE_LINE = re.compile(r"(?:data|event|id|retry)?:")
_SSE_JSON = re.compile(r"^data: ?(?:\{|\[(?!DONE\]))", re.MULTILINE)
_BETWEEN = re.compile(r"[\s,\0\x1e]*")
_JSON_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*("?)|[{}\[\]]', re.DOTALL)
_DECODER = Decoder(strict=False, numbers="null", halves="keep")
_loads = partial(loads, strict=False, numbers="null", halves="keep")
"""A half of a surrogate pair may find its partner in the next event."""
MOST_WASTED = 4
"""Lengths of the body that may be read in vain."""
MOST_SPREAD = 20
"""Lines over which one event may be spread."""


@dataclass
class Parsed:
    """The JSON values of a text; whether they are the events of a stream; how much of it could not
    be read.
    """

    values: list[Any] = field(default_factory=list)
    stream: bool = False
    lost: int = 0
    breaks_off: bool = False
    """The text ends within a value, which was closed."""
    ended: bool = False
    """The stream says itself that it is done."""


def json_values(body: str) -> Parsed | None:
    """The values of a JSON body, of JSON lines, or of a stream; None if the text is none
    of these.
    """
    lines = [line for line in body[:8000].splitlines() if line.strip()][:50]
    data = [
        line
        for line in lines
        if line.startswith("data:") and line.strip() not in ("data: [DONE]", "data: {}")
    ]
    told_as_json = sum(bool(_SSE_JSON.match(line)) for line in data)
    parsed = Parsed()
    if (
        lines
        and _DATA_PART.match(lines[0])
        and sum(map(bool, map(_DATA_PART.match, lines))) >= 0.8 * len(lines)
    ):
        parsed.stream = True
        parsed.values += _data_parts(body, parsed)
        return parsed if parsed.values else None
    if all(map(_SSE_EMPTY.match, lines)) and any(line.startswith((":", "data:")) for line in lines):
        return Parsed(stream=True, ended=True)
    if _is_text_stream(lines, len(data), told_as_json):
        parsed.stream = True
        parsed.values += _text_events(body, parsed)
    elif (told_as_json or _SSE_JSON.search(body[:8000])) and 2 * sum(
        map(bool, map(_SSE_LINE.match, lines))
    ) > len(lines):
        parsed.stream = True
        parsed.values += _events(body, parsed)
    elif body[:1] in ("{", "["):
        parsed.values += _values(body, parsed)
        if not parsed.values and (value := python_value(body)) is not None:
            return Parsed([value])
    else:
        return None
    return parsed


_DATA_PART = re.compile(r'(?:[03g]:"|[28]:\[|[1479a-fhijk]:\{)')
"""A part of the AI SDK's data stream: the code of its kind, and a JSON value of the type that this
kind has.
"""
_SSE_EMPTY = re.compile(r"(?:data: ?\[DONE\]\s*$|event:|id:|retry:|: ?[A-Za-z ]{0,40}$)")
"""A line of a stream in which nothing is told: its end, names, and comments that keep the
connection open.
"""
_SSE_FIELD = re.compile(r"(?:(?:data|event|id|retry):|:)")


def _data_parts(body: str, parsed: Parsed) -> Iterator[Any]:
    """The parts of the AI SDK's data stream, each with its code."""
    lines = [line for line in body.split("\n") if line.strip()]
    for number, line in enumerate(lines, 1):
        code, _, written = line.partition(":")
        try:
            value = _loads(written)
        except ValueError:
            value = _closed(written) if number == len(lines) and _DATA_PART.match(line) else None
            parsed.breaks_off |= number == len(lines)
        if value is None or not _DATA_PART.match(line):
            parsed.lost += 1
        else:
            parsed.ended = code == "d" or (code == "e" and not value.get("isContinued"))
            yield {"ai_sdk": code, "value": value}


def _is_text_stream(lines: Sequence[str], data: int, told_as_json: int) -> bool:
    """Whether lines are server-sent events whose data is plain text: three of them, or one after a
    name or before [DONE].
    """
    if not lines or 2 * told_as_json > data or not all(map(_SSE_FIELD.match, lines)):
        return False
    named = any(
        line.split() in (["event:", "output"], ["event:", "done"], ["event:", "error"])
        for line in lines[:3]
    )
    return named or data > 2 or (data > 0 and "data: [DONE]" in lines)


def _text_events(body: str, parsed: Parsed) -> Iterator[Any]:
    """Server-sent events whose data is text; several `data:` lines of one event are lines of it."""
    for event in re.split(r"\r?\n\r?\n", body):
        fields = [line.partition(":") for line in event.split("\n")]
        name = next((value.strip() for field, _, value in fields if field == "event"), "")
        data = [
            value.removesuffix("\r").removeprefix(" ")
            for field, _, value in fields
            if field == "data"
        ]
        if data == ["[DONE]"] or name in ("done", "end", "close", "complete"):
            parsed.ended = True
            yield {"sse": "done", "data": ""}
        elif data:
            yield {"sse": name, "data": "\n".join(data)}
    parsed.ended |= "event:" not in body  # without names there is no mark of the end


def _events(body: str, parsed: Parsed) -> Iterator[Any]:
    """The values of server-sent events. One event may be spread over several `data:` lines."""
    pending: list[str] = []
    for line in body.split("\n"):
        payload = (
            line[5:].strip()
            if line.startswith("data:")
            else line.strip()
            if line[:1] == "{"
            else ""
        )
        parsed.ended |= payload == "[DONE]"
        if not payload or payload == "[DONE]":
            if pending and not line.strip():
                parsed.lost, pending = parsed.lost + 1, []
            continue
        for attempt in (payload, "\n".join([*pending, payload])) if pending else (payload,):
            try:
                yield _loads(attempt)
            except ValueError:
                continue
            parsed.lost, pending = parsed.lost + (len(pending) if attempt is payload else 0), []
            break
        else:
            pending.append(payload)
            if len(pending) > MOST_SPREAD:
                parsed.lost, pending = parsed.lost + len(pending), []
    if pending:
        parsed.breaks_off = True
        value = _closed("\n".join(pending))
        parsed.lost += value is None
        if value is not None:
            yield value


def _values(body: str, parsed: Parsed) -> Iterator[Any]:
    """Values one after the other: one body, or one a line. The last may break off."""
    at, wasted = 0, 0
    while at < len(body):
        try:
            value, at = _DECODER.value_at(body, at)
            yield value
            between = _BETWEEN.match(body, at)
            at = between.end() if between else at
            continue
        except json.JSONDecodeError as error:
            wasted += error.pos - at
        except BoundsError:
            parsed.lost += 1
            return
        # What was read in vain is bounded: values may begin within values that break off.
        following = body.find("\n{", at) if wasted <= MOST_WASTED * len(body) else -1
        if following >= 0:
            parsed.lost += 1
            at = following + 1
            continue
        value = _closed(body[at:]) if wasted <= MOST_WASTED * len(body) else None
        if value is None:
            parsed.lost += 1
        else:
            parsed.breaks_off = True
            yield value
        return


def _closed(text: str) -> Any:
    """The value of a JSON text that breaks off, with its open strings and brackets closed; None if
    that fails.
    """
    if text[:1] not in ("{", "["):
        return None
    stack: list[str] = []
    inside = False
    for token in _JSON_TOKEN.finditer(text):
        mark = token.group()
        if mark[0] == '"':
            inside = not token.group(1)
        elif mark in "{[":
            stack.append("}" if mark == "{" else "]")
            if len(stack) > MOST_DEPTH:
                return None
        elif stack:
            stack.pop()
    closing = "".join(reversed(stack))
    text = (
        re.sub(r"\\(?:u[0-9a-fA-F]{0,3})?\Z", "", text) + '"'
        if inside
        else text.rstrip().rstrip(",")
    )
    for ending in ("", ":null", "null", "e", "se", "lse", "alse", "ue", "rue", "l", "ll", "ull"):
        try:  # it breaks off after a key, a colon, or within a word
            return _loads(text + ending + closing)
        except ValueError:
            continue
    return None
