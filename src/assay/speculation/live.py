"""A running server: two scrapes of its counters and the window between them, and a race against another server."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from assay.engines.base import Capability, Request
from assay.errors import AssayError
from assay.speculation.benefit import Measured
from assay.speculation.read import Reading
from assay.speculation.record import Evidence, Kind, Observation, combine, fell, subtract
from assay.speculation.scan import looks_like_metrics, parse_samples, parsed_json
from assay.stats.cluster import mean_interval
from assay.verdict import Finding, Severity

if TYPE_CHECKING:
    from assay.engines.server.engine import ServerEngine
    from assay.engines.server.http import Transport

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


def send(engine: ServerEngine, requests: int, concurrency: int = 2, first: int = 0) -> Sent:
    """Send greedy requests over prose and code, and count the tokens that come back."""
    numbers = range(first, first + requests)
    wanted = [Request(prompt=PROMPTS[i % len(PROMPTS)], max_tokens=MAX_TOKENS, seed=i) for i in numbers]
    with ThreadPoolExecutor(concurrency) as pool:
        replies = list(pool.map(engine.generate, wanted))
    return Sent(len(replies), sum(r.completion_tokens or 0 for r in replies))


def race(engine: ServerEngine, rival: ServerEngine, requests: int) -> tuple[Sent, Measured]:
    """The speed of `engine` over that of `rival` for the same requests, asked in turn, so that each round's quotient is
    taken under one load; with Student's interval over the rounds' logarithms. The first round warms both up.
    """
    sent = send(engine, 2)
    send(rival, 2)
    logs = []
    for round_ in range(max(2, requests // 2)):
        paces = {}
        for own in (engine, rival) if round_ % 2 else (rival, engine):
            began = time.perf_counter()
            got = send(own, 2, first=2 * round_)
            paces[own] = max(got.tokens, 1) / max(time.perf_counter() - began, 1e-9)
            if own is engine:
                sent = Sent(sent.requests + got.requests, sent.tokens + got.tokens)
        logs.append(math.log(paces[engine] / paces[rival]))
    interval = mean_interval(logs)
    return sent, Measured(math.exp(interval.value), math.exp(interval.lo), math.exp(interval.hi))


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
    race: Measured | None = None

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
            "race": self.race,
        }


def watch(
    url: str,
    interval: float = 10.0,
    requests: int = 0,
    rival: str | None = None,
    api_key_env: str | None = None,
    timeout: float = 120.0,
    sleep: Callable[[float], None] = time.sleep,
) -> Live:
    """Scrape, let `interval` seconds pass or send requests of our own (to `rival` too, in turn), scrape again.

    AssayError where the server cannot be reached at either scrape.
    """
    from assay.engines.server.endpoint import parse_url
    from assay.engines.server.engine import ServerEngine, default_limits, read_key
    from assay.engines.server.http import Transport

    with ExitStack() as held:

        def connect(at: str) -> ServerEngine:
            engine = held.enter_context(ServerEngine.connect(at, api_key_env=api_key_env, timeout=timeout))
            engine.capabilities.require(Capability.COMPLETIONS, "--requests")
            return engine

        transport = Transport(
            parse_url(_PAGE.sub("", url)), key=read_key(api_key_env), limits=default_limits(timeout)
        )
        held.callback(transport.close)
        # The probes of these connections send requests too, which must not fall between the scrapes.
        engine = connect(url) if requests else None
        other = connect(rival) if rival else None
        before = _page(transport)
        began = time.monotonic()
        sent, measured = None, None
        if engine is not None and other is not None:
            sent, measured = race(engine, other, requests)
        elif engine is not None:
            sent = send(engine, requests)
        # The counters follow the last token by a moment.
        sleep(interval if sent is None else min(1.0, interval))
        after = _page(transport)
    return replace(between(before, after, time.monotonic() - began, sent), race=measured)


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
    value = parsed_json(text) if text.lstrip().startswith("[") else None
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
