"""Pages of Prometheus metrics and of health, served while a watch runs.

- `/metrics`: everything that is measured, as gauges and counters `assay_watch_...`.
- `/healthz`: 200 while the watch itself goes on.
- `/health_generate`: 200 while the watched server writes sane text, also when it is busy or another
  model; 503 when it is down, hangs or writes garbage.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family

from assay.environment import VERSION
from assay.errors import UsageError
from assay.secrets import scrubbed

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
        yield from families(scrubbed(self.status()))


def families(status: Mapping[str, Any]) -> Iterator[Family]:
    """The status of a watch (`status_of`) as Prometheus metrics; what is not known has no
    sample.
    """
    yield from _labelled(status)
    yield from _gauges(status)
    yield CounterMetricFamily(
        "assay_watch_webhook_failures",
        "Messages that the webhook did not take.",
        value=float(status["webhook_failures"]),
    )


def _labelled(status: Mapping[str, Any]) -> Iterator[Family]:
    """What has a sample for each state, alarm or quantity."""
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


def _gauges(status: Mapping[str, Any]) -> Iterator[Family]:
    """What is one number."""

    def gauge(name: str, about: str, value: Any) -> Iterator[Family]:
        if value is not None:
            yield GaugeMetricFamily(f"assay_watch_{name}", about, value=float(value))

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


class _Server6(ThreadingHTTPServer):
    """The same on an address of IPv6."""

    address_family = socket.AF_INET6


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
                now = scrubbed(status())
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
            self._server = (_Server6 if ":" in host else ThreadingHTTPServer)((host, port), Handler)
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
