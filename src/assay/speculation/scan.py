"""From bytes to lines: find the few that matter in a log of any size at the speed of reading it,
and free them of what terminals, containers and supervisors put around them. Metrics pages are taken
apart here too.

What matters is what the parsers look for. Nearly all their needles hold `accep`, or `acc` before
something that is no letter; the pair `cc` is rare, and numpy finds it at memory speed. Needles
without it are searched for one by one. The lines around a hit are kept too, since engines put the
engine's number or the speed on a line of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from assay.plugins import load
from assay.speculation.parsers import Line, Parser, Sample
from assay.speculation.parsers.named import NamedParser, SummaryParser
from assay.speculation.parsers.others import (
    FastDeployParser,
    GuardParser,
    LlamaCppParser,
    MlcParser,
    OpenAIUsageParser,
    TensorRTParser,
)
from assay.speculation.parsers.sglang import SglangParser
from assay.speculation.parsers.vllm import VllmV0Parser, VllmV1Parser

# The first parser that reads a line or a JSON object owns it.
PARSERS: tuple[type[Parser], ...] = (
    VllmV1Parser,
    VllmV0Parser,
    SglangParser,
    LlamaCppParser,
    TensorRTParser,
    MlcParser,
    FastDeployParser,
    GuardParser,
    SummaryParser,
    NamedParser,
    OpenAIUsageParser,
)


def all_parsers() -> tuple[type[Parser], ...]:
    """Those of other packages, which read less than the ones for named figures, then those of
    assay.
    """
    return (*load("assay.parsers").values(), *PARSERS)


def new_parsers() -> tuple[Parser, ...]:
    """Fresh parsers for one source; some remember what earlier lines said."""
    return tuple(parser() for parser in all_parsers())


BLOCK = 1 << 19
"""Bytes read at a time."""
CHUNK = 1 << 17
"""Bytes searched at a time. Both are small enough to stay in the processor's cache."""
MARGIN = 1 << 16
"""A line is sure to be read whole up to this length; a longer one is cut."""
LINES_BEFORE = 4
LINES_AFTER = 1
_FEW = 16
"""Pairs in a chunk that are looked at one by one; more are weighed together."""
_SEED = re.compile(rb"[aA]cc(?:ep|[^A-Za-z])")


class ByteReader(Protocol):
    """A stream of bytes; `readinto` may fill less than the buffer, and returns 0 only at the end."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill the start of `buffer`; returns the number of bytes."""
        ...


@dataclass(frozen=True)
class Wanted:
    """What the parsers look for, in lower case: in a line that may count drafts, in one beside it,
    and without a seed.
    """

    counts: tuple[bytes, ...]
    speaks: tuple[bytes, ...]
    others: tuple[bytes, ...]

    @classmethod
    def of(cls, parsers: Sequence[type[Parser] | Parser]) -> Wanted:
        """Made from the parsers' own `needles`, `company` and `near`."""
        counts = {word.encode() for p in parsers for word in p.company or p.needles}
        near = {word.encode() for p in parsers for word in p.near}
        needles = {needle.encode() for p in parsers for needle in p.needles}
        others = {needle for needle in needles if not _SEED.search(needle + b"\n")}
        return cls(_shortest(counts | others), _shortest(counts | near | needles), tuple(others))


def _shortest(words: set[bytes]) -> tuple[bytes, ...]:
    """Words that hold no other of them: where one of these is missing, so are all."""
    return tuple(sorted(w for w in words if not any(o in w for o in words - {w})))


@cache
def _wanted() -> Wanted:
    return Wanted.of(all_parsers())


def interesting_lines(
    reader: ByteReader, block: int = BLOCK, margin: int = MARGIN, wanted: Wanted | None = None
) -> Iterator[bytes]:
    """Lines that may count drafts, and the neighbours that matter, in order and each once; without
    line ends.
    """
    wanted = wanted or _wanted()
    # One buffer for the whole source: fresh pages would cost more than the search.
    buffer = bytearray(block + 2 * margin)
    view = memoryview(buffer)
    search = _Search(buffer, wanted.others)
    filled = 0
    searched = 0  # hits before this offset are done
    sent = 0  # lines before this offset are sent
    passed = 0  # the line before this offset holds a hit, and counts nothing
    while True:
        fresh = reader.readinto(view[filled : filled + block]) or 0
        filled += fresh
        # A hit near the end waits until the lines around it are here.
        limit = max(searched, filled - margin) if fresh else filled
        for hit in search.hits(searched, limit, filled):
            if hit >= max(sent, passed):
                line = buffer.rfind(b"\n", sent, hit) + 1 or sent
                end = _line_end(buffer, hit, filled)
                if not _holds(buffer[line:end], wanted.counts):
                    passed = end
                    continue
                first, sent = _zone(buffer, line, end, sent, filled)
                yield from (
                    row
                    for row in bytes(view[first:sent]).splitlines()
                    if _holds(row, wanted.speaks)
                )
        if not fresh:
            return
        cut = max(0, limit - margin)
        buffer[: filled - cut] = buffer[cut:filled]
        filled, searched = filled - cut, limit - cut
        sent, passed = max(0, sent - cut), max(0, passed - cut)


class _Search:
    """Finds seeds and other needles in a buffer."""

    def __init__(self, buffer: bytearray, others: Sequence[bytes]) -> None:
        self._buffer = buffer
        self._others = others
        self._text = np.frombuffer(buffer, dtype=np.uint8)
        self._found = bytearray(
            CHUNK + 1
        )  # bytes for `find`, which is memchr, and a mask for numpy
        self._mask = np.frombuffer(self._found, dtype=np.bool_)

    def hits(self, start: int, stop: int, filled: int) -> Iterator[int]:
        """Their offsets in [start, stop), in order; the text ends at `filled`."""
        found = self._found
        for low in range(start, stop, CHUNK):
            high = min(low + CHUNK, stop)
            size = min(high + 1, filled) - low
            pair = np.equal(self._text[low : low + size], ord("c"), out=self._mask[:size])
            pair[:-1] &= pair[1:]
            end = min(high - low, size - 1)
            own: list[int] = []
            at = -1
            for _ in range(_FEW):
                at = found.find(1, at + 1, end)
                if at < 0:
                    break
                if low + at and _SEED.match(self._buffer, low + at - 1, filled):
                    own.append(low + at)
            else:
                own += self._fitting(np.flatnonzero(pair[at + 1 : end]) + (low + at + 1), filled)
            yield from sorted(own + self._listed(low, high, filled)) if self._others else own

    def _listed(self, low: int, high: int, filled: int) -> list[int]:
        """Offsets of the needles without a seed; they are written in lower case by those who print
        them.
        """
        at = []
        for needle in self._others:
            place = self._buffer.find(needle, low, min(high + len(needle) - 1, filled))
            while place >= 0:
                at.append(place)
                place = self._buffer.find(needle, place + 1, min(high + len(needle) - 1, filled))
        return at

    def _fitting(self, pairs: np.ndarray[tuple[int], np.dtype[np.intp]], filled: int) -> list[int]:
        """The seeds among many pairs at once ('success' on every line of a log must not make it
        slow).
        """
        text = self._text
        before, third, fourth = (text[(pairs + i).clip(0, filled - 1)] for i in (-1, 2, 3))
        letter = ((third | 32) >= ord("a")) & ((third | 32) <= ord("z"))
        word = (third == ord("e")) & (fourth == ord("p"))
        return list(map(int, pairs[((before | 32) == ord("a")) & (word | ~letter)]))


def _holds(text: bytes | bytearray, words: Sequence[bytes]) -> bool:
    low = text.lower()
    return any(word in low for word in words)


def _zone(buffer: bytearray, line: int, end: int, sent: int, filled: int) -> tuple[int, int]:
    """Where the lines around that of a hit (from `line` to `end`) begin that are not sent yet, and
    where they end.
    """
    first, last = line, end
    for _ in range(LINES_BEFORE):
        if first <= sent:
            break
        first = buffer.rfind(b"\n", sent, first - 1) + 1 or sent
    for _ in range(LINES_AFTER):
        last = _line_end(buffer, last, filled)
    # A summary lists its positions on lines of their own.
    while buffer[last : min(last + 64, filled)].lstrip(b" \t").startswith(b"Position "):
        last = _line_end(buffer, last, filled)
    return first, last


def _line_end(buffer: bytearray, offset: int, filled: int) -> int:
    """Offset just past the line that holds `offset`."""
    return buffer.find(b"\n", offset, filled) + 1 or filled


_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
_PROCESS = re.compile(r"\(([A-Za-z]\w*?)(?:_(DP\d+))?(?:_TP\d+)? pid=(\d+)\)")
_COMPOSE = re.compile(r"^([\w.-]+)\s*\|\s")
_PORT = re.compile(
    r"(?:^|\| )\[(\d{3,5})\] (?=\s|\d+\.\d\d\.|slot|srv|draft|prompt|statistics|eval|total)"
)
_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?)|\b(?:INFO|WARNING|ERROR|DEBUG) (\d\d-\d\d"
    r" \d\d:\d\d:\d\d)|\b(\d{1,2}\.\d\d\.\d{3}\.\d{3}) [A-Z] "
)

# The usual prefix of vLLM, of which a log may hold tens of thousands.
_USUAL = re.compile(
    r"(?:\(([A-Za-z][A-Za-z]*) pid=(\d+)\) )?(?:INFO|WARNING) (\d\d-\d\d \d\d:\d\d:\d\d)"
    r" \[[\w.]+:\d+\] (?!\()"
)
_PREFIX = 160
"""Characters in which a prefix is looked for."""


def clean(raw: bytes) -> Line:
    """The line without colours and wrappers, with the process, engine and time that its prefix
    names.
    """
    text = raw.decode("utf-8", "replace")
    usual = _USUAL.match(text)
    if usual and "\x1b" not in text:
        return Line(text, f"/{usual[1]}:{usual[2]}" if usual[1] else "", None, usual[3])
    if text.startswith('{"log":'):
        text = _docker_json(text)
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    text = text.replace("\0", "").rstrip("\r\n")
    start = text[:_PREFIX]
    compose = _COMPOSE.match(start) if "|" in start else None
    container = compose[1] if compose else ""
    processes = _PROCESS.findall(start) if "pid=" in start else []
    replica = next((dp for _, dp, _ in reversed(processes) if dp), None)
    port = _PORT.search(start) if "[" in start else None
    time = _TIME.search(start)
    return Line(
        text=text,
        process="/".join(
            [
                container,
                *(f"{name}{dp}:{pid}" for name, dp, pid in processes[:1]),
                *([port[1]] if port else []),
            ]
        ),
        replica=f"{container}/{replica}" if container and replica else replica or container or None,
        time=next((t for t in time.groups() if t), None) if time else None,
        port=port[1] if port else None,
    )


_HEADS = (
    "SpecDecoding metrics:",
    "Speculative metrics:",
    "Decode batch",
    "draft acceptance",
    "DFlash Stats:",
)
_BETWEEN = re.compile(
    r"\r|['\"], ['\"]|(?=\((?:APIServer|EngineCore)\w* pid=\d+\) )|(?=\b(?:INFO|WARNING)"
    r" \d\d-\d\d )"
)


def records(text: str) -> list[str]:
    """The log lines in a line: one as a rule, several where a log was escaped, or its lines were
    printed as a list.
    """
    head = next((head for head in _HEADS if text.count(head) > 1), None)
    if head is None:
        return [text]
    if "\\n" in text:
        return re.split(r"(?:\\r)?\\n", text)
    cuts = [0]
    heads = [m.start() for m in re.finditer(re.escape(head), text)]
    for before, after in pairwise(heads):
        between = list(_BETWEEN.finditer(text, before, after))
        cut = next((m.end() for m in between if m[0]), None)
        cuts.append(cut or (between[0].start() if between else after))
    pieces = [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]
    return [re.sub(r"['\"](?:, ['\"]|\])?\s*$", "", piece) for piece in pieces]


def unwrapped(text: str) -> list[str]:
    """Other readings of `text`: lines joined that a terminal broke at its width or between words,
    and rows of tables named.
    """
    rows = text.splitlines()
    width = max(map(len, rows), default=0)
    full = sum(len(row) == width for row in rows)
    joined = []
    if 40 <= width <= 400 and full >= 1 and len(rows) > 1:
        joined.append("".join(row if len(row) == width else row + "\n" for row in rows))
    if 40 <= width <= 400 and len(rows) > 1:
        starts = re.compile(
            r"\s*(?:\(\w+"
            r" pid=|INFO|WARNING|ERROR|\[?\d{4}-\d\d|\d+\.\d\d\.\d{3}|[\w.-]+\s+\||slot |$)"
        )
        joined.append("".join(("\n" if starts.match(row) else " ") + row.strip() for row in rows))
    if named := _named_rows(rows):
        joined.append("\n".join(named))
    return joined


_CELLS = (
    re.compile(r"\s*[|│]\s*"),
    re.compile(r"\s*\t\s*"),
    re.compile(r"\s*[,;]\s*"),
    re.compile(r"\s{2,}"),
)


def _named_rows(rows: Sequence[str]) -> list[str]:
    """The rows of tables with a column of what was accepted, each as `column=figure` of all its
    columns.
    """
    found: list[str] = []
    head: list[str] = []
    cut = _CELLS[0]
    for row in rows:
        low = row.lower()
        if "acc" in low and ("draft" in low or "propos" in low) and not re.search(r"\d", row):
            cut = next((c for c in _CELLS if len(c.split(row.strip(" |│"))) > 2), _CELLS[0])
            head = [re.sub(r"\W+", "_", cell).strip("_") for cell in cut.split(row.strip(" |│"))]
            continue
        cells = cut.split(row.strip(" |│")) if head else []
        if len(cells) == len(head) > 2 and any(re.match(r"\d", cell) for cell in cells):
            found.append(
                " ".join(
                    f"{name}={cell}"
                    for name, cell in zip(head, cells, strict=True)
                    if re.match(r"\d", cell)
                )
            )
    return found


def embedded_json(text: str) -> Any:
    """The JSON value that makes up a line (a server-sent event's `data:` included); None if there
    is none.
    """
    stripped = text.strip()
    if stripped.startswith("data:"):
        stripped = stripped[5:].strip()
    # Anything else cannot carry counts; parsing every brace in a log would be slow.
    if (
        not stripped.startswith("{")
        or "accept" not in stripped.lower()
        or not stripped.endswith("}")
    ):
        return None
    return parsed_json(stripped)


def parsed_json(text: str | bytes) -> Any:
    """The JSON value that `text` is; None for anything else, nonsense of any depth or length
    included.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _docker_json(text: str) -> str:
    """The message in a line of Docker's json-file driver."""
    entry = parsed_json(text)
    return (
        entry["log"].rstrip("\n")
        if isinstance(entry, dict) and isinstance(entry.get("log"), str)
        else text
    )


_SAMPLE = re.compile(
    r"^\s*([a-zA-Z_:][\w:]*)\s*(?:\{(.*?)\})?\s*\|?\s*([-+]?(?:\d[\d_.]*(?:e[-+]?\d+)?|inf|nan))(?:\s+-?\d+)?\s*\|?\s*$",
    re.I,
)
_LABEL = re.compile(r'([a-zA-Z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_SIGN = re.compile(
    r"^(?:# (?:TYPE|HELP)"
    r" \S+|(?:vllm|sglang|llamacpp|trtllm)[:_]\w+(?:\{.*?\})?\s*[|]?\s*[-+\d.naif]+)",
    re.M,
)


def looks_like_metrics(text: str) -> bool:
    """Whether `text` is a metrics page rather than a log."""
    return _SIGN.search(text) is not None


def pages(samples: list[Sample]) -> Iterator[list[Sample]]:
    """The pages in a text: where a series comes again, another page (a later scrape of the same
    server) has begun.
    """
    page: list[Sample] = []
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    for sample in samples:
        series = (sample.name, frozenset(sample.labels.items()))
        if series in seen:
            yield page
            page, seen = [], set()
        seen.add(series)
        page.append(sample)
    yield page


def parse_samples(text: str) -> list[Sample]:
    """All samples of a page with a numeric value. Creation times (`_created`) are not samples of
    anything.
    """
    samples = []
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None or line.startswith("#") or match[1].endswith("_created"):
            continue
        labels = {name: value.replace(r"\"", '"') for name, value in _LABEL.findall(match[2] or "")}
        try:
            samples.append(Sample(match[1], labels, float(match[3].replace("_", ""))))
        except ValueError:  # 1.2.3
            continue
    return samples


def json_samples(value: Any) -> list[Sample]:
    """Samples in JSON, in time order: the answer of a Prometheus query, or OTLP's
    `resourceMetrics`.
    """
    found: list[tuple[float, Sample]] = []
    data = value.get("data") if isinstance(value, dict) else None
    for row in _dicts(data.get("result") if isinstance(data, dict) else None):
        labels = row.get("metric")
        if isinstance(labels, dict) and isinstance(labels.get("__name__"), str):
            own = {str(k): str(v) for k, v in labels.items() if k != "__name__"}
            points = row["values"] if isinstance(row.get("values"), list) else [row.get("value")]
            for point in points:
                if isinstance(point, list) and len(point) == 2:
                    found += _timed(labels["__name__"], own, *point)
    for metric in _otlp(value.get("resourceMetrics")) if isinstance(value, dict) else ():
        for form in _dicts([metric.get("sum"), metric.get("gauge")]):
            for point in _dicts(form.get("dataPoints")):
                own = {
                    str(a.get("key")): "".join(map(str, a["value"].values()))
                    for a in _dicts(point.get("attributes"))
                    if isinstance(a.get("value"), dict)
                }
                number = point.get("asInt", point.get("asDouble"))
                found += _timed(metric["name"], own, point.get("timeUnixNano", 0), number)
    return [sample for _, sample in sorted(found, key=lambda pair: pair[0])]


def _timed(name: str, labels: dict[str, str], time: Any, value: Any) -> list[tuple[float, Sample]]:
    try:
        return [(float(time), Sample(name, labels, float(value)))]
    except (TypeError, ValueError, OverflowError):
        return []


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [child for child in value if isinstance(child, dict)] if isinstance(value, list) else []


def _otlp(value: Any) -> Iterator[dict[str, Any]]:
    """All metrics in `resourceMetrics`, whatever the scopes around them."""
    for child in _dicts(value):
        if isinstance(child.get("name"), str):
            yield child
        else:
            yield from _otlp(child.get("scopeMetrics") or child.get("metrics"))
