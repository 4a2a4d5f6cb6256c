"""What one source says: its kind is recognised, the parsers read it, nothing is judged yet."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from assay.errors import AssayError
from assay.speculation import scan
from assay.speculation.parsers import Line, Parser, Sample, count
from assay.speculation.parsers.named import NAMES_DRAFTING, named_object
from assay.speculation.record import Observation
from assay.speculation.scan import new_parsers
from assay.speculation.sources import Source

_HEAD_NAMES = r"(?:mtp|nextn|eagle|draft|medusa|eh_proj|enorm|hnorm|shared_head|pre_fc_norm|fc\.)"


@dataclass(frozen=True)
class Clue:
    """One kind of message, how often it came, and the first of them."""

    id: str
    text: str
    count: int = 1


# id: what to look for in a line. The first group, where there is one, is what is quoted, else the
# line.
_PATTERNS: dict[str, re.Pattern[str]] = {
    "version": re.compile(
        r"(vLLM API server version \S+|Initializing a V\d LLM engine \(v[^)]+\)|sglang["
        r" _]version[=:]\s*\S+"
        r"|build: \d+ \(\w+\))",
        re.I,
    ),
    "weights_skipped": re.compile(rf"{_HEAD_NAMES}.*not found in params_dict", re.I),
    "weights_uninitialised": re.compile(
        rf"weights? .{{0,400}}(?:were|was) not initialized.*{_HEAD_NAMES}", re.I
    ),
    "weights_cast": re.compile(
        rf"(Attempted to load weight \S*{_HEAD_NAMES}\S* with dtype \S+ into parameter with dtype"
        r" \S+)",
        re.I,
    ),
    "weights_missing": re.compile(
        r"(?:MTP|nextn|speculative) (?:layer \S+ )?weights? missing", re.I
    ),
    "layer_reused": re.compile(
        r"(num_speculative_tokens > 1 will run multiple times of forward on same MTP layer)"
    ),
    "draft_context": re.compile(r"(Overriding draft model max model len from \d+ to \d+)"),
    "draft_vocab": re.compile(
        r"(?:draft|target).{0,200}vocab.{0,200}(?:not compatible|incompatible|mismatch|must match)",
        re.I,
    ),
    "speculation_on": re.compile(
        r"(speculative_config=SpeculativeConfig\([^)]*\)|speculative_algorithm='[^']+'|creating MTP"
        r" draft context"
        r"|adding speculative implementation '[\w-]+')"
    ),
    "sparse_method": re.compile(
        r"(?:speculative_(?:config|algorithm)|method)\W.{0,80}?\b((?:n-?gram|suffix|prompt_lookup|lookup)\w*)|(?:implementation|statistics)"
        r" '?(ngram[\w-]*)",
        re.I,
    ),
    "speculation_off": re.compile(r"(speculative_config=None|speculative_algorithm=None)"),
    "depth": re.compile(
        r"(?:num_speculative_tokens|num_spec_tokens|speculative_num_steps|--(?:spec-)?draft(?:-n)?-max|--spec-draft-n-max"
        r"|--num[-_]speculative[-_]tokens)['\"]?[=: ]\s*(\d{1,4})\b"
    ),
    "quantization": re.compile(r"\b(quantization='?(?!None)[\w-]+)'?[,)\s]"),
    "temperature": re.compile(
        r"(?:default.{0,40}sampling param|SamplingParams\().{0,400}?['\"]?temperature['\"]?[:=]"
        r" ?([\d.]+)",
        re.I,
    ),
    "kv_cache_dtype": re.compile(r"\b(kv_cache_dtype='?[\w-]+)'?[,)\s]"),
    "replies": re.compile(
        r"(Avg generation throughput: (?!0\.0 )[\d.]+ tokens/s, Running: [1-9]\d* reqs|(?<!prompt"
        r" )\beval time\s{0,20}=.*"
        r"|Decode batch.{0,400}gen throughput.*)"
    ),
}
_SPEED = re.compile(r"Avg generation throughput:\s*([\d.]+) tokens/s, Running: (\d+) reqs")
_NEEDLES = (
    "version",
    "llm engine (",
    "build: ",
    "params_dict",
    "not initialized",
    "attempted to load weight",
    "weights missing",
    "weight missing",
    "same mtp layer",
    "overriding draft",
    "vocab",
    "speculative",
    "num_spec",
    "quantization=",
    "kv_cache_dtype=",
    "mtp draft context",
    "temperature",
    "draft-max",
    "draft-n-max",
)
_LONGEST = 8192
"""Characters of a line that are looked at; configurations are printed on lines of a few thousand.
"""


def start_up(text: str) -> tuple[list[Clue], list[float]]:
    """Clues in the start of a log, and the speeds of intervals in which requests ran."""
    first: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for line in _candidates(text):
        for name, pattern in _PATTERNS.items():
            match = pattern.search(line)
            if match:
                seen[name] += 1
                quote = " ".join((match[match.lastindex or 0] if pattern.groups else line).split())[
                    :300
                ]
                if name == "depth" and quote not in first.get(name, quote).split(", "):
                    quote = f"{first.pop(name)}, {quote}"  # two runs, or two roles
                first.setdefault(name, quote)
    replies = _PATTERNS["replies"].search(text)
    if replies:
        first.setdefault("replies", " ".join(replies[1].split())[:300])
    speeds = [
        float(speed)
        for speed, running in _SPEED.findall(text)
        if _positive(speed) and int(running[:9])
    ]
    return [Clue(name, quote, max(1, seen[name])) for name, quote in first.items()], speeds


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) < 1e9
    except ValueError:
        return False


def _candidates(text: str) -> list[str]:
    """Lines that hold a needle, in order and each once; found with `find`, since the start of a log
    is megabytes.
    """
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


_NAMES_DRAFTING = re.compile(
    r"draft|specul|spec[_ -]?dec|\bspec[ _-]|mtp|eagle|medusa|dflash|nextn|n-?gram|lookahead", re.I
)
_COUNTS = re.compile(
    r"acc(?:ept\w{0,20})?\b[^.;]{0,40}?(?:\d{1,15}\s?/\s?\d|\d[\d.]{0,15}\s?%|(?:[=:]|->|→)\s*\d)"
    r"|(?<!\d)(?:\d{1,15}\s?(?:/|of)\s?\d{1,15}|\d[\d.]{0,15}\s?%)[^.;]{0,30}\baccept",
    re.I,
)
_SETTING = re.compile(
    r"\b\w{0,60}?(?:threshold|sampler|alpha|method)\w{0,60}['\"]?\s?[=:]\s?\S+", re.I
)


def looks_like_drafting(text: str) -> bool:
    """Whether a line names drafting and says how much was accepted."""
    text = _SETTING.sub("", text[:_LONGEST])
    return _NAMES_DRAFTING.search(text) is not None and _COUNTS.search(text) is not None


MAX_DOCUMENT = 256 << 20
"""Largest JSON document or metrics page that is read whole, in bytes."""
SHORT = 1 << 20
"""Characters up to which a log is tried with its lines joined, as if a terminal had broken them."""
_DEPTH = 12
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
_KNOWN_PAGE = re.compile(r"^(?:vllm|sglang|llamacpp|trtllm)[:_]\w", re.M)


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
        if scan.looks_like_metrics(text if source.complete else text[:65536]):
            self.kinds.append("metrics")
            self.metrics(text if source.complete else _whole(source).decode("utf-8", "replace"))
        elif (value := _document(source, text)) is not None:
            self.kinds.append("json")
            self.document(value)
            self._start_up(text)  # structured logs hold start-up messages too
        else:
            self.kinds.append("log")
            self._start_up(text)
            self._log(source, text)
        self.size += source.size

    def line(self, raw: bytes) -> list[Observation]:
        """Read one log line; returns what is new."""
        new: list[Observation] = []
        for text in scan.records(raw.decode("utf-8", "replace")):
            line = scan.clean(text.encode("utf-8", "replace"))
            value = scan.embedded_json(line.text)
            new += self._objects(value) if value is not None else self._parsed(line)
        self.observations += new
        return new

    def document(self, value: Any) -> None:
        """Read a parsed JSON document, whatever it is wrapped in."""
        samples = scan.json_samples(value)
        if samples:
            self._pages(samples)
        self.observations += self._objects(value)

    def metrics(self, text: str) -> None:
        """Read a Prometheus page. A page of a known engine without draft counters shows that it
        does not speculate.
        """
        before = len(self.observations)
        self._pages(scan.parse_samples(text))
        known = _KNOWN_PAGE.search(text)
        if (
            len(self.observations) == before
            and known
            and "spec" not in text
            and "draft" not in text
        ):
            self.clues.append(
                Clue("no_counters", f"the page of {known[0][:-2]} has no draft counters")
            )

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
                self.observations += self._objects(scan.parsed_json(raw))
        else:
            for raw in scan.interesting_lines(source):
                self.line(raw)
        if len(text) < SHORT:
            self._unwrap(text, before)
        for parser in self.parsers:
            self.observations += parser.silent(text)

    def _unwrap(self, text: str, before: int) -> None:
        best = _known(self.settled())
        for joined in scan.unwrapped(text):
            other = Reading()
            for raw in scan.interesting_lines(io.BytesIO(joined.encode("utf-8", "replace"))):
                other.line(raw)
            if _known(other.settled()) > best:
                best = _known(other.settled())
                self.observations[before:] = other.observations
                self.unread = other.unread

    def _pages(self, samples: list[Sample]) -> None:
        for page in scan.pages(samples):
            before = len(self.observations)
            for parser in self.parsers:
                self.observations += parser.samples(page)
            if len(self.observations) == before:
                for sample in page:
                    if _NAMES_DRAFTING.search(sample.name) and "accept" in sample.name.lower():
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
                for record in scan.records(row):
                    found += self._parsed(scan.clean(record.encode("utf-8", "replace")))
        for name, child in children:
            if isinstance(child, Mapping | list):
                found += self._objects(child, depth + 1, str(name))
        rich = [o for o in found if o.definition != "openai_usage"]
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
    if generated is None or len(rich) != 1 or rich[0].generated is not None:
        return rich
    return [replace(rich[0], generated=generated)]


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
        o.has_counts + (o.drafts is not None) + len(o.accepted_per_position or ())
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


def _document(source: Source, text: str) -> Any:
    """The JSON document that a source is; None if it is something else."""
    start = text.lstrip("\ufeff \t\r\n")
    if not start.startswith(("{", "[")) or start.startswith('{"log":'):
        return None
    first_line = start.splitlines()[0]
    if not source.complete and _json_row(first_line) is not None:
        return None  # a large log of JSON lines
    if start.startswith("[") and not _opens_json_array(start):
        return None  # a log whose lines start with a bracket
    body = (
        start
        if source.complete
        else _whole(source).decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    )
    try:
        return json.loads(body)
    except RecursionError:
        raise _broken(source, "it is nested too deeply") from None
    except ValueError as error:
        rows = [row for row in body.splitlines() if row.strip()]
        values = [v for row in rows if (v := _json_row(row)) is not None]
        # Server-sent events have lines without JSON; a log that begins with JSON has lines of every
        # kind.
        others = sum(not row.startswith(("data:", "event:", "id:", ":")) for row in rows) - len(
            values
        )
        if values:
            return values if others <= 0 else None
        if start.startswith("{") and not start.startswith(('{"', "{\n", "{\r", "{ ", "{}")):
            return None
        raise _broken(source, f"the JSON ends early or is broken: {error}") from error


def _broken(source: Source, why: str) -> AssayError:
    return AssayError(
        f"{source.name}: {why}",
        finding_id="speculation.source_truncated",
        remedy="save the response again, whole",
    )


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


def _json_row(text: str) -> Any:
    """The JSON value on a line, a server-sent event's `data:` included."""
    stripped = text.strip().removeprefix("data:").strip()
    return scan.parsed_json(stripped) if stripped.startswith(("{", "[")) else None


def _opens_json_array(text: str) -> bool:
    """Whether '[' opens a JSON array of objects, not a `[2026-…]` or `[metrics.py]` prefix."""
    return text[1:64].lstrip()[:1] in ("{", "[", "]")
