"""A running server: two scrapes of its counters, and the window between them."""

from __future__ import annotations

import json
import math
import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from assay.engines.base import Capability
from assay.errors import AssayError, UsageError
from assay.speculation.health import Assessment, assess
from assay.speculation.judge import Examined, SpecOptions, is_url, judge_run
from assay.speculation.read import Reading
from assay.speculation.record import Evidence, Kind, Observation, combine, fell, subtract
from assay.speculation.scan import looks_like_metrics, parse_samples
from assay.speculation.sources import Source
from assay.verdict import Finding, Report, Severity

if TYPE_CHECKING:
    from assay.engines.server.engine import ServerEngine
    from assay.engines.server.http import Transport


# -----------------------------------------------------------------------------
# Follow a growing log, through rotation and truncation, and say how the head is doing whenever it changes.

POLL_SECONDS = 0.5
SAY_SECONDS = 10.0
"""A line is printed whenever the health changes, and otherwise at most this often."""


def follow(
    name: str,
    options: SpecOptions,
    seconds: float | None = None,
    say: Callable[[str], None] | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Read `name` (a file, or `-`) as it grows, until interrupted, until its end (`-`), or for `seconds`."""
    if is_url(name):
        raise UsageError(
            "--follow reads a log; a server is watched with --interval", finding_id="speculation.usage"
        )
    tell = say or (lambda text: print(text, file=sys.stderr, flush=True))
    reading = Reading()
    interrupted = False
    until = None if seconds is None else clock() + seconds
    health, told = None, -math.inf
    try:
        batches = (
            _standard_input(until, clock) if name == "-" else _file(Path(name), reading, until, sleep, clock)
        )
        for batch in batches:
            fresh = [o for raw in batch for o in reading.line(raw)]
            if not fresh:
                continue
            assessment = assess(evidence := combine(reading.settled()))
            if assessment.health is not health or clock() - told >= SAY_SECONDS:
                health, told = assessment.health, clock()
                tell(_status(evidence, assessment, fresh[-1].time))
    except KeyboardInterrupt:
        interrupted = True
    run = Examined(reading, combine(reading.settled()))
    report = judge_run(run, [name], options)
    return replace(report, interrupted=interrupted)


def _status(evidence: Evidence, assessment: Assessment, when: str | None) -> str:
    """One line on the run so far."""
    length = evidence.record.tokens_per_step
    tokens = "" if length is None else f", {length:.2f} tokens per step"
    return f"{when or time.strftime('%H:%M:%S')}  {assessment.health.value}: {assessment.reason}{tokens}"


def _file(
    path: Path,
    reading: Reading,
    until: float | None,
    sleep: Callable[[float], None],
    clock: Callable[[], float],
) -> Iterator[list[bytes]]:
    """Batches of new whole lines. What the file already holds is read first, at full speed."""
    stream = _open(path)
    try:
        growing = _WholeLines(stream)
        if os.fstat(stream.fileno()).st_size:
            reading.add(Source(str(path), growing))
            yield []
        while until is None or clock() < until:
            lines = growing.lines()
            if lines:
                yield lines
                continue
            if _replaced(path, stream):
                # What was written between the last look and the rename is still in the old file.
                yield growing.lines()
                stream.close()
                stream = _open(path)
                growing = _WholeLines(stream)
                continue
            sleep(POLL_SECONDS)
    finally:
        stream.close()


class _WholeLines:
    """Reads a growing file up to its last whole line; the rest waits for its end."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._rest = b""
        self._ready = b""

    def read(self, size: int, /) -> bytes:
        """New whole lines, about `size` bytes of them; b'' where there are none yet."""
        while part := self._stream.read(size):
            data = self._rest + part
            cut = data.rfind(b"\n") + 1
            self._rest = data[cut:]
            if cut:
                return data[:cut]
        return b""

    def readinto(self, buffer: memoryview, /) -> int:
        """The same into `buffer`."""
        if not self._ready:
            self._ready = self.read(len(buffer))
        part, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)

    def lines(self) -> list[bytes]:
        """New whole lines."""
        return self.read(-1).splitlines()


def _arrives(seconds: float) -> bool:
    """Whether something can be read from standard input within `seconds`."""
    return seconds > 0 and bool(select.select([sys.stdin.fileno()], [], [], seconds)[0])


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise AssayError(
            f"cannot follow {path}: {error.strerror}",
            finding_id="speculation.source_unreadable",
            remedy="check the path and the permissions",
        ) from error


def _replaced(path: Path, stream: BinaryIO) -> bool:
    """Whether the log was rotated (another file has its name) or truncated."""
    try:
        now = path.stat()
    except OSError:
        return False  # between the rename and the new file
    own = os.fstat(stream.fileno())
    return (now.st_dev, now.st_ino) != (own.st_dev, own.st_ino) or now.st_size < stream.tell()


def _standard_input(until: float | None, clock: Callable[[], float]) -> Iterator[list[bytes]]:
    """Lines of standard input in the batches in which they arrive."""
    rest = b""
    while True:
        if until is not None and not _arrives(until - clock()):
            return
        part = os.read(sys.stdin.fileno(), 1 << 16)
        if not part:
            break
        data = rest + part
        cut = data.rfind(b"\n") + 1
        rest = data[cut:]
        yield data[:cut].splitlines()
    if rest:
        yield [rest]


# -----------------------------------------------------------------------------
# Requests of our own: known traffic, so that what others send shows.

PROMPTS: tuple[str, ...] = (
    "The lighthouse keeper had not spoken to anyone for three weeks when the boat finally",
    'def merge_sorted(left, right):\n    """Merge two sorted lists into one."""\n',
    "Rivers shape the land in two ways. First, they",
    "The recipe for a simple vegetable soup begins with",
    'class Stack:\n    """A stack backed by a list."""\n\n    def __init__(self):\n',
    "In the spring of that year the town council decided to",
    "To explain why the sky is blue, one has to start with",
    "SELECT customers.name, SUM(orders.total)\nFROM customers\n",
)
MAX_TOKENS = 128


@dataclass(frozen=True)
class Sent:
    """Requests that were answered, and the completion tokens that the server says it sent for them."""

    requests: int
    tokens: int


def send(engine: ServerEngine, requests: int, concurrency: int = 2) -> Sent:
    """Send greedy requests over prose and code, and count the tokens that come back."""
    from assay.engines.base import Request

    wanted = [
        Request(prompt=PROMPTS[i % len(PROMPTS)], max_tokens=MAX_TOKENS, seed=i) for i in range(requests)
    ]
    with ThreadPoolExecutor(concurrency) as pool:
        replies = list(pool.map(engine.generate, wanted))
    return Sent(len(replies), sum(r.completion_tokens or 0 for r in replies))


# -----------------------------------------------------------------------------

_PAGE = re.compile(r"(?:/prometheus)?/metrics/?$")
ENOUGH_DRAFTS = 50
"""A window with fewer drafts is judged together with everything since the server started."""


_SWITCHES = (
    "switch the page on (llama.cpp: --metrics; SGLang: --enable-metrics; TensorRT-LLM: enable_iter_perf_stats), or give "
    "the log"
)


@dataclass(frozen=True)
class Live:
    """What two scrapes showed. `evidence` is the window's, or the lifetime's where the window is too thin."""

    reading: Reading
    evidence: Evidence
    window: Evidence
    lifetime: Evidence
    seconds: float
    judged: str
    reset: bool
    sent: Sent | None
    other_tokens: int | None
    findings: Sequence[Finding]

    def to_json(self) -> dict[str, Any]:
        """The object `results.live`."""
        return {
            "interval_s": self.seconds,
            "judged": self.judged,
            "counters_reset": self.reset,
            "window": self.window.record,
            "lifetime": self.lifetime.record,
            "own_requests": None if self.sent is None else self.sent.requests,
            "own_tokens": None if self.sent is None else self.sent.tokens,
            "other_tokens": self.other_tokens,
        }


def watch(url: str, options: SpecOptions, sleep: Callable[[float], None] = time.sleep) -> Live:
    """Scrape, let `interval` seconds pass (or send requests of our own), scrape again.

    AssayError where the server cannot be reached at either scrape.
    """
    from assay.engines.server.endpoint import parse_url
    from assay.engines.server.engine import ServerEngine, default_limits, read_key
    from assay.engines.server.http import Transport

    endpoint = parse_url(_PAGE.sub("", url))
    with ExitStack() as held:
        transport = Transport(
            endpoint, key=read_key(options.api_key_env), limits=default_limits(options.timeout)
        )
        held.callback(transport.close)
        engine = None
        if options.requests:
            engine = held.enter_context(
                ServerEngine.connect(url, api_key_env=options.api_key_env, timeout=options.timeout)
            )
            # The probe sends requests of its own, which must not fall between the scrapes.
            engine.capabilities.require(Capability.COMPLETIONS, "--requests")

        def page() -> str:
            return _page(transport)

        before = page()
        began = time.monotonic()
        sent = send(engine, options.requests) if engine is not None else None
        # The counters follow the last token by a moment.
        sleep(options.interval if sent is None else min(1.0, options.interval))
        after = page()
    return between(before, after, time.monotonic() - began, sent)


def _page(transport: Transport) -> str:
    """The metrics of a server as text: Prometheus, or TensorRT-LLM's array of iterations where it has nothing else."""
    root = transport.endpoint.root
    try:
        text = transport.get(f"{root}/metrics").decode("utf-8", "replace")
    except AssayError as error:
        if error.finding_id == "server.not_found":
            error.remedy = _SWITCHES
        raise
    iterations = _json_array(text)
    if iterations is None and not parse_samples(text):
        raise AssayError(
            f"{root}/metrics is not a metrics page",
            finding_id="speculation.source_not_metrics",
            remedy="name the inference server itself, not a proxy or a web page",
        )
    if iterations is None:
        return text
    try:
        other = transport.get(f"{root}/prometheus/metrics").decode("utf-8", "replace")
    except AssayError:
        return text
    return other if looks_like_metrics(other) else text


def _reading(page: str) -> Reading:
    reading = Reading(kinds=["metrics"])
    iterations = _json_array(page)
    if iterations is None:
        reading.metrics(page)
    else:  # those since the last look, so the second page holds the window
        reading.document(iterations)
    return reading


def _json_array(text: str) -> list[Any] | None:
    """The JSON array that `text` is; None if it is anything else."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, list) else None


def between(before: str, after: str, seconds: float, sent: Sent | None = None) -> Live:
    """What two pages of one server say about the time between them."""
    first, second = (_reading(page) for page in (before, after))
    old = {(o.replica, o.stream, o.definition): o for o in first.settled()}
    window: list[Observation] = []
    reset = False
    for o in second.settled():
        last = old.get((o.replica, o.stream, o.definition))
        if o.kind is not Kind.TOTAL:
            window.append(o)
        elif last is not None and fell(last, o):
            reset = True
            window.append(replace(o, kind=Kind.WINDOW))
        else:
            # An engine that is new on the page has counted all it has since the first scrape.
            window.append(replace(o if last is None else subtract(o, last), kind=Kind.WINDOW))
    short, lifetime = combine(window), combine(second.settled())
    thin = (short.record.drafts or short.record.drafted or 0) < ENOUGH_DRAFTS and short.record.counts
    other = None
    if sent is not None and short.record.generated is not None:
        other = max(0, short.record.generated - sent.tokens)
    live = Live(
        second, lifetime if thin and not reset else short, short, lifetime, seconds,
        "since start" if thin and not reset else "window", reset, sent, other, (),
    )  # fmt: skip
    return replace(live, findings=_findings(live, thin))


def _findings(live: Live, thin: bool) -> list[Finding]:
    found = []
    if live.reset:
        found.append(
            Finding(
                "speculation.counter_reset", Severity.WARNING,
                "the counters fell between the two scrapes: the server restarted; only what followed is counted",
                evidence={"interval_s": live.seconds}, remedies=("run again once the server is up",),
            )
        )  # fmt: skip
    elif thin and (live.lifetime.record.drafted or 0) > 0:
        found.append(
            Finding(
                "speculation.note", Severity.INFO,
                f"{live.window.record.drafts or 0} drafts in {live.seconds:.0f} s are too few, so everything since "
                "start is judged",
                remedies=("a longer --interval, or --requests N to send some",),
            )
        )  # fmt: skip
    if live.sent is not None and live.other_tokens and live.other_tokens > 0.02 * live.sent.tokens:
        found.append(
            Finding(
                "speculation.other_traffic", Severity.INFO,
                f"{live.other_tokens:,} tokens of other requests are in the figures, beside {live.sent.tokens:,} of ours",
                evidence={"own_tokens": live.sent.tokens, "other_tokens": live.other_tokens},
            )
        )  # fmt: skip
    return found
