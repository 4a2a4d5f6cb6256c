"""A server for faults only: it answers sanely unless told to misbehave on a route.

    with StubServer() as stub:
        stub.on("POST /v1/chat/completions", rate_limited(retry_after="1", times=1))
        ServerEngine.connect(stub.url)

A behaviour is a callable that gets an `Exchange`. What a healthy answer looks like was taken from
vLLM.
"""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any

MODEL = "stub-model"
WORDS = ("Paris", " is", " the", " capital", " of", " France", ".")
METRICS = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0"} 1.0
# HELP vllm:corrupted_requests_total Corrupted requests
# TYPE vllm:corrupted_requests_total counter
vllm:corrupted_requests_total{engine="0",model_name="stub-model"} 0.0
# HELP vllm:time_to_first_token_seconds Histogram of time to first token in seconds.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1"} 3.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 4.0
vllm:time_to_first_token_seconds_count{engine="0"} 4.0
vllm:time_to_first_token_seconds_sum{engine="0"} 0.5
"""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    stub: StubServer

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        length = int(self.headers.get("content-length", 0))
        raw = self.rfile.read(length)
        exchange = Exchange(
            self,
            f"{method} {self.path}",
            dict(self.headers.items()),
            json.loads(raw) if raw else {},
        )
        self.stub.record(exchange)
        with suppress(ConnectionError, TimeoutError):
            self.stub.behaviour(exchange.route)(exchange)

    def log_message(self, format: str, *args: object) -> None:
        pass


@dataclass
class Exchange:
    """One request and the means to answer it."""

    handler: _Handler
    route: str
    headers: Mapping[str, str]
    body: Any

    @property
    def stub(self) -> StubServer:
        return self.handler.stub

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.handler.send_response(status)
        for name, value in headers.items():
            self.handler.send_header(name, value)
        self.handler.end_headers()

    def send(
        self, body: bytes, *, status: int = 200, kind: str = "application/json", **headers: str
    ) -> None:
        self.begin(status, {"Content-Type": kind, "Content-Length": str(len(body)), **headers})
        self.write(body)

    def json(self, value: Any, *, status: int = 200, **headers: str) -> None:
        self.send(json.dumps(value).encode(), status=status, **headers)

    def write(self, data: bytes) -> None:
        self.handler.wfile.write(data)
        self.handler.wfile.flush()

    def chunk(self, data: bytes) -> None:
        """One piece of a chunked body; an empty one ends it."""
        self.write(b"%x\r\n%b\r\n" % (len(data), data))

    def abort(self) -> None:
        """Close the connection without another word."""
        self.handler.close_connection = True
        with suppress(OSError):
            self.handler.connection.shutdown(socket.SHUT_RDWR)


Behaviour = Callable[[Exchange], None]


class StubServer:
    """A threaded server on a free port of the loopback, as a context manager."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server_class = type(
            "Server", (ThreadingHTTPServer,), {"address_family": family, "daemon_threads": True}
        )
        handler = type("Handler", (_Handler,), {"stub": self})
        self._server = server_class((host, 0), handler)
        self._lock = Lock()
        self._behaviours: dict[str, Behaviour] = {}
        self.exchanges: list[Exchange] = []
        self.closing = Event()
        port = self._server.server_address[1]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self.on("GET /v1/models", models(MODEL))
        self.on("GET /version", lambda e: e.json({"version": "0.32.0"}))
        self.on(
            "GET /metrics", lambda e: e.send(METRICS.encode(), kind="text/plain; version=0.0.4")
        )
        self.on("POST /v1/chat/completions", healthy())
        self.on("POST /v1/completions", healthy())
        self.on("POST /tokenize", _tokenize)
        self.on("POST /detokenize", _detokenize)

    def on(self, route: str, behaviour: Behaviour) -> StubServer:
        """Answer `METHOD /path` with `behaviour`; the path `*` stands for all paths without their
        own.
        """
        self._behaviours[route] = behaviour
        return self

    def off(self, *routes: str) -> StubServer:
        for route in routes:
            self._behaviours.pop(route, None)
        return self

    def everywhere(self, behaviour: Behaviour) -> StubServer:
        self._behaviours = {"*": behaviour}
        return self

    def behaviour(self, route: str) -> Behaviour:
        return self._behaviours.get(route) or self._behaviours.get("*") or not_found()

    def record(self, exchange: Exchange) -> None:
        with self._lock:
            self.exchanges.append(exchange)

    def bodies(self, route: str) -> list[Any]:
        return [e.body for e in self.exchanges if e.route == route]

    def __enter__(self) -> StubServer:
        Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()


# What a sane server answers


def models(*names: str, owned_by: str = "vllm", **fields: Any) -> Behaviour:
    cards = [
        {
            "id": n,
            "object": "model",
            "owned_by": owned_by,
            "root": n,
            "max_model_len": 2048,
            **fields,
        }
        for n in names
    ]
    return lambda e: e.json({"object": "list", "data": cards})


def words_of(text: str) -> list[str]:
    """The stub's tokens: words with the space before them."""
    parts = text.split(" ")
    return [parts[0], *(" " + p for p in parts[1:])]


def _tokenize(e: Exchange) -> None:
    ids = [100 + i for i, _ in enumerate(words_of(e.body["prompt"]))]
    e.json({"count": len(ids), "max_model_len": 2048, "tokens": ids})


def _detokenize(e: Exchange) -> None:
    e.json(
        {
            "prompt": "".join(
                ["The", " capital", " of", " France", " is"][t - 100] for t in e.body["tokens"]
            )
        }
    )


@dataclass
class healthy:
    """Answers both routes, whole or streamed, the way vLLM does.

    `chunks` are the texts of the stream; each counts `per_chunk` tokens. The switches leave out
    what some servers do.
    """

    chunks: tuple[str, ...] = WORDS
    per_chunk: int = 1
    finish_reason: str = "stop"
    reasoning: str = ""
    reasoning_field: str = "reasoning"
    usage: bool = True
    continuous: bool = True
    scores: bool = True
    echo: bool = True
    several: bool = True
    seconds_per_chunk: float = 0.0
    role_chunk: bool = True
    done: bool = True
    refuses: frozenset[str] = field(default_factory=frozenset)

    def __call__(self, e: Exchange) -> None:
        unknown = self.refuses & set(e.body)
        if unknown:
            e.json({"detail": f"Unexpected fields in the request: {unknown}"}, status=422)
        elif e.body.get("model") not in (None, MODEL):
            message = f"The model `{e.body['model']}` does not exist."
            error = {"message": message, "type": "NotFoundError", "param": "model", "code": 404}
            e.json({"error": error}, status=404)
        elif e.body.get("stream"):
            self._stream(e)
        else:
            self._whole(e)

    @property
    def tokens(self) -> int:
        return len(self.chunks) * self.per_chunk

    def prompt_tokens(self, e: Exchange) -> int:
        prompt = e.body.get("prompt")
        if isinstance(prompt, str):
            return len(words_of(prompt))
        if isinstance(prompt, list):
            return len(prompt)
        return 12 + 30 * len(e.body.get("tools", []))

    def _usage(self, e: Exchange, completion: int) -> dict[str, int]:
        prompt = self.prompt_tokens(e)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _whole(self, e: Exchange) -> None:
        text = "".join(self.chunks)
        if "messages" in e.body:
            message = {
                "role": "assistant",
                "content": text,
                self.reasoning_field: self.reasoning or None,
            }
            choice: dict[str, Any] = {
                "index": 0,
                "message": message,
                "finish_reason": self.finish_reason,
            }
            if e.body.get("logprobs"):
                choice["logprobs"] = {
                    "content": [{"token": "Paris", "logprob": -0.5, "bytes": None}]
                }
        else:
            choice = {
                "index": 0,
                "text": text,
                "finish_reason": self.finish_reason,
                "logprobs": None,
            }
        choices = [choice]
        if "messages" not in e.body:
            prompt = e.body["prompt"]
            several = isinstance(prompt, list) and not isinstance(prompt[0], int)
            prompts = prompt[: None if self.several else 1] if several else [prompt]
            choices = [{**choice, "index": i} for i, _ in enumerate(prompts)]
            for one, each in zip(prompts, choices, strict=True):
                self._completion_logprobs(e, one, each)
        answer: dict[str, Any] = {"id": "x", "choices": choices[::-1]}
        if self.usage:
            answer["usage"] = self._usage(e, self.tokens)
        e.json(answer)

    def _completion_logprobs(self, e: Exchange, prompt: Any, choice: dict[str, Any]) -> None:
        words = words_of(prompt) if isinstance(prompt, str) else [f" t{t}" for t in prompt]
        ids = [100 + i for i, _ in enumerate(words)] if isinstance(prompt, str) else prompt
        values = [-1.0 - 0.25 * i for i, _ in enumerate(words)]
        if "prompt_logprobs" in e.body and self.scores:
            choice["prompt_logprobs"] = [None] + [
                {str(t): {"logprob": v, "rank": 1, "decoded_token": w}}
                for t, v, w in list(zip(ids, values, words, strict=True))[1:]
            ]
            if e.body.get("return_token_ids"):
                choice["prompt_token_ids"] = ids
        if e.body.get("logprobs") is not None:
            choice["logprobs"] = {"tokens": ["Paris"], "token_logprobs": [-0.5], "text_offset": [0]}
            if e.body.get("echo") and self.echo:
                text = "".join(words)
                offsets = [sum(len(w) for w in words[:i]) for i, _ in enumerate(words)]
                choice["text"] = text + choice["text"]
                choice["logprobs"] = {
                    "tokens": [*words, "Paris"],
                    "token_logprobs": [None, *values[1:], -0.5],
                    "text_offset": [*offsets, len(text)],
                }

    def _stream(self, e: Exchange) -> None:
        options = e.body.get("stream_options") or {}
        running = self.usage and self.continuous and bool(options.get("continuous_usage_stats"))
        e.begin(200, {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"})
        for event in self._events(e, running):
            if self.seconds_per_chunk:
                time.sleep(self.seconds_per_chunk)
            e.chunk(event)
        if self.usage and options.get("include_usage"):
            e.chunk(sse({"choices": [], "usage": self._usage(e, self.tokens)}))
        if self.done:
            e.chunk(b"data: [DONE]\n\n")
        e.chunk(b"")

    def _events(self, e: Exchange, running: bool) -> Iterable[bytes]:
        chat = "messages" in e.body

        def event(part: dict[str, Any], tokens: int, finish: str | None = None) -> bytes:
            choice = {"index": 0, **({"delta": part} if chat else part), "finish_reason": finish}
            if e.body.get("logprobs") and tokens:
                entry = {"token": "Paris", "logprob": -0.5, "bytes": None}
                choice["logprobs"] = (
                    {"content": [entry]}
                    if chat
                    else {"tokens": ["Paris"], "token_logprobs": [-0.5]}
                )
            return sse(
                {"choices": [choice], **({"usage": self._usage(e, tokens)} if running else {})}
            )

        if chat and self.role_chunk:
            yield event({"role": "assistant", "content": ""}, 0)
        if chat and self.reasoning:
            yield event({self.reasoning_field: self.reasoning}, 0)
        for number, text in enumerate(self.chunks, 1):
            last = number == len(self.chunks)
            part = {"content": text} if chat else {"text": text}
            yield event(part, number * self.per_chunk, self.finish_reason if last else None)


def sse(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


# Misbehaviour


def not_found() -> Behaviour:
    return lambda e: e.json({"detail": "Not Found"}, status=404)


def status(code: int, message: str = "something broke", **headers: str) -> Behaviour:
    return lambda e: e.json({"error": {"message": message, "code": code}}, status=code, **headers)


def times(count: int, first: Behaviour, then: Behaviour) -> Behaviour:
    """`first` for the first `count` requests, `then` for all later ones."""
    lock, seen = Lock(), [0]

    def behave(e: Exchange) -> None:
        with lock:
            seen[0] += 1
            early = seen[0] <= count
        (first if early else then)(e)

    return behave


def rate_limited(retry_after: str | None = None) -> Behaviour:
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    return status(429, "too many requests", **headers)


def redirect(to: str, code: int = 307) -> Behaviour:
    return lambda e: e.send(b"", status=code, Location=to)


def page(
    html: str = "<!DOCTYPE html><html><head><title>Sign in &amp; go</title></head></html>",
) -> Behaviour:
    return lambda e: e.send(html.encode(), kind="text/html")


def text(body: str, kind: str = "application/json") -> Behaviour:
    return lambda e: e.send(body.encode(), kind=kind)


def events(*pieces: bytes, kind: str = "text/event-stream") -> Behaviour:
    """A stream of exactly these bytes."""

    def behave(e: Exchange) -> None:
        e.begin(200, {"Content-Type": kind, "Transfer-Encoding": "chunked"})
        for piece in pieces:
            e.chunk(piece)
        e.chunk(b"")

    return behave


def cut_after(*pieces: bytes) -> Behaviour:
    """A stream whose connection closes in the middle."""

    def behave(e: Exchange) -> None:
        e.begin(200, {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"})
        for piece in pieces:
            e.chunk(piece)
        e.abort()

    return behave


def close_at_once() -> Behaviour:
    return lambda e: e.abort()


def hang() -> Behaviour:
    """Never answer."""
    return lambda e: e.stub.closing.wait(60) and None


def drip(piece: bytes, seconds: float) -> Behaviour:
    """A body that keeps arriving, a little at a time, and never ends."""

    def behave(e: Exchange) -> None:
        e.begin(200, {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"})
        while not e.stub.closing.wait(seconds):
            e.chunk(piece)

    return behave


def huge(total: int = 1 << 30, announce: bool = True) -> Behaviour:
    """An answer of `total` bytes."""

    def behave(e: Exchange) -> None:
        piece = b" " * (1 << 16)
        if announce:
            e.begin(200, {"Content-Type": "application/json", "Content-Length": str(total)})
        else:
            e.begin(200, {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"})
        for _ in range(total // len(piece)):
            if announce:
                e.write(piece)
            else:
                e.chunk(piece)

    return behave


def bomb(total: int = 1 << 26) -> Behaviour:
    """A small gzip answer that unpacks to `total` bytes."""
    packed = gzip.compress(b" " * total, 9)
    return lambda e: e.send(packed, **{"Content-Encoding": "gzip"})
