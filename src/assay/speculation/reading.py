"""What one source says: its kind is recognised, every parser reads it, nothing is judged yet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.errors import AssayError
from assay.speculation import clues, exposition, halves, lines
from assay.speculation.clues import Clue
from assay.speculation.parsers import new_parsers
from assay.speculation.parsers.base import Line, Parser
from assay.speculation.record import Observation
from assay.speculation.sources import Source

MAX_DOCUMENT = 256 << 20
"""Largest JSON document or metrics page that is read whole, in bytes."""
_DEPTH = 12
_MESSAGE = frozenset({"message", "msg", "log", "line", "event", "body", "MESSAGE", "textPayload", "_raw"})
"""Keys under which structured logs hold the line itself. The text of a response is under none of them."""


@dataclass
class Reading:
    """Observations and clues of one or several sources of the same run, in order."""

    parsers: Sequence[Parser] = field(default_factory=new_parsers)
    observations: list[Observation] = field(default_factory=list)
    clues: list[Clue] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    size: int = 0
    speeds: list[float] = field(default_factory=list)
    """Generation throughput that lines without speculation print, tokens per second."""

    def add(self, source: Source) -> None:
        """Read one more source to its end."""
        head = source.head
        text = head.decode("utf-8", "replace")
        if source.complete and exposition.looks_like_metrics(text):
            self.kinds.append("metrics")
            self.metrics(text)
        elif (value := _document(source, text)) is not None:
            self.kinds.append("json")
            self.document(value)
            found = clues.read(text)  # structured logs hold start-up messages too
            self.clues += found.clues
            self.speeds += found.speeds
        elif exposition.looks_like_metrics(text[:65536]):
            self.kinds.append("metrics")
            self.metrics(_whole(source).decode("utf-8", "replace"))
        else:
            self.kinds.append("log")
            found = clues.read(text)
            self.clues += found.clues
            self.speeds += found.speeds
            for raw in halves.interesting_lines(source):
                self.line(raw)
        self.size += source.size

    def line(self, raw: bytes) -> list[Observation]:
        """Read one log line; returns what is new."""
        line = lines.clean(raw)
        value = lines.embedded_json(line.text)
        new = list(self._objects(value)) if value is not None else list(self._parsed(line))
        self.observations += new
        return new

    def document(self, value: Any) -> None:
        """Read a parsed JSON document, whatever it is wrapped in."""
        self.observations += self._objects(value)

    def metrics(self, text: str) -> None:
        """Read a Prometheus page."""
        for page in exposition.pages(exposition.parse_samples(text)):
            for parser in self.parsers:
                self.observations += parser.samples(page)

    def settled(self) -> list[Observation]:
        """All observations, after each parser has had its say on the whole."""
        result: list[Observation] = []
        for engine in dict.fromkeys(o.engine for o in self.observations):
            own: Sequence[Observation] = [o for o in self.observations if o.engine == engine]
            for parser in self.parsers:
                if parser.engine == engine:
                    own = parser.settle(own)
            result += own
        return result

    def _parsed(self, line: Line) -> Iterator[Observation]:
        text = line.text
        for parser in self.parsers:
            for marker in parser.own:
                if marker in text:
                    yield from parser.line(line)
                    return
        for parser in self.parsers:
            if any(marker in text for marker in parser.markers):
                yield from parser.line(line)

    def _objects(self, value: Any, depth: int = 0) -> list[Observation]:
        """Observations of all JSON objects in `value`. The usage object repeats what a richer one says."""
        found: list[Observation] = []
        if depth > _DEPTH:
            return found
        if isinstance(value, Mapping):
            found += self._object(value)
            children: Sequence[Any] = list(value.values())
            messages = [text for key, text in value.items() if key in _MESSAGE and isinstance(text, str)]
        else:
            children = value if isinstance(value, list) else []
            # A log store exports [time, line].
            messages = (
                children[1:] if len(children) == 2 and all(isinstance(c, str) for c in children) else []
            )
        for text in messages:
            found += self._parsed(lines.clean(text.encode("utf-8", "replace")))
        for child in children:
            if isinstance(child, Mapping | list):
                found += self._objects(child, depth + 1)
        rich = [o for o in found if o.definition != "openai_usage"]
        return rich or found

    def _object(self, value: Mapping[str, Any]) -> list[Observation]:
        """What the first parser that knows this object reads in it."""
        for parser in self.parsers:
            found = list(parser.document(value))
            if found:
                return found
        return []


def _document(source: Source, text: str) -> Any:
    """The JSON document that a source is; None if it is something else."""
    start = text.lstrip("\ufeff \t\r\n")
    if not start.startswith(("{", "[")) or start.startswith('{"log":'):
        return None
    first_line = start.splitlines()[0]
    if not source.complete and _is_json(first_line):
        return None  # a large log of JSON lines
    if start.startswith("[") and not _opens_json_array(start):
        return None  # a log whose lines start with a bracket
    body = start if source.complete else _whole(source).decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    try:
        return json.loads(body)
    except ValueError as error:
        rows = [row for row in body.splitlines() if row.strip()]
        values = [v for row in rows if (v := _json_or_none(row)) is not None]
        # Server-sent events have lines without JSON; a log that begins with JSON has lines of every kind.
        others = sum(not row.startswith(("data:", "event:", "id:", ":")) for row in rows) - len(values)
        if values:
            return values if others <= 0 else None
        if start.startswith("{") and not start.startswith(('{"', "{\n", "{\r", "{ ", "{}")):
            return None
        raise AssayError(
            f"{source.name}: the JSON ends early or is broken: {error}",
            finding_id="speculation.source_truncated",
            remedy="save the response again, whole",
        ) from error


def _whole(source: Source) -> bytes:
    data = bytearray()
    while part := source.read(1 << 20):
        data += part
        if len(data) > MAX_DOCUMENT:
            raise AssayError(
                f"{source.name}: more than {MAX_DOCUMENT >> 20} MB of JSON or metrics",
                finding_id="speculation.source_too_large",
                remedy="give one page or one file of JSON lines",
            )
    return bytes(data)


def _is_json(text: str) -> bool:
    return _json_or_none(text) is not None


def _json_or_none(text: str) -> Any:
    stripped = text.strip().removeprefix("data:").strip()
    if not stripped.startswith(("{", "[")):
        return None
    try:
        return json.loads(stripped)
    except ValueError:
        return None


def _opens_json_array(text: str) -> bool:
    """Whether '[' opens a JSON array of objects, not a `[2026-…]` or `[metrics.py]` prefix."""
    return text[1:64].lstrip()[:1] in ("{", "[", "]")
