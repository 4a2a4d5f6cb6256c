"""What one source says: its kind is recognised, the parsers read it, nothing is judged yet."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from assay.errors import AssayError
from assay.speculation.clues import Clue, start_up
from assay.speculation.document import MAX_DOCUMENT, MAX_PAGE, json_document, read_whole
from assay.speculation.json_text import embedded_json, parsed_json
from assay.speculation.log_line import clean, records
from assay.speculation.metrics_page import (
    engine_of,
    json_samples,
    looks_like_metrics,
    pages,
    parse_samples,
)
from assay.speculation.observation import Observation
from assay.speculation.pages import Page, read_json_page, read_page
from assay.speculation.parsers.base import Line, Parser, Sample
from assay.speculation.parsers.counts import count
from assay.speculation.parsers.figures import NAMES_DRAFTING
from assay.speculation.parsers.named import named_object
from assay.speculation.parsers.registry import new_parsers
from assay.speculation.search import interesting_lines
from assay.speculation.sources import Source
from assay.speculation.unread import NAMED_DRAFTING, looks_like_drafting
from assay.speculation.unwrap import unwrapped

SHORT = 1 << 20
"""Characters up to which a log is tried with its lines joined, as if a terminal had broken them."""

MOST_LINES = 1_500_000
"""Lines of one source that are looked at closely."""
MOST_OBSERVATIONS = 700_000
"""Observations kept of one source; each takes about 1 KB."""
_DEPTH = 12
_SETTINGS = frozenset({"depth", "temperature", "quantization", "sparse_method", "draft_vocab"})
"""Messages that a page about an engine quotes as well as the engine itself."""

_MESSAGE = frozenset(
    {
        "message",
        "msg",
        "log",
        "line",
        "event",
        "body",
        "MESSAGE",
        "textPayload",
        "_raw",
        "stringValue",
    }
)
"""Keys under which structured logs hold the line itself. The text of a response is under none of
them.
"""

_JOURNAL_BYTES = re.compile(r'"MESSAGE"\s*:\s*\[\s*\d')


@dataclass
class Reading:
    """Observations and clues of one or several sources of the same run, in order.

    `unread` holds the lines that name drafting and that no parser reads, each shape once, and how
    often it came.
    """

    parsers: Sequence[Parser] = field(default_factory=new_parsers)
    observations: list[Observation] = field(default_factory=list)
    clues: list[Clue] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    size: int = 0
    speeds: list[float] = field(default_factory=list)
    """Generation throughput that lines without speculation print, tokens per second."""
    unread: dict[str, tuple[str, int]] = field(default_factory=dict)

    def add(self, source: Source) -> None:
        """Read one more source to its end."""
        text = source.head.decode("utf-8", "replace")
        if looks_like_metrics(text if source.complete else text[:65536]):
            self.kinds.append("metrics")
            self.metrics(
                text if source.complete else read_whole(source, MAX_PAGE).decode("utf-8", "replace")
            )
        elif (value := json_document(source, text)) is not None:
            self.kinds.append("json")
            before = len(self.observations)
            self.document(value)
            if len(self.observations) == before:
                self._as_page(read_json_page(value))
            self._start_up(text)  # structured logs hold start-up messages too
        else:
            self.kinds.append("log")
            short = source.complete and len(text) < SHORT
            before = len(self.settled()) if short else 0
            self._start_up(text)
            self._log(source, text)
            if short and len(self.settled()) == before and not self._of_an_engine():
                self._as_page(read_page(text))
        self.size += source.size

    def line(self, raw: bytes) -> list[Observation]:
        """Read one log line; returns what is new."""
        new: list[Observation] = []
        for text in records(raw.decode("utf-8", "replace")):
            line = clean(text.encode("utf-8", "replace"))
            value = embedded_json(line.text)
            new += self._objects(value) if value is not None else self._parsed(line)
        self.observations += new
        return new

    def document(self, value: Any) -> None:
        """Read a parsed JSON document, in any wrapping."""
        samples = json_samples(value)
        if samples:
            self._pages(samples)
        self.observations += self._objects(value)

    def metrics(self, text: str) -> None:
        """Read a Prometheus page. A page of a known engine without draft counters shows that it
        does not speculate.
        """
        before = len(self.observations)
        self._pages(parse_samples(text))
        known = engine_of(text)
        if (
            len(self.observations) == before
            and known
            and "spec" not in text
            and "draft" not in text
        ):
            self.clues.append(Clue("no_counters", f"the page of {known} has no draft counters"))

    def settled(self) -> list[Observation]:
        """All observations, after each parser has had its say on the whole."""
        result = self.observations
        for parser in self.parsers:
            engines = {parser.engine, *parser.also}
            own = [o for o in result if o.engine in engines]
            settled = parser.settle(own)
            if settled is not own:
                result = [*(o for o in result if o.engine not in engines), *settled]
        return result

    def _start_up(self, text: str) -> None:
        clues, speeds = start_up(text)
        self.clues += clues
        self.speeds += speeds

    def _log(self, source: Source, text: str) -> None:
        """The lines of a log; of a short one also as they were before a terminal broke them, if
        that says more.
        """
        before = len(self.observations)
        if _JOURNAL_BYTES.search(text[:65536]):
            for raw in _lines(source):
                self.observations += self._objects(parsed_json(raw))
        else:
            for number, raw in enumerate(interesting_lines(source)):
                self.line(raw)
                if number > MOST_LINES or len(self.observations) - before > MOST_OBSERVATIONS:
                    raise AssayError(
                        f"{source.name}: more lines about drafts than are read at once",
                        finding_id="speculation.source_too_large",
                        remedy="give a part of the log: tail -c 100M LOG | assay spec -",
                    )
        if len(text) < SHORT:
            self._unwrap(text, before)
        for parser in self.parsers:
            self.observations += parser.silent(text)

    def _unwrap(self, text: str, before: int) -> None:
        best = _known(self.settled())
        for joined in unwrapped(text):
            other = Reading()
            for raw in interesting_lines(io.BytesIO(joined.encode("utf-8", "replace"))):
                other.line(raw)
            if _known(other.settled()) > best:
                best = _known(other.settled())
                self.observations[before:] = other.observations
                self.unread = other.unread

    def _of_an_engine(self) -> bool:
        """Whether start-up messages or answered requests show that this is an engine's log."""
        return bool({c.id for c in self.clues} - _SETTINGS)

    def _as_page(self, page: Page) -> None:
        """Take what a page of tables, lists or prose says where no parser knows its form."""
        if page.observations:
            self.observations += page.observations
            self.unread.clear()
        else:
            for text in page.unread:
                self._unrecognised(text, re.sub(r"\d+", "0", text))

    def _pages(self, samples: list[Sample]) -> None:
        for page in pages(samples):
            before = len(self.observations)
            for parser in self.parsers:
                self.observations += parser.samples(page)
            if len(self.observations) == before:
                for sample in page:
                    if NAMED_DRAFTING.search(sample.name) and "accept" in sample.name.lower():
                        self._unrecognised(f"{sample.name} {sample.value:g}", sample.name)

    def _parsed(self, line: Line) -> list[Observation]:
        """What the first parser that reads this line finds in it."""
        low = line.text.lower()
        for parser in self.parsers:
            if parser.wants(low):
                found = parser.line(line)
                if found is not None:
                    return list(found)
        if "acc" in low and looks_like_drafting(line.text):
            self._unrecognised(line.text, re.sub(r"\d+", "0", line.text[:200]))
        return []

    def _unrecognised(self, text: str, shape: str) -> None:
        quote, number = self.unread.get(shape, (" ".join(text.split())[:300], 0))
        if number or len(self.unread) < 1000:
            self.unread[shape] = (quote, number + 1)

    def _objects(self, value: Any, depth: int = 0, key: str = "") -> list[Observation]:
        """Observations of all JSON objects in `value`. The usage object repeats what a richer one
        says.
        """
        found: list[Observation] = []
        if depth > _DEPTH:
            return found
        children: Sequence[tuple[Any, Any]] = ()
        messages: list[str] = []
        if isinstance(value, Mapping):
            found += self._object(value, key)
            children = list(value.items())
            messages = [
                t
                for key, item in value.items()
                if key in _MESSAGE and (t := _message(item)) is not None
            ]
        elif isinstance(value, list):
            children = [(key, child) for child in value]
            # A log store exports [time, line].
            if len(value) == 2 and all(isinstance(c, str) for c in value):
                messages = value[1:]
        for text in messages:
            for row in text.splitlines():
                for entry in records(row):
                    found += self._parsed(clean(entry.encode("utf-8", "replace")))
        for name, child in children:
            if isinstance(child, Mapping | list):
                found += self._objects(child, depth + 1, str(name))
        rich = [o for o in found if not o.definition.repeats]
        return _with_usage(value, rich) or found

    def _object(self, value: Mapping[str, Any], key: str) -> list[Observation]:
        """What the first parser that knows this object reads in it; a key that names drafting tells
        what it is about.
        """
        for parser in self.parsers:
            found = list(parser.document(value))
            if found:
                return found
        named = named_object(value) if NAMES_DRAFTING.search(key) else None
        if named is not None:
            return [named]
        for key, item in value.items():
            if (
                isinstance(item, int | float)
                and not isinstance(item, bool)
                and looks_like_drafting(f"{key}: {item}")
            ):
                self._unrecognised(f"{key}: {item}", key)
        return []


def _with_usage(value: Any, rich: list[Observation]) -> list[Observation]:
    """`rich` with the generated tokens that the response's usage object counts, where they are one
    reply's.
    """
    usage = value.get("usage") if isinstance(value, Mapping) else None
    generated = count(usage.get("completion_tokens")) if isinstance(usage, Mapping) else None
    if generated is None or len(rich) != 1 or rich[0].counts.generated is not None:
        return rich
    return [replace(rich[0], counts=replace(rich[0].counts, generated=generated))]


def _message(item: Any) -> str | None:
    """A log line in a structured one; journald writes it as bytes where it holds colours."""
    if isinstance(item, str):
        return item
    if isinstance(item, list) and item and all(isinstance(b, int) and 0 <= b < 256 for b in item):
        return bytes(item).decode("utf-8", "replace")
    return None


def _known(observations: Sequence[Observation]) -> int:
    """How many figures observations hold."""
    return sum(
        o.counts.known + (o.counts.drafts is not None) + len(o.counts.at_position or ())
        for o in observations
    )


def _lines(source: Source) -> Iterator[bytes]:
    """Every line of a source; one longer than a document may be is cut."""
    rest = b""
    while part := source.read(1 << 20):
        *whole, rest = (rest + part).split(b"\n")
        yield from whole
        if len(rest) > MAX_DOCUMENT:
            yield rest
            rest = b""
    if rest:
        yield rest
