"""A running server: two scrapes of its counters and the window between them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from assay.engines import Capability
from assay.errors import AssayError
from assay.speculation.combine import Evidence, combine
from assay.speculation.json_text import parsed_json
from assay.speculation.measured import Measured
from assay.speculation.metrics_page import has_samples, looks_like_metrics
from assay.speculation.observation import Kind, Observation
from assay.speculation.read import Reading
from assay.speculation.traffic import Sent, race, send
from assay.verdict import Finding, Severity

if TYPE_CHECKING:
    from assay.engines.server.engine import ServerEngine
    from assay.engines.server.http import Transport


_PAGE = re.compile(r"(?:/prometheus)?/metrics/?$")

ENOUGH_DRAFTS = 50
"""A window with fewer drafts is judged together with everything since the server started."""

_SWITCHES = (
    "switch the page on (llama.cpp: --metrics; SGLang: --enable-metrics; TensorRT-LLM:"
    " enable_iter_perf_stats), or give the log"
)


@dataclass(frozen=True)
class Live:
    """What two scrapes showed. `evidence` is the window's, or the lifetime's where the window is
    too thin.
    """

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
    """Scrape, let `interval` seconds pass or send requests of our own (to `rival` too, in turn),
    scrape again.

    AssayError where the server cannot be reached at either scrape.
    """
    from assay.engines.server.endpoint import parse_url
    from assay.engines.server.engine import ServerEngine, default_limits, read_key
    from assay.engines.server.http import Transport

    with ExitStack() as held:

        def connect(at: str) -> ServerEngine:
            engine = held.enter_context(
                ServerEngine.connect(at, api_key_env=api_key_env, timeout=timeout)
            )
            engine.capabilities.require(Capability.COMPLETIONS, "--requests")
            return engine

        transport = Transport(
            parse_url(_PAGE.sub("", url)), key=read_key(api_key_env), limits=default_limits(timeout)
        )
        held.callback(transport.close)
        # The probes of these connections send requests too, which must not fall between the
        # scrapes.
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
    """The metrics of a server as text: Prometheus, or TensorRT-LLM's array of iterations where it
    has nothing else.
    """
    root = transport.endpoint.root
    try:
        text = transport.get(f"{root}/metrics").decode("utf-8", "replace")
    except AssayError as error:
        if error.finding_id == "server.not_found":
            error.remedy = _SWITCHES
        raise
    iterations = _json_array(text)
    if iterations is None and not has_samples(text):
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
        elif last is not None and o.counts.fell_below(last.counts):
            reset = True
            window.append(replace(o, kind=Kind.WINDOW))
        else:
            # An engine that is new on the page has counted all it has since the first scrape.
            fresh = o.counts if last is None else o.counts.since(last.counts)
            window.append(replace(o, kind=Kind.WINDOW, counts=fresh))
    short, lifetime = combine(window), combine(second.settled())
    thin = (
        short.record.counts.drafts or short.record.counts.drafted or 0
    ) < ENOUGH_DRAFTS and short.record.counted
    other = None
    if sent is not None and short.record.counts.generated is not None:
        other = max(0, short.record.counts.generated - sent.tokens)
    live = Live(
        second,
        lifetime if thin and not reset else short,
        short,
        lifetime,
        seconds,
        "since start" if thin and not reset else "window",
        reset,
        sent,
        other,
        (),
    )
    return replace(live, findings=_findings(live, thin))


def _findings(live: Live, thin: bool) -> list[Finding]:
    found = []
    if live.reset:
        found.append(
            Finding(
                "speculation.counter_reset",
                Severity.WARNING,
                "the counters fell between the two scrapes: the server restarted; only what"
                " followed is counted",
                evidence={"interval_s": live.seconds},
                remedies=("run again once the server is up",),
            )
        )
    elif thin and (live.lifetime.record.counts.drafted or 0) > 0:
        found.append(
            Finding(
                "speculation.note",
                Severity.INFO,
                f"{live.window.record.counts.drafts or 0} drafts in {live.seconds:.0f} s are too few, so"  # noqa: E501
                " everything since start is judged",
                remedies=("a longer --interval, or --requests N to send some",),
            )
        )
    if live.sent is not None and live.other_tokens and live.other_tokens > 0.02 * live.sent.tokens:
        found.append(
            Finding(
                "speculation.other_traffic",
                Severity.INFO,
                f"{live.other_tokens:,} tokens of other requests are in the figures, beside"
                f" {live.sent.tokens:,} of ours",
                evidence={"own_tokens": live.sent.tokens, "other_tokens": live.other_tokens},
            )
        )
    return found
