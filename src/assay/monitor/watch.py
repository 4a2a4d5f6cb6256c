"""`assay watch`: ask a round of the canary, judge it, tell what changed, keep the state; again and
again.

The state (baselines, evidence, alarms) is kept after every round, so a watch that was stopped goes
on where it was. Only rounds are counted, never the time of day, so a clock that is set changes
nothing; memory and disk are bounded.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty, Full, Queue
from typing import Any

import httpx
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family

from assay.engines.server.engine import read_key
from assay.engines.server.http import parse_url, without_credentials
from assay.environment import VERSION
from assay.errors import AssayError, UsageError
from assay.monitor.canary import Canary, Round, State
from assay.monitor.change import CALM, LEARN, MONTH_S, Changes, Numbers
from assay.options import Options, option
from assay.runs import Kept, cache_dir
from assay.speculation.health import Health
from assay.verdict import Finding, Metric, Report, Severity, Table, Verdict

# What others see of a watch: a page of Prometheus metrics, two pages of health, and a webhook.
#
# - `/metrics`: everything that is measured, as gauges and counters `assay_watch_…`.
# - `/healthz`: 200 while the watch itself goes on.
# - `/health_generate`: 200 while the watched server writes sane text, also when it is busy or another model; 503 when it
#   is down, hangs or writes garbage.


CONTENT = "text/plain; version=0.0.4; charset=utf-8"


def parse_listen(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `PORT`; UsageError for anything else."""
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65_535:
        raise UsageError(
            f"--listen {text!r} is no HOST:PORT",
            remedy="write it as 127.0.0.1:9877, or none to open no port",
        )
    return host.strip("[]") or "127.0.0.1", int(port)


class _Collector:
    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self.status = status

    def collect(self) -> Iterator[Family]:
        """The metrics of the status as it is now."""
        yield from families(self.status())


def families(status: Mapping[str, Any]) -> Iterator[Family]:
    """The status of a watch (`Watch.status`) as Prometheus metrics; what is not known has no
    sample.
    """

    def gauge(name: str, about: str, value: Any) -> Iterator[Family]:
        if value is not None:
            yield GaugeMetricFamily(f"assay_watch_{name}", about, value=float(value))

    info = GaugeMetricFamily(
        "assay_watch_info", "What is watched.", labels=["url", "model", "server", "assay"]
    )
    info.add_metric([status["url"], status["model"] or "", status["server"] or "", VERSION], 1.0)
    yield info
    state = GaugeMetricFamily(
        "assay_watch_state", "1 for the state that the server is in.", labels=["state"]
    )
    for name in status["states"]:
        state.add_metric([name], float(name == status["state"]))
    yield state
    rounds = CounterMetricFamily(
        "assay_watch_rounds", "Rounds of the canary by their state.", labels=["state"]
    )
    for name, count in status["rounds"].items():
        rounds.add_metric([name], float(count))
    yield rounds
    standing = GaugeMetricFamily("assay_watch_alarm", "1 while the alarm stands.", labels=["alarm"])
    raised = CounterMetricFamily(
        "assay_watch_alarms", "How often the alarm was raised.", labels=["alarm"]
    )
    for name in status["known_alarms"]:
        standing.add_metric([name], float(name in status["alarms"]))
        raised.add_metric([name], float(status["raised"].get(name, 0)))
    yield standing
    yield raised
    evidence = GaugeMetricFamily(
        "assay_watch_evidence_ratio",
        "Evidence for a change; an alarm at 1.",
        labels=["quantity", "kind"],
    )
    for name, value in status["evidence"].items():
        evidence.add_metric(name.split(".", 1), value)
    yield evidence
    yield from gauge(
        "text_score", "Bits per byte of the texts of the last round.", status["bits_per_byte"]
    )
    yield from gauge(
        "difference",
        "Mean difference from the baseline, in the quantity's unit.",
        status["difference"],
    )
    yield from gauge("tolerance", "Differences of this size are no change.", status["tolerance"])
    yield from gauge(
        "first_tokens_changed_ratio",
        "Share of greedy tokens that changed.",
        status["tokens_changed"],
    )
    yield from gauge(
        "tool_call_changed",
        "1 if the tool call has another outcome than at first.",
        status["tool_changed"],
    )
    yield from gauge(
        "first_token_seconds", "Median seconds until a first token.", status["latency_s"]
    )
    yield from gauge("queue_length", "Requests that wait in the server.", status["queued"])
    yield from gauge(
        "acceptance_ratio", "Acceptance rate of speculative tokens.", status["acceptance"]
    )
    yield from gauge(
        "load_ratio", "Share of one stream's time that the canary takes.", status["load"]
    )
    yield from gauge(
        "interval_seconds", "Seconds from one round to the next.", status["interval_s"]
    )
    yield from gauge(
        "detection_seconds",
        "Seconds in which a drift of 0.01 bits per byte is found.",
        status["finds_s"],
    )
    yield from gauge("learning", "1 while the baseline is learnt.", status["learning"])
    yield from gauge("last_round_timestamp_seconds", "When the last round ended.", status["at"])
    yield CounterMetricFamily(
        "assay_watch_webhook_failures",
        "Messages that the webhook did not take.",
        value=float(status["webhook_failures"]),
    )


class Exporter:
    """The pages on a port, served by threads of their own. Use as a context manager."""

    def __init__(self, listen: str, status: Callable[[], Mapping[str, Any]]) -> None:
        host, port = parse_listen(listen)
        registry = CollectorRegistry()
        registry.register(_Collector(status))

        class Handler(BaseHTTPRequestHandler):
            timeout = 10
            server_version = f"assay/{VERSION}"
            sys_version = ""

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                now = status()
                code, kind, body = 404, "text/plain", b"/metrics, /healthz or /health_generate\n"
                if path == "/metrics":
                    code, kind, body = 200, CONTENT, generate_latest(registry)
                elif path in ("/healthz", "/health_generate"):
                    good = now["alive"] if path == "/healthz" else now["generates"]
                    told = {k: now[k] for k in ("state", "reason", "alarms", "at", "alive")}
                    code, kind, body = (
                        200 if good else 503,
                        "application/json",
                        json.dumps(told).encode() + b"\n",
                    )
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise UsageError(
                f"cannot listen at {host}:{port}: {error.strerror or error}",
                remedy="name a free port with --listen, or none to open no port",
            ) from error
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]

    def __enter__(self) -> Exporter:
        threading.Thread(
            target=self._server.serve_forever, name="assay-watch-pages", daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class Webhook:
    """Posts messages as JSON from a thread of its own: a webhook that hangs delays no round. The
    last 100 wait.

    The URL may hold a secret, so it is never shown.
    """

    TRIES = 3

    def __init__(self, url: str, *, pause: float = 2.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError("--webhook is no http(s) URL", remedy="write it as https://HOST/PATH")
        self._url, self._pause = url, pause
        self._queue: Queue[dict[str, Any]] = Queue(maxsize=100)
        self.failures = 0
        threading.Thread(target=self._run, name="assay-watch-webhook", daemon=True).start()

    def post(self, message: dict[str, Any]) -> None:
        """Queue a message; the oldest goes where too many wait."""
        while True:
            try:
                self._queue.put_nowait(message)
                return
            except Full:
                try:
                    self._queue.get_nowait()
                    self._queue.task_done()
                    self.failures += 1
                except Empty:
                    pass

    def flush(self, seconds: float) -> None:
        """Wait until everything is sent, at most so long."""
        end = time.monotonic() + seconds
        while self._queue.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.05)

    def _run(self) -> None:
        while True:
            message = self._queue.get()
            if not any(self._sent(message, attempt) for attempt in range(self.TRIES)):
                self.failures += 1
            self._queue.task_done()

    def _sent(self, message: dict[str, Any], attempt: int) -> bool:
        if attempt:
            time.sleep(self._pause * 4 ** (attempt - 1))
        try:
            answer = httpx.post(
                self._url, json=message, timeout=10.0, headers={"User-Agent": f"assay/{VERSION}"}
            )
        except (httpx.HTTPError, httpx.InvalidURL):
            return False
        return answer.is_success


# The watch itself.


STATES = ("learning", "ok", "changed", "busy", "broken", "down")
IN_A_ROW = 2
"""Rounds in a row that are broken or down before an alarm is raised."""
EVENTS = 100
_FORMAT = 1
_DRIFT = 0.01
"""Bits per byte whose detection time is told."""


@dataclass(frozen=True)
class WatchOptions(Options):
    """How often to look, how hard, and whom to tell."""

    VERB, AREA = "watch", "server"

    interval: float = option(
        60.0,
        "Seconds from one round to the next; longer where a round would take more than --load.",
        lo=1,
        hi=86_400,
    )
    load: float = option(
        0.01,
        "Largest share of the server's time that the canary may take.",
        form="fraction",
        metavar="PERCENT",
        lo=0.0001,
        hi=1,
    )
    false_alarms: float = option(
        1.0,
        "Largest number of false alarms of change per month, over all detectors.",
        lo=0.001,
        hi=100,
    )
    listen: str = option(
        "127.0.0.1:9877",
        "Where /metrics, /healthz and /health_generate are served; none opens no port.",
        metavar="HOST:PORT",
        apart=True,
    )
    webhook: str | None = option(
        None,
        "URL that gets a JSON message for every alarm and every change of state.",
        metavar="URL",
        apart=True,
    )
    rounds: int | None = option(
        None, "Stop after so many rounds; by default it never ends.", lo=1, apart=True
    )
    new_baseline: bool = option(
        False, "Forget what was learnt of this server and learn its model anew.", apart=True
    )
    model: str | None = option(None, "Model to ask; default: the first the server lists.")
    api_key_env: str | None = option(
        None, "Environment variable that holds the API key.", metavar="NAME", apart=True
    )
    timeout: float = option(20.0, "Seconds that one answer may take.", lo=1, hi=600, apart=True)


@dataclass(frozen=True)
class Alarm:
    """What an alarm says, and what to do about it."""

    id: str
    title: str
    causes: tuple[str, ...]
    remedies: tuple[str, ...]
    severity: Severity = Severity.ERROR


_CHANGED = (
    "other weights or another quantisation are served under the same name",
    "another release of the engine, another kernel, KV dtype or attention backend",
    "memory or a shard that was damaged",
)
_LOOK = (
    "assay check URL --identity REFERENCE",
    "if the change was wanted: assay watch URL --new-baseline",
)
ALARMS: Mapping[str, Alarm] = {
    "down": Alarm(
        "server.down",
        "nothing answers",
        ("the process ended", "the network or a proxy"),
        ("look into the server's log",),
    ),
    "broken": Alarm(
        "server.broken",
        "its answers are garbage or errors",
        (
            "weights, cache or kernels are damaged",
            "the engine's process hangs or died behind its front end",
        ),
        ("take it out of the load balancer and run assay check URL",),
    ),
    "bits_per_byte.up": Alarm(
        "server.drift", "it predicts fixed texts worse than at first", _CHANGED, _LOOK
    ),
    "bits_per_byte.down": Alarm(
        "server.drift", "it predicts fixed texts better than at first", _CHANGED, _LOOK
    ),
    "bits_per_byte.spread": Alarm(
        "server.drift", "its scores of fixed texts moved, some up and some down", _CHANGED, _LOOK
    ),
    "bits_per_token.up": Alarm(
        "server.drift", "its likeliest tokens are less likely than at first", _CHANGED, _LOOK
    ),
    "bits_per_token.down": Alarm(
        "server.drift", "its likeliest tokens are more likely than at first", _CHANGED, _LOOK
    ),
    "bits_per_token.spread": Alarm(
        "server.drift", "the probabilities of its likeliest tokens moved", _CHANGED, _LOOK
    ),
    "first_tokens.changed": Alarm(
        "server.tokens_changed", "its greedy first tokens are others than at first", _CHANGED, _LOOK
    ),
    "tool_call.changed": Alarm(
        "server.tool_call_changed",
        "a tool call has another outcome than at first",
        ("the tool parser or the chat template changed", *_CHANGED),
        ("assay check URL --suite tools", *_LOOK),
    ),
    "model": Alarm(
        "server.model_changed",
        "it no longer lists the model that is watched",
        ("another model was deployed here",),
        _LOOK,
    ),
    "several_servers": Alarm(
        "server.several_servers",
        "several servers answer at this address",
        ("a load balancer before replicas",),
        ("watch each replica by itself",),
        Severity.WARNING,
    ),
    "speculation": Alarm(
        "speculation.broken",
        "next to no speculative token is accepted any more",
        ("the draft head was not loaded", "target and drafter are no longer of one model"),
        ("assay spec URL",),
    ),
}


def run_watch(
    url: str,
    options: WatchOptions | None = None,
    *,
    say: Callable[[str], None] = lambda line: None,
    canary: Canary | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = lambda seconds: time.sleep(seconds),
) -> Report:
    """Watch the OpenAI-compatible server at `url` until interrupted, or for `options.rounds`
    rounds.

    Raises UsageError for options that make no sense; a server that does not answer is watched until
    it does. The clocks (monotonic and wall, in seconds) and the canary can be given, for tests and
    simulations.
    """
    options = options or WatchOptions()
    parse_url(url)
    read_key(options.api_key_env)
    canary = canary or Canary(
        url, model=options.model, api_key_env=options.api_key_env, timeout=options.timeout,
        interval_s=options.interval, load=options.load, clock=clock,
    )  # fmt: skip
    watch = Watch(url, options, canary, say=say, clock=clock, wall=wall)
    with contextlib.ExitStack() as held:
        held.callback(canary.close)
        if options.listen != "none":
            parse_listen(options.listen)
            exporter = held.enter_context(Exporter(options.listen, watch.status))
            say(
                "metrics at"
                f" http://{options.listen.rpartition(':')[0] or '127.0.0.1'}:{exporter.port}/metrics"
            )
        interrupted = False
        try:
            while True:
                watch.step()
                if options.rounds is not None and watch.done >= options.rounds:
                    break
                sleep(watch.wait())
        except KeyboardInterrupt:
            interrupted = True
        with _once_is_enough():
            watch.save()
            if watch.webhook is not None:
                watch.webhook.flush(5.0)
            return watch.report(interrupted)


@contextlib.contextmanager
def _once_is_enough() -> Iterator[None]:
    """No further Ctrl-C or SIGTERM for the seconds that the report takes: `timeout` and shells send
    two at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {sign: signal.signal(sign, signal.SIG_IGN) for sign in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


@dataclass
class Watch:
    """One watched server: its rounds so far, what stands, and whom to tell."""

    url: str
    options: WatchOptions
    canary: Canary
    say: Callable[[str], None] = lambda line: None
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    changes: Changes | None = None
    alarms: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Alarms that stand: since when (wall clock) and why."""
    raised: dict[str, int] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=EVENTS))
    last: Round = field(default_factory=Round)
    state: str = "learning"
    done: int = 0
    """Rounds of this process; `rounds` counts those of earlier ones too."""
    in_a_row: int = 0
    other: int = 0
    """Rounds in a row that gave the other kind of numbers than those that are watched."""
    met: set[State] = field(default_factory=set)
    """States of the rounds of this process."""
    model: str = ""
    server: str = ""
    starts: list[float] = field(default_factory=list)
    """When the processes that answered here began, the latest last."""

    def __post_init__(self) -> None:
        self.where = without_credentials(self.url)
        self.webhook = Webhook(self.options.webhook) if self.options.webhook else None
        self.kept = Kept(
            cache_dir("watch"), {"watch": _FORMAT, "url": self.where, "model": self.options.model}
        )
        self.acceptance: float | None = None
        self.bits: float | None = None
        self.waited = self.options.interval
        self._at: float | None = None
        self._beat = self.clock()
        self._lock = threading.RLock()
        self._new: dict[str, int] = {}
        if self.options.new_baseline:
            self.kept.forget("state")
        elif (state := self.kept.get("state")) is not None:
            self._restore(state)

    # One round.

    def wait(self) -> float:
        """Seconds until the next round."""
        self.waited = self.canary.wait()
        return self.waited

    def step(self) -> Round:
        """Ask a round, judge it, tell what is new, keep the state."""
        self.canary.watched = self.model
        found = self.canary.round()
        with self._lock:
            self.last, self._at, self._beat = found, self.wall(), self.clock()
            self.done += 1
            self.met.add(found.state)
            self.rounds[found.state.value] = self.rounds.get(found.state.value, 0) + 1
            self._whether_it_works(found)
            if found.state in (State.OK, State.BUSY):
                self._who_it_is(found)
                self._whether_it_changed(found)
            self._set_state(found)
        self.save()
        return found

    def _whether_it_works(self, found: Round) -> None:
        bad = found.state in (State.BROKEN, State.DOWN)
        self.in_a_row = self.in_a_row + 1 if bad else 0
        if bad and self.in_a_row >= IN_A_ROW:
            other = "down" if found.state is State.BROKEN else "broken"
            if other in self.alarms:
                self._over(other)
            self._raise(found.state.value, found.reason)
        elif found.state is State.OK:
            for name in ("down", "broken"):
                if name in self.alarms:
                    self._over(name)

    def _who_it_is(self, found: Round) -> None:
        if self.server and found.version and found.version != self.server:
            self._event("version", f"the server is now {found.version}, it was {self.server}")
        self.server = found.version or self.server
        self.model = self.model or found.model
        if found.listed and self.model and self.options.model is None:
            if self.model not in found.listed:
                self._raise(
                    "model", f"it lists {', '.join(found.listed[:3])}, and {self.model} no longer"
                )
            elif "model" in self.alarms:
                self._over("model")
        if found.started is not None and (not self.starts or found.started != self.starts[-1]):
            if found.started in self.starts[:-1]:
                self._raise("several_servers", "the start time of its process goes back and forth")
                self.starts.remove(found.started)
            elif self.starts:
                self._event("restarted", "the server's process is a new one")
                if "several_servers" in self.alarms:
                    self._over("several_servers")
            self.starts = [*self.starts, found.started][-8:]
        if found.speculation is not None and found.speculation.judged:
            self.acceptance = found.speculation.rate.value if found.speculation.rate else None
            if found.speculation.health is Health.BROKEN:
                self._raise("speculation", found.speculation.reason)
            elif "speculation" in self.alarms:
                self._over("speculation")

    def _whether_it_changed(self, found: Round) -> None:
        changes = self._changes_for(found)
        if found.bits:
            self.bits = math.fsum(found.bits.values()) / len(found.bits)
        raised, over = changes.update(
            found.bits if changes.scores else found.token_bits, found.tokens, found.tools
        )
        for name in raised:
            self._raise(name, self._measured(name))
        for name in over:
            if name in self.alarms:
                self._over(name)

    def _changes_for(self, found: Round) -> Changes:
        """The detectors, made for what the server can: after a restart it may score texts that it
        did not, or no more.
        """
        if self.changes is None:
            self.changes = Changes(
                self.options.interval, self.options.false_alarms, scores=bool(found.bits)
            )
        changes = self.changes
        other = found.bits if not changes.scores else found.token_bits if not found.bits else {}
        self.other = self.other + 1 if other else 0
        if self.other >= LEARN:
            changes.measure(scores=not changes.scores)
            for name in [n for n in self.alarms if n.startswith("bits_per_")]:
                self._over(name)
            self._event(
                "state", f"it {'scores texts now' if changes.scores else 'no longer scores texts'}"
            )
        return changes

    def _measured(self, name: str) -> str:
        assert self.changes is not None
        quantity = next(q for q in self.changes.quantities if name.startswith(f"{q.name}."))
        if isinstance(quantity, Numbers):
            return (
                f"{quantity.last or 0.0:+.4f} {quantity.name.replace('_', ' ')} against the"
                " baseline in the last round"
            )
        return f"{100 * (quantity.last or 0.0):.0f}% of those of the last round"

    def _set_state(self, found: Round) -> None:
        state = found.state.value
        if found.state is State.OK:
            state = (
                "changed" if set(self.alarms) & CHANGES else "learning" if self.learning else "ok"
            )
        if state != self.state:
            self.state = state
            self._event("state", f"{state}{f': {found.reason}' if found.reason else ''}")

    @property
    def learning(self) -> bool:
        """Whether no number or token has a baseline yet."""
        changes = self.changes
        return changes is None or not (
            changes.numbers.base or (changes.tokens.base and not changes.numbers.first)
        )

    # Whom to tell.

    def _raise(self, name: str, why: str) -> None:
        if name in self.alarms:
            self.alarms[name]["why"] = why
            return
        self.alarms[name] = {"since": self.wall(), "why": why}
        self.raised[name] = self.raised.get(name, 0) + 1
        self._new[name] = self._new.get(name, 0) + 1
        self._event("alarm", f"{ALARMS[name].title}: {why}", name)

    def _over(self, name: str) -> None:
        del self.alarms[name]
        self._event("over", f"no longer: {ALARMS[name].title}", name)

    def _event(self, kind: str, text: str, alarm: str = "") -> None:
        now = self.wall()
        event = {"at": now, "kind": kind, "text": text[:400], "alarm": alarm}
        self.events.append(event)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
        self.say(f"{stamp} {kind}: {event['text']}")
        if self.webhook is not None:
            self.webhook.post(
                {
                    "source": "assay watch",
                    "url": self.where,
                    "model": self.model,
                    "state": self.state,
                    **event,
                }
            )

    # What is kept.

    def save(self) -> None:
        """Keep the state."""
        with self._lock:
            state = {
                "changes": self.changes.state() if self.changes else None,
                "numbers": self.changes.numbers.name if self.changes else None,
                "alarms": self.alarms,
                "raised": self.raised,
                "rounds": self.rounds,
                "events": list(self.events),
                "model": self.model,
                "server": self.server,
                "starts": self.starts,
                "state": self.state,
            }
        self.kept.put("state", state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what was kept; where that is damaged, begin anew and say so."""
        try:
            changes = None
            if state["changes"] is not None:
                scores = state["numbers"] == "bits_per_byte"
                changes = Changes(self.options.interval, self.options.false_alarms, scores=scores)
                changes.restore(state["changes"])
            self.alarms = {
                n: {"since": float(a["since"]), "why": str(a["why"])}
                for n, a in state["alarms"].items()
                if n in ALARMS
            }
            self.raised = {str(n): int(c) for n, c in state["raised"].items()}
            self.rounds = {str(n): int(c) for n, c in state["rounds"].items()}
            self.events.extend(dict(e) for e in state["events"])
            self.model, self.server = str(state["model"]), str(state["server"])
            self.starts = [float(s) for s in state["starts"]]
            self.state = str(state["state"])
            self.changes = changes
        except (KeyError, TypeError, ValueError, AttributeError):
            self.kept.forget("state")
            self._event(
                "state", "what was kept of this server is damaged; the baseline is learnt anew"
            )

    # What is shown.

    def status(self) -> dict[str, Any]:
        """Everything that is known now, as plain JSON types."""
        with self._lock:
            changes, last = self.changes, self.last
            up = changes.numbers.detectors.get("up") if changes else None
            evidence = {
                f"{q.name}.{kind}": d.evidence / d.limit
                for q in (changes.quantities if changes else ())
                for kind, d in q.detectors.items()
            }
            finds = changes.finds(_DRIFT) * self.waited if changes and changes.scores else math.inf
            return {
                "url": self.where,
                "model": self.model,
                "server": self.server,
                "state": self.state,
                "states": STATES,
                "reason": last.reason,
                "alarms": sorted(self.alarms),
                "known_alarms": tuple(ALARMS),
                "raised": dict(self.raised),
                "rounds": dict(self.rounds),
                "evidence": evidence,
                "bits_per_byte": self.bits,
                "difference": changes.numbers.last if changes else None,
                "tolerance": up.tolerance if up else None,
                "tokens_changed": changes.tokens.last if changes else None,
                "tool_changed": changes.tools.last if changes else None,
                "latency_s": last.latency_s,
                "queued": last.queued,
                "acceptance": self.acceptance,
                "load": self.canary.budget.measured(self.clock()),
                "interval_s": self.waited,
                "finds_s": finds if math.isfinite(finds) else None,
                "learning": self.learning,
                "at": self._at,
                "generates": self.state not in ("broken", "down"),
                "alive": self.clock() - self._beat < 3 * self.waited + 20 * self.options.timeout,
                "webhook_failures": self.webhook.failures if self.webhook else 0,
            }

    def report(self, interrupted: bool = False) -> Report:
        """What the watch found, alarms of this process first."""
        status = self.status()
        findings = [self._finding(name) for name in dict.fromkeys([*self._new, *self.alarms])]
        verdict = Verdict.PASS
        if self.met <= {State.DOWN}:
            verdict = Verdict.ERROR
            why = self.last.reason or "it was never asked"
            findings = [AssayError(why, finding_id="server.unreachable").to_finding()]
        elif any(f.severity is Severity.ERROR for f in findings):
            verdict = Verdict.FAIL
        elif self.learning:
            verdict = Verdict.INCONCLUSIVE
        findings += self.kept.notices("server")
        summary = {
            Verdict.PASS: "nothing changed while it was watched.",
            Verdict.INCONCLUSIVE: (
                f"it answers; its baseline is not learnt yet ({LEARN} values an item)."
            ),
        }.get(verdict, "")
        load, finds = status["load"], status["finds_s"]
        headline = [
            Metric("state", self.state),
            Metric(
                "rounds",
                ", ".join(f"{count} {name}" for name, count in self.rounds.items()) or "none",
            ),
            Metric("load", "unknown" if load is None else f"{100 * load:.2f} % of one stream"),
            Metric(
                "a drift of 0.01 bits per byte",
                (
                    f"found within {finds / 60:.0f} min"
                    if finds
                    else "not found by this server's answers yet"
                ),
            ),
        ]
        rows = [
            (
                time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(e["at"])),
                f"{e['kind']}: {e['text']}"[:72],
            )
            for e in list(self.events)[-12:]
        ]
        plan = self.options.facts() | {
            "limit_rounds": self.changes.limit if self.changes else None,
            "month_s": MONTH_S,
            "calm_rounds": CALM,
        }
        return Report(
            command="watch",
            verdict=verdict,
            subject={
                "engine": "server",
                "url": self.where,
                "model": self.model,
                "server": self.server,
            },
            findings=tuple(findings),
            results={"watch": status, "events": list(self.events), "plan": plan},
            headline=tuple(headline),
            blocks=(Table("Latest events (UTC)", ("when", "what"), rows),) if rows else (),
            interrupted=interrupted,
            summary=summary,
        )

    def _finding(self, name: str) -> Finding:
        alarm, stands = ALARMS[name], self.alarms.get(name)
        told = [e["text"] for e in self.events if e["alarm"] == name and e["kind"] == "alarm"]
        title = f"{alarm.title}: {stands['why']}" if stands else told[-1] if told else alarm.title
        return Finding(
            alarm.id,
            alarm.severity,
            title + ("" if stands else " (it is over)"),
            evidence={
                "alarm": name,
                "raised": self.raised.get(name, 0),
                "stands": stands is not None,
            },
            causes=alarm.causes,
            remedies=tuple(r.replace("URL", self.where) for r in alarm.remedies),
        )


CHANGES = frozenset(ALARMS) - {"down", "broken", "several_servers", "speculation"}
"""Alarms that say that the model is another one."""
