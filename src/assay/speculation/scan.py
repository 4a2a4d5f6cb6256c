"""Find the few lines that matter in a log of any size, at the speed of reading it.

Every line that counts drafts, of every engine, contains `accep` or `#acc`. Both hold the letters `cc`, a rare pair
that numpy finds at memory speed. The lines around such a line are kept too, since engines put the engine's number
or the speed on a line of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from assay.speculation.parsers.base import Line, Sample

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]
Text = np.ndarray[tuple[int], np.dtype[np.uint8]]

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


class ByteReader(Protocol):
    """A stream of bytes; `readinto` may fill less than the buffer, and returns 0 only at the end."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill the start of `buffer`; returns the number of bytes."""
        ...


def interesting_lines(reader: ByteReader, block: int = BLOCK, margin: int = MARGIN) -> Iterator[bytes]:
    """Lines that may count drafts, and the neighbours that matter, in order and each once; without line ends."""
    # One buffer for the whole source: fresh pages would cost more than the search.
    buffer = bytearray(block + 2 * margin)
    view = memoryview(buffer)
    search = _Search(buffer)
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
                if not _counts(buffer[line:end]):
                    passed = end
                    continue
                first, sent = _zone(buffer, line, end, sent, filled)
                if first < line and _speaks(buffer[first:line]):
                    yield from (row for row in bytes(view[first:line]).splitlines() if _speaks(row))
                yield from (row for row in bytes(view[line:sent]).splitlines() if _speaks(row))
        if not fresh:
            return
        cut = max(0, limit - margin)
        buffer[: filled - cut] = buffer[cut:filled]
        filled, searched = filled - cut, limit - cut
        sent, passed = max(0, sent - cut), max(0, passed - cut)


class _Search:
    """Finds the `cc` of 'accep', 'Accep' and '#acc' in a buffer."""

    def __init__(self, buffer: bytearray) -> None:
        import numpy as np

        self._buffer = buffer
        self._text: Text = np.frombuffer(buffer, dtype=np.uint8)
        self._found = bytearray(CHUNK + 1)  # bytes for `find`, which is memchr, and a mask for numpy
        self._mask: Mask = np.frombuffer(self._found, dtype=np.bool_)

    def hits(self, start: int, stop: int, filled: int) -> Iterator[int]:
        """Their offsets in [start, stop); the text ends at `filled`."""
        import numpy as np

        found = self._found
        for low in range(start, stop, CHUNK):
            high = min(low + CHUNK, stop)
            size = min(high + 1, filled) - low
            pair = np.equal(self._text[low : low + size], ord("c"), out=self._mask[:size])
            pair[:-1] &= pair[1:]
            end = min(high - low, size - 1)
            at = -1
            for _ in range(_FEW):
                at = found.find(1, at + 1, end)
                if at < 0:
                    break
                if self._fits(low + at):
                    yield low + at
            else:
                yield from self._fitting(np.flatnonzero(pair[at + 1 : end]) + (low + at + 1), filled)

    def _fits(self, at: int) -> bool:
        return self._buffer.startswith(b"ep", at + 2) or self._buffer.startswith(b"#a", max(0, at - 2))

    def _fitting(self, pairs: np.ndarray[tuple[int], np.dtype[np.intp]], filled: int) -> list[int]:
        """The same for many offsets at once ('success' on every line of a log must not make it slow)."""
        text = self._text
        third, fourth = (text[(pairs + i).clip(max=filled - 1)] for i in (2, 3))
        before, first = (text[(pairs - i).clip(min=0)] for i in (2, 1))
        word = (third == ord("e")) & (fourth == ord("p"))
        return list(map(int, pairs[word | ((before == ord("#")) & (first == ord("a")))]))


def _speaks(text: bytes | bytearray) -> bool:
    """Whether a hit, or text near one, says anything."""
    low = text.lower()
    return (
        b"ccep" in low
        or b"draft" in low
        or b"throughput:" in low
        or b"#acc" in low
        or b"eval time" in low
        or b"n_predict" in low
        or b"position " in low
    )


def _counts(text: bytearray) -> bool:
    """Whether a line with a hit may count drafts ('accepted connection' and 'Accept: */*' do not)."""
    low = text.lower()
    return (
        b"acceptance" in low
        or b"spec" in low
        or b"draft" in low
        or b"token" in low
        or b"accept len" in low
        or b"accept rate" in low
        or b"accepted len" in low
        or b"_accept" in low
        or b"accept_" in low
        or b"#acc" in low
    )


def _zone(buffer: bytearray, line: int, end: int, sent: int, filled: int) -> tuple[int, int]:
    """Where the lines around that of a hit (from `line` to `end`) begin that are not sent yet, and where they end."""
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


# -----------------------------------------------------------------------------
# One log line, freed of what terminals, containers and supervisors put around it.

_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
_PROCESS = re.compile(r"\(([A-Za-z]\w*?)(?:_(DP\d+))?(?:_TP\d+)? pid=(\d+)\)")
_COMPOSE = re.compile(r"^([\w.-]+)\s*\|\s")
_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?)|\b(?:INFO|WARNING|ERROR|DEBUG) (\d\d-\d\d \d\d:\d\d:\d\d)|\b(\d{1,2}\.\d\d\.\d{3}\.\d{3}) [A-Z] "
)

# The usual prefix of vLLM, of which a log may hold tens of thousands.
_USUAL = re.compile(
    r"(?:\(([A-Za-z][A-Za-z]*) pid=(\d+)\) )?(?:INFO|WARNING) (\d\d-\d\d \d\d:\d\d:\d\d) \[[\w.]+:\d+\] (?!\()"
)
_PREFIX = 160
"""Characters in which a prefix is looked for."""


def clean(raw: bytes) -> Line:
    """The line without colours and wrappers, with the process, engine and time that its prefix names."""
    text = raw.decode("utf-8", "replace")
    usual = _USUAL.match(text)
    if usual and "\x1b" not in text:
        return Line(text, f"/{usual[1]}:{usual[2]}" if usual[1] else "", None, usual[3])
    container = ""
    if text.startswith('{"log":'):
        text, container = _docker_json(text)
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    text = text.rstrip("\r\n")
    start = text[:_PREFIX]
    if "|" in start and (compose := _COMPOSE.match(start)):
        container = compose[1]
    processes = _PROCESS.findall(start) if "pid=" in start else []
    replica = next((dp for _, dp, _ in reversed(processes) if dp), None)
    process = "/".join([container, *(f"{name}{dp}:{pid}" for name, dp, pid in processes[:1])])
    time = _TIME.search(start)
    return Line(
        text=text,
        process=process,
        replica=f"{container}/{replica}" if container and replica else replica or container or None,
        time=next((t for t in time.groups() if t), None) if time else None,
    )


def embedded_json(text: str) -> Any:
    """The JSON value that makes up a line (a server-sent event's `data:` included); None if there is none."""
    stripped = text.strip()
    if stripped.startswith("data:"):
        stripped = stripped[5:].strip()
    # Anything else cannot carry counts; parsing every brace in a log would be slow.
    if not stripped.startswith("{") or "accept" not in stripped.lower() or not stripped.endswith("}"):
        return None
    try:
        return json.loads(stripped)
    except ValueError:
        return None


def _docker_json(text: str) -> tuple[str, str]:
    """The message and the container of a line of Docker's json-file driver."""
    try:
        entry = json.loads(text)
    except ValueError:
        return text, ""
    if not isinstance(entry, dict) or not isinstance(entry.get("log"), str):
        return text, ""
    return entry["log"].rstrip("\n"), ""


# -----------------------------------------------------------------------------
# Prometheus text pages, and the tables that people paste from a Prometheus UI.

_SAMPLE = re.compile(
    r"^\s*([a-zA-Z_:][\w:]*)\s*(?:\{(.*?)\})?\s*\|?\s*([-+]?(?:\d[\d_.]*(?:e[-+]?\d+)?|inf|nan))(?:\s+-?\d+)?\s*\|?\s*$",
    re.I,
)
_LABEL = re.compile(r'([a-zA-Z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_SIGN = re.compile(
    r"^(?:# (?:TYPE|HELP) \S+|(?:vllm|sglang|llamacpp|trtllm)[:_]\w+(?:\{.*?\})?\s*[|]?\s*[-+\d.naif]+)", re.M
)


def looks_like_metrics(text: str) -> bool:
    """Whether `text` is a metrics page rather than a log."""
    return _SIGN.search(text) is not None


def pages(samples: list[Sample]) -> Iterator[list[Sample]]:
    """The pages in a text: where a series comes again, another page (a later scrape of the same server) has begun."""
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
    """All samples of a page with a numeric value. Creation times (`_created`) are not samples of anything."""
    samples = []
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None or line.startswith("#") or match[1].endswith("_created"):
            continue
        labels = {name: value.replace(r"\"", '"') for name, value in _LABEL.findall(match[2] or "")}
        samples.append(Sample(match[1], labels, float(match[3].replace("_", ""))))
    return samples
