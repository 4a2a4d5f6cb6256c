"""Read one file of model output in bounded memory: its bytes as text, and the JSON values of a body
or a stream.

What was odd (broken bytes, NULs, an event that is no JSON, a value that breaks off) is kept beside
what was read.
"""

from __future__ import annotations

import ast
import codecs
import json
import os
import re
import select
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from assay.errors import AssayError

MAX_BYTES = 16 * 2**20
"""Bytes of one file that are read; of a longer one the beginning is graded, and the report says so.
"""
FIFO_WAIT_S = 10.0
"""Seconds that a named pipe may stay silent."""
_ALLOWED_INVALID = 0.1
_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_HOLE = re.compile(rb"\A\0+|\0{16,}|\0+\Z")
_INNER_NUL = re.compile(
    rb"(?<=[^}\]\n\0])\0{1,3}(?=[^{\[\n\0])"
)  # elsewhere one may stand between two values
_CONTROL = re.compile(rb"[\x01-\x08\x0e-\x1a\x7f]")
LEAST_BESIDE_HOLES = 16


@dataclass(frozen=True)
class Reading:
    """The text of a file, and what was odd about its bytes."""

    text: str
    truncated: bool = False
    invalid_bytes: int = 0
    first_invalid: int | None = None
    """Byte offset of the first byte that is not UTF-8."""
    nul_bytes: int = 0
    """NUL bytes that were left out: holes that a log rotation or a crash leaves."""


def read_text(path: str) -> Reading:
    """The text in `path`, or on stdin for `-`. Raises `AssayError` for what holds no text."""
    try:
        data = sys.stdin.buffer.read(MAX_BYTES + 1) if path == "-" else _read_file(Path(path))
    except (OSError, ValueError) as error:
        raise unreadable(path, getattr(error, "strerror", None) or str(error)) from None
    return decode(data[:MAX_BYTES], path, truncated=len(data) > MAX_BYTES)


def decode(data: bytes, path: str, *, truncated: bool = False) -> Reading:
    """Bytes as text: UTF-8, with or without a byte order mark, or UTF-16 with one. Broken bytes
    become U+FFFD.
    """
    bom, encoding = next(((b, name) for b, name in _BOMS if data.startswith(b)), (b"", "utf-8"))
    data = data[len(bom) :]
    holes = 0
    if encoding == "utf-8" and 0 in data:
        whole = _INNER_NUL.sub(b"", _HOLE.sub(b"", data))
        holes = len(data) - len(whole)
        if holes and (len(whole) < LEAST_BESIDE_HOLES or _CONTROL.search(whole)):
            raise unreadable(path, "a binary file, not text")
        if whole.count(0) > max(8, len(whole) // 50):
            raise unreadable(path, "a binary file, not text")
        data = whole
    decoder = codecs.getincrementaldecoder(encoding)("strict")
    try:
        return Reading(decoder.decode(data, final=not truncated), truncated, nul_bytes=holes)
    except UnicodeDecodeError as error:
        first = error.start
    text = codecs.getincrementaldecoder(encoding)("replace").decode(data, final=not truncated)
    invalid = text.count("\ufffd")
    if invalid > _ALLOWED_INVALID * len(text):
        raise unreadable(path, f"not UTF-8 text (first invalid byte at offset {first})")
    return Reading(text, truncated, invalid, first, holes)


def _read_file(path: Path) -> bytes:
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(0, "a directory, not a file")
    if stat.S_ISFIFO(mode):
        return _read_fifo(path)
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def _read_fifo(path: Path) -> bytes:
    """Read a pipe to its end. A plain open would wait for a writer for ever."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        chunks: list[bytes] = []
        size = 0
        poll = select.poll()
        poll.register(fd, select.POLLIN | select.POLLHUP)
        while size <= MAX_BYTES:
            if not poll.poll(FIFO_WAIT_S * 1000):
                raise OSError(0, f"a named pipe to which nothing was written for {FIFO_WAIT_S:g} s")
            chunk = os.read(fd, 2**16)
            if not chunk:
                break
            chunks.append(chunk)
            size += len(chunk)
        return b"".join(chunks)
    finally:
        os.close(fd)


def unreadable(path: str, reason: str) -> AssayError:
    """The error for a file (`-` is stdin) that holds no text."""
    shown = "stdin" if path == "-" else path
    return AssayError(
        f"{shown}: {reason}",
        finding_id="coherence.unreadable",
        remedy="give a text file with one model output, or the body or stream that a server sent",
        evidence={"path": path},
    )


# From the text of a file to its JSON values.

_HTTP_HEAD = re.compile(r"(?:HTTP/\d(?:\.\d)? \d{3}[^\n]*\n(?:[\w-]+:[^\n]*\n)*\r?\n)+")
_SSE_LINE = re.compile(r"(?:data|event|id|retry)?:")
_SSE_JSON = re.compile(r"^data: ?(?:\{|\[(?!DONE\]))", re.MULTILINE)
_BETWEEN = re.compile(r"[\s,\0\x1e]*")
_JSON_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*("?)|[{}\[\]]', re.DOTALL)
_DECODER = json.JSONDecoder(strict=False)
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


def http_head(text: str) -> tuple[int, str]:
    """The status in the header lines that `curl -i` saves, 0 where there are none, and the text
    after them.
    """
    head = _HTTP_HEAD.match(text)
    status = int(re.findall(r"^HTTP/\S+ (\d{3})", head.group(), re.MULTILINE)[-1]) if head else 0
    body = text[head.end() if head else 0 :]
    if head and "chunked" in head.group().lower():
        body = _CHUNK.sub("", body)
    return status, body.strip(" \t\r\n\ufeff\0")


_CHUNK = re.compile(r"(?:^|(?<=\n))[0-9a-fA-F]{1,6}\r?\n")


def without_noise(text: str) -> str:
    """The text without what terminals, logs and chats put around a body: commands, meters, labels,
    fences, prefixes.
    """
    if fenced := _FENCED.match(text):
        text = fenced.group(1)
    if _COMMAND.match(text):
        text = _after_command(text)
    while noise := _NOISE.match(text):
        text = text[noise.end() :]
    lines = text[:8000].splitlines()
    if 2 * sum(bool(_PRINTED_BYTES.match(line)) for line in lines) > len(lines):
        return _PRINTED_BYTES.sub(lambda m: _literal(m.group(1), m.group()), text)
    if 2 * sum(bool(_LOGGED.match(line)) for line in lines) > len(
        [line for line in lines if line.strip()]
    ):
        text = _LOGGED.sub("", text)
    return text.strip()


_FENCED = re.compile(r"\A(?:[^\n]{0,80}\n+)?```\w*\n(.*)\n```\s*\Z", re.DOTALL)
_COMMAND = re.compile(r"(?:[\w@:~./-]*[$#>%] ?)?(?:curl|wget|http|xh|time curl) ")
_NOISE = re.compile(
    r"(?:\s*|[*<>] ?[^\n\"]*|[{}] \[[^\n]*|\s*% Total[^\n]*|\s*Dload  Upload[^\n]*|[ \d.kMG]+[\d:\-"
    r" .kMG]*|[A-Z][\w ]{0,40}:\s*)\r?\n"
    r"|[A-Z][\w ]{0,40}: (?=[{\[])"
)
_PRINTED_BYTES = re.compile(r"^(b(?:'[^\n]*'|\"[^\n]*\"))[ \t]*$", re.MULTILINE)
_LOGGED = re.compile(r"^[^\n{}\"]{1,80}?(?=data: ?(?:[{\[]))", re.MULTILINE)


def _after_command(text: str) -> str:
    """What follows a shell command: it ends with its line, unless a quote is open or a backslash
    ends the line.
    """
    quote = ""
    for at, mark in enumerate(text[:20_000]):
        if quote:
            quote = "" if mark == quote and text[at - 1] != "\\" else quote
        elif mark in "'\"":
            quote = mark
        elif mark == "\n" and text[at - 1] not in "\\^":
            return text[at + 1 :]
    return text


def _literal(source: str, otherwise: str) -> str:
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


_PYTHON = re.compile(
    r"\A\[?(?:\w+\.)*\w*(?:Completion|Message|Response|Output|Chunk|Reply)\w*\(\s*\w+="
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
            value = "" if source == "None" else _literal(source, source)
            said[known] = value if known in ("reason", "name") else said.get(known, "") + value
        if said.keys() & {"content", "reasoning", "arguments"}:
            found.append(said)
    return found


def json_values(body: str) -> Parsed | None:
    """The values of a JSON body, of JSON lines, or of a stream; None if the text is none of these."""
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
        if not parsed.values and (value := _python_value(body)) is not None:
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
            value = json.loads(written, strict=False)
        except (ValueError, RecursionError):
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


def _python_value(body: str) -> Any:
    """The value of a dict or list as Python prints it; None if it is none."""
    if re.match(r"\[?\{\s*'", body) is None:
        return None
    try:
        return ast.literal_eval(body)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


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
                yield json.loads(attempt, strict=False)
            except (ValueError, RecursionError):
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
    at = 0
    while at < len(body):
        try:
            value, at = _DECODER.raw_decode(body, at)
            yield value
            between = _BETWEEN.match(body, at)
            at = between.end() if between else at
            continue
        except ValueError:
            following = body.find("\n{", at)
        except RecursionError:
            return
        if following >= 0:
            parsed.lost += 1
            at = following + 1
            continue
        value = _closed(body[at:])
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
            return json.loads(text + ending + closing, strict=False)
        except (ValueError, RecursionError):
            continue
    return None


# Answers under construction: what the readers of bodies and streams add to, message by message and
# event by event.


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
            key, Answer(" ".join(k for k in key if k not in ("None", "", "turn 1")))
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
