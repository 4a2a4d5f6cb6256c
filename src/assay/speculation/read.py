"""What one source says: its kind is recognised, every parser reads it, nothing is judged yet."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from assay.errors import AssayError
from assay.speculation import scan
from assay.speculation.parsers import new_parsers
from assay.speculation.parsers.base import Line, Parser
from assay.speculation.record import Observation
from assay.speculation.sources import Source

# -----------------------------------------------------------------------------
# What an engine said at start about its draft head: the evidence that counts alone cannot give.

_HEAD_NAMES = r"(?:mtp|nextn|eagle|draft|medusa|eh_proj|enorm|hnorm|shared_head|pre_fc_norm|fc\.)"


@dataclass(frozen=True)
class Clue:
    """One kind of message, how often it came, and the first of them."""

    id: str
    text: str
    count: int = 1


@dataclass(frozen=True)
class Found:
    """Clues of one source, and the speeds that its lines print."""

    clues: list[Clue]
    speeds: list[float]


# id: what to look for in a line. The first group, where there is one, is what is quoted, else the line.
_PATTERNS: dict[str, re.Pattern[str]] = {
    "version": re.compile(
        r"(vLLM API server version \S+|Initializing a V\d LLM engine \(v[^)]+\)|sglang[ _]version[=:]\s*\S+"
        r"|build: \d+ \(\w+\))",
        re.I,
    ),
    "weights_skipped": re.compile(rf"{_HEAD_NAMES}.*not found in params_dict", re.I),
    "weights_uninitialised": re.compile(rf"weights? .*(?:were|was) not initialized.*{_HEAD_NAMES}", re.I),
    "weights_cast": re.compile(
        rf"(Attempted to load weight \S*{_HEAD_NAMES}\S* with dtype \S+ into parameter with dtype \S+)", re.I
    ),
    "weights_missing": re.compile(r"(?:MTP|nextn|speculative) (?:layer \S+ )?weights? missing", re.I),
    "layer_reused": re.compile(
        r"(num_speculative_tokens > 1 will run multiple times of forward on same MTP layer)"
    ),
    "draft_context": re.compile(r"(Overriding draft model max model len from \d+ to \d+)"),
    "draft_vocab": re.compile(
        r"(?:draft|target).*vocab.*(?:not compatible|incompatible|mismatch|must match)", re.I
    ),
    "speculation_on": re.compile(
        r"(speculative_config=SpeculativeConfig\([^)]*\)|speculative_algorithm='[^']+'|creating MTP draft context)"
    ),
    "speculation_off": re.compile(r"(speculative_config=None|speculative_algorithm=None)"),
    "quantization": re.compile(r"\b(quantization='?(?!None)[\w-]+)'?[,)\s]"),
    "kv_cache_dtype": re.compile(r"\b(kv_cache_dtype='?[\w-]+)'?[,)\s]"),
}
_SPEED = re.compile(r"Avg generation throughput:\s*([\d.]+) tokens/s, Running: (\d+) reqs")
_NEEDLES = (
    "version", "llm engine (", "build: ", "params_dict", "not initialized", "attempted to load weight", "weights missing",
    "weight missing", "same mtp layer", "overriding draft", "vocab", "speculative_", "quantization=", "kv_cache_dtype=",
    "mtp draft context",
)  # fmt: skip
_LONGEST = 8192
"""Characters of a line that are looked at; configurations are printed on lines of a few thousand."""


def read(text: str) -> Found:
    """Clues in the start of a log. Speeds are those of intervals in which requests ran."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for line in _candidates(text):
        for name, pattern in _PATTERNS.items():
            match = pattern.search(line)
            if match:
                counts[name] += 1
                quote = match[1] if pattern.groups else line
                first.setdefault(name, " ".join(quote.split())[:300])
    speeds = [float(speed) for speed, running in _SPEED.findall(text) if float(speed) > 0 and int(running)]
    return Found([Clue(name, quote, counts[name]) for name, quote in first.items()], speeds)


def _candidates(text: str) -> list[str]:
    """Lines that hold a needle, in order and each once; found with `find`, since the start of a log is megabytes."""
    lowered = text.lower()
    if len(lowered) != len(text):  # a letter whose lower case is longer would shift the offsets
        lowered = text
    spans: set[tuple[int, int]] = set()
    for needle in _NEEDLES:
        at = lowered.find(needle)
        while at >= 0:
            end = text.find("\n", at)
            end = len(text) if end < 0 else end
            spans.add((text.rfind("\n", 0, at) + 1, end))
            at = lowered.find(needle, end)
    return [text[start : min(end, start + _LONGEST)] for start, end in sorted(spans)]


# -----------------------------------------------------------------------------
# A large log is searched by two processes, each reading its own part of the file.

LARGE = 128 << 20
"""Smaller files are read before a second process would have begun."""
_SHARE = 0.3
"""Part of the file that this process searches; it also parses the lines of both."""
_PLACE = 1 << 20
_QUIET = scan.LINES_BEFORE + scan.LINES_AFTER + 1
_HELD = 8 << 20
"""Bytes of lines that the second process holds back, so that it need not wait for this one."""
_HIT = re.compile(rb"ccep|#acc")


def interesting_lines(source: Source) -> Iterator[bytes]:
    """What `scanner.interesting_lines` finds in `source`, whichever way is faster."""
    fd = source.plain_file()
    cut = _quiet_place(fd) if fd is not None and _can_share() else None
    if fd is None or cut is None:
        yield from scan.interesting_lines(source)
        return
    with _second_process(source.name, fd, cut) as rest:
        yield from scan.interesting_lines(_Part(fd, 0, cut))
        yield from rest
    source.size = os.fstat(fd).st_size


class _Part:
    """The bytes of a file from `start` to `stop` (to its end if None), by an offset of its own."""

    def __init__(self, fd: int, start: int, stop: int | None = None) -> None:
        self._fd, self._at, self._stop = fd, start, stop

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the start of `buffer`."""
        size = len(buffer) if self._stop is None else min(len(buffer), self._stop - self._at)
        got = os.preadv(self._fd, [buffer[:size]], self._at)
        self._at += got
        return got


def _can_share() -> bool:
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1 and threading.active_count() == 1


def _quiet_place(fd: int) -> int | None:
    """Offset of a line without any hit so near that its lines would be needed across the cut; None if there is none."""
    size = os.fstat(fd).st_size
    if size < LARGE:
        return None
    start = int(_SHARE * size)
    text = os.pread(fd, _PLACE, start)
    hits = [m.start() for m in _HIT.finditer(text)]
    for before, after in pairwise([0, *hits, len(text)]):
        ends = [m.end() for m in re.finditer(rb"\n", text[before:after])]
        if len(ends) > 2 * _QUIET:
            return start + before + ends[_QUIET]
    return None


@contextmanager
def _second_process(name: str, fd: int, start: int) -> Iterator[Iterator[bytes]]:
    """A process that searches the file from `start`; yields the lines that it finds."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(fd, start, write_end)
    os.close(write_end)
    status: int | None = None

    def lines() -> Iterator[bytes]:
        nonlocal status
        for row in found:
            yield row.rstrip(b"\n")
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status:
            raise AssayError(
                f"{name} could not be read to its end",
                finding_id="speculation.source_unreadable",
                remedy="run it again; if that does not help, copy the file",
            )

    with os.fdopen(read_end, "rb") as found:
        try:
            yield lines()
        finally:
            if status is None:  # left early: the closed pipe ends the other process
                found.close()
                os.waitpid(pid, 0)


def _child(fd: int, start: int, out: int) -> None:
    """Search and write the lines to `out`. Never returns."""
    code = 1
    try:
        held = bytearray()
        with os.fdopen(out, "wb", buffering=0) as pipe:
            for row in scan.interesting_lines(_Part(fd, start)):
                held += row + b"\n"
                if len(held) > _HELD:
                    _write(pipe.fileno(), held)
                    held.clear()
            _write(pipe.fileno(), held)
        code = 0
    finally:
        os._exit(code)


def _write(fd: int, data: bytearray) -> None:
    done = 0
    while done < len(data):
        done += os.write(fd, data[done : done + (1 << 16)])


# -----------------------------------------------------------------------------

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
        if source.complete and scan.looks_like_metrics(text):
            self.kinds.append("metrics")
            self.metrics(text)
        elif (value := _document(source, text)) is not None:
            self.kinds.append("json")
            self.document(value)
            found = read(text)  # structured logs hold start-up messages too
            self.clues += found.clues
            self.speeds += found.speeds
        elif scan.looks_like_metrics(text[:65536]):
            self.kinds.append("metrics")
            self.metrics(_whole(source).decode("utf-8", "replace"))
        else:
            self.kinds.append("log")
            found = read(text)
            self.clues += found.clues
            self.speeds += found.speeds
            for raw in interesting_lines(source):
                self.line(raw)
        self.size += source.size

    def line(self, raw: bytes) -> list[Observation]:
        """Read one log line; returns what is new."""
        line = scan.clean(raw)
        value = scan.embedded_json(line.text)
        new = list(self._objects(value)) if value is not None else list(self._parsed(line))
        self.observations += new
        return new

    def document(self, value: Any) -> None:
        """Read a parsed JSON document, whatever it is wrapped in."""
        self.observations += self._objects(value)

    def metrics(self, text: str) -> None:
        """Read a Prometheus page."""
        for page in scan.pages(scan.parse_samples(text)):
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
            found += self._parsed(scan.clean(text.encode("utf-8", "replace")))
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
