"""Each way in which a server can fail, and the verdict, id and words that it gets."""

import gzip
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import pairwise

import pytest

from assay.engines import Capability, Message, Reply, Request
from assay.engines.server.engine import ServerEngine
from assay.engines.server.http import Limits
from assay.errors import AssayError
from assay.verdict import Verdict
from stub_server import (
    MODEL,
    Behaviour,
    Exchange,
    StubServer,
    bomb,
    close_at_once,
    cut_after,
    drip,
    events,
    hang,
    healthy,
    huge,
    models,
    not_found,
    page,
    rate_limited,
    redirect,
    sse,
    status,
    text,
    times,
)

CHAT = "POST /v1/chat/completions"
PATIENT = Limits(max_bytes=1 << 20, retries=2, first_backoff_s=0.01, longest_wait_s=2.0)
"""Limits that a busy test machine does not hit by itself."""
HASTY = replace(PATIENT, silence_s=0.8, total_s=1.4)
ASK = Request(messages=(Message("user", "Name the capital of France."),), max_tokens=20)
PART = sse({"choices": [{"index": 0, "delta": {"content": "Par"}, "finish_reason": None}]})


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with StubServer() as server:
        yield server


def connect(stub: StubServer, limits: Limits = PATIENT, **options: str) -> ServerEngine:
    return ServerEngine.connect(stub.url, limits=limits, **options)


def failure(action: Callable[..., object], *args: object) -> AssayError:
    with pytest.raises(AssayError) as caught:
        action(*args)
    error = caught.value
    assert "\n" not in error.message
    assert len(error.message) < 400
    assert error.remedy
    finding = error.to_finding()
    assert finding.id == error.finding_id
    return error


def connect_and_stream(stub: StubServer) -> Reply:
    """Probe a sane server, then let it fail: what a run sees when trouble starts in the middle."""
    with connect(stub) as engine:
        return engine.stream(ASK)


def fails_later(stub: StubServer, behaviour: Behaviour, limits: Limits = PATIENT) -> AssayError:
    with connect(stub, limits) as engine:
        assert Capability.STREAM in engine.capabilities
        stub.on(CHAT, behaviour)
        return failure(engine.stream, ASK)


# No connection


def test_refused() -> None:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    error = failure(ServerEngine.connect, f"http://127.0.0.1:{port}")
    assert (error.finding_id, error.verdict) == ("server.unreachable", Verdict.ERROR)
    assert "refused" in error.message
    assert f"127.0.0.1:{port}" in error.message


def test_no_such_host() -> None:
    error = failure(ServerEngine.connect, "http://no-such-host.invalid:8000")
    assert (error.finding_id, error.verdict) == ("server.unreachable", Verdict.ERROR)


def test_tls_where_none_is_spoken(stub: StubServer) -> None:
    error = failure(ServerEngine.connect, stub.url.replace("http:", "https:"))
    assert error.finding_id == "server.unreachable"
    assert "TLS" in error.message


def test_closed_without_an_answer(stub: StubServer) -> None:
    stub.everywhere(close_at_once())
    error = failure(connect, stub)
    assert (error.finding_id, error.verdict) == ("server.unreachable", Verdict.ERROR)


def test_a_server_that_goes_away_during_the_run(stub: StubServer) -> None:
    error = fails_later(stub, close_at_once())
    assert (error.finding_id, error.verdict) == ("server.stream_cut", Verdict.INCONCLUSIVE)


def test_a_connection_that_went_stale_is_tried_again(stub: StubServer) -> None:
    with connect(stub) as engine:
        assert Capability.CHAT in engine.capabilities
        stub.on(CHAT, times(1, close_at_once(), healthy()))
        assert engine.generate(ASK).content == "Paris is the capital of France."


def test_a_server_that_closes_after_every_answer_without_saying_so(stub: StubServer) -> None:
    """As uvicorn does after an error 500: the kept connection is gone when the next request uses
    it.
    """

    def and_close(behaviour: Behaviour) -> Behaviour:
        def behave(exchange: Exchange) -> None:
            behaviour(exchange)
            exchange.abort()

        return behave

    stub.on("GET /v1/models", and_close(status(500))).on("GET /version", and_close(not_found()))
    stub.on(CHAT, and_close(healthy()))
    with connect(stub, model=MODEL) as engine:
        assert [engine.generate(ASK).content for _ in range(3)] == [
            "Paris is the capital of France."
        ] * 3


# Refused by status


@pytest.mark.parametrize("code", [401, 403])
def test_unauthorized(stub: StubServer, code: int) -> None:
    stub.everywhere(status(code, "Unauthorized"))
    error = failure(connect, stub)
    assert (error.finding_id, error.verdict) == ("server.unauthorized", Verdict.ERROR)
    assert "--api-key-env" in error.remedy


def test_nothing_there(stub: StubServer) -> None:
    stub.everywhere(not_found())
    error = failure(connect, stub)
    assert error.verdict is Verdict.ERROR
    assert "no list of models" in error.message


def test_nothing_there_for_a_named_model(stub: StubServer) -> None:
    stub.everywhere(not_found())
    with connect(stub, model="x") as engine:
        error = failure(lambda: engine.capabilities)
    assert (error.finding_id, error.verdict) == ("server.not_found", Verdict.ERROR)


def test_a_wrong_model_name_lists_the_right_ones(stub: StubServer) -> None:
    stub.on("GET /v1/models", models("alpha", "beta"))
    error = failure(lambda: connect(stub, model="gamma"))
    assert (error.finding_id, error.verdict) == ("server.model_unknown", Verdict.ERROR)
    assert "gamma" in error.message
    assert "alpha, beta" in error.message


def test_a_server_without_a_list_still_says_that_it_lacks_the_model(stub: StubServer) -> None:
    stub.off("GET /v1/models")
    with connect(stub, model="gamma") as engine:
        error = failure(lambda: engine.capabilities)
    assert error.finding_id == "server.model_unknown"
    assert "gamma" in error.message


def test_a_refusal_that_names_the_model_is_about_the_model(stub: StubServer) -> None:
    """As `transformers serve` puts it when it was started with another model."""
    stub.on("GET /v1/models", models("org/cached", owned_by="org"))
    stub.on("GET /openapi.json", text('{"paths": {"/load_model": {}, "/v1/chat/completions": {}}}'))
    refusal = status(400, "Server is pinned to './right'; requested './wrong'.")
    stub.on(CHAT, refusal).on("POST /v1/completions", refusal)
    with connect(stub, model="./wrong") as engine:
        error = failure(lambda: engine.capabilities)
    assert error.finding_id == "server.model_unknown"
    assert "pinned to './right'" in error.message
    assert "org/cached" in error.message


def test_no_model_at_all(stub: StubServer) -> None:
    stub.on("GET /v1/models", models())
    error = failure(connect, stub)
    assert (error.finding_id, error.verdict) == ("server.model_unknown", Verdict.ERROR)
    assert "lists no model" in error.message


def test_several_models_and_none_named(stub: StubServer) -> None:
    stub.on("GET /v1/models", models(MODEL, "other"))
    with connect(stub) as engine:
        assert engine.model == MODEL
        assert engine.describe()["model_choice"] == "the first of 2: stub-model, other"


def test_rate_limit_that_passes(stub: StubServer) -> None:
    with connect(stub) as engine:
        assert Capability.CHAT in engine.capabilities
        stub.on(CHAT, times(1, rate_limited("0.6"), healthy()))
        started = time.monotonic()
        reply = engine.stream(ASK)
    assert reply.content == "Paris is the capital of France."
    assert time.monotonic() - started >= 0.6
    assert reply.timing is not None
    # The wait is not the model's time to first token.
    assert reply.timing.ttft < 0.6


def test_rate_limit_for_ever(stub: StubServer) -> None:
    before = len(stub.exchanges)
    stub.everywhere(rate_limited("0.01"))
    error = failure(connect, stub)
    assert (error.finding_id, error.verdict) == ("server.rate_limited", Verdict.INCONCLUSIVE)
    assert len(stub.exchanges) - before == 1 + PATIENT.retries


def test_rate_limit_longer_than_anyone_waits(stub: StubServer) -> None:
    stub.everywhere(rate_limited("3600"))
    started = time.monotonic()
    error = failure(connect, stub)
    assert error.finding_id == "server.rate_limited"
    assert error.evidence["retry_after_s"] == 3600
    assert time.monotonic() - started < 60


def test_failing_once(stub: StubServer) -> None:
    stub.on("GET /v1/models", times(1, status(500), models(MODEL)))
    stub.on(CHAT, times(1, status(503), healthy()))
    with connect(stub) as engine:
        assert Capability.CHAT in engine.capabilities


@pytest.mark.parametrize("code", [500, 502, 503])
def test_failing_for_ever(stub: StubServer, code: int) -> None:
    stub.everywhere(status(code, "EngineCore encountered an issue"))
    error = failure(connect, stub)
    assert (error.finding_id, error.verdict) == ("server.failing", Verdict.ERROR)
    assert "EngineCore encountered an issue" in error.message


def test_a_list_of_models_that_always_fails(stub: StubServer) -> None:
    """As `transformers serve` does on a machine without a cache of models."""
    stub.on("GET /v1/models", status(500))
    assert failure(connect, stub).finding_id == "server.failing"
    with connect(stub, model=MODEL) as engine:
        assert Capability.CHAT in engine.capabilities


def test_generation_that_always_fails(stub: StubServer) -> None:
    stub.on(CHAT, status(500)).off("POST /v1/completions")
    with connect(stub) as engine:
        error = failure(lambda: engine.capabilities)
    assert (error.finding_id, error.verdict) == ("server.failing", Verdict.ERROR)


# Not the answer that was asked for


@pytest.mark.parametrize(
    "body", ["", "hello", '{"data": [', "\x00\xff", "[" * 100_000, "9" * 10_000]
)
def test_not_json(stub: StubServer, body: str) -> None:
    stub.everywhere(text(body))
    error = failure(connect, stub)
    assert (error.finding_id, error.verdict) == ("server.not_json", Verdict.ERROR)


@pytest.mark.parametrize("body", ["{}", "[]", "null", '{"data": null}', '{"error": "no"}'])
def test_json_of_another_kind(stub: StubServer, body: str) -> None:
    stub.everywhere(text(body))
    assert failure(connect, stub).finding_id == "server.not_json"


def test_a_web_page(stub: StubServer) -> None:
    stub.everywhere(page())
    error = failure(connect, stub)
    assert (error.finding_id, error.verdict) == ("server.not_json", Verdict.ERROR)
    assert "a web page titled 'Sign in & go'" in error.message


def test_a_web_page_instead_of_a_stream(stub: StubServer) -> None:
    error = fails_later(stub, page())
    assert error.finding_id == "server.not_json"
    assert "web page" in error.message


@pytest.mark.parametrize(
    "stream",
    [
        b"data: {not json}\n\n",
        b"data: [1]\n\n",
        b"data: hello\n\n",
        b"no events at all",
        b"",
        b"\xff\xfe\x00",
    ],
)
def test_a_stream_that_is_none(stub: StubServer, stream: bytes) -> None:
    error = fails_later(stub, events(stream) if stream else text("", "text/event-stream"))
    assert (error.finding_id, error.verdict) == ("server.invalid_stream", Verdict.ERROR)


def test_no_stream_where_one_was_asked_for(stub: StubServer) -> None:
    def whole(exchange: Exchange) -> None:
        exchange.body.pop("stream", None)
        healthy()(exchange)

    stub.on(CHAT, whole)
    with connect(stub) as engine:
        assert "in one piece" in (engine.capabilities.reason(Capability.STREAM) or "")
        assert failure(engine.stream, ASK).finding_id == "server.missing_capability"
        assert engine.generate(ASK).content


def test_an_error_inside_the_stream(stub: StubServer) -> None:
    error = fails_later(stub, events(PART, sse({"error": {"message": "CUDA error", "code": 500}})))
    assert (error.finding_id, error.verdict) == ("server.stream_error", Verdict.INCONCLUSIVE)
    assert "CUDA error" in error.message


def test_html_inside_the_text_is_text(stub: StubServer) -> None:
    stub.on(CHAT, healthy(chunks=("<script>alert(1)</script>", "<!DOCTYPE html>")))
    assert connect_and_stream(stub).content == "<script>alert(1)</script><!DOCTYPE html>"


def test_missing_usage_and_null_content(stub: StubServer) -> None:
    stub.on(CHAT, healthy(usage=False))
    with connect(stub) as engine:
        assert engine.stream(ASK).completion_tokens is None
        stub.on(
            CHAT, text('{"choices": [{"message": {"content": null}, "finish_reason": "stop"}]}')
        )
        assert engine.generate(ASK).content == ""


def test_an_end_without_the_end_mark(stub: StubServer) -> None:
    stub.on(CHAT, healthy(done=False))
    assert connect_and_stream(stub).finish_reason == "stop"


# Too slow, too little, too much


def test_no_answer(stub: StubServer) -> None:
    stub.everywhere(hang())
    error = failure(connect, stub, HASTY)
    assert (error.finding_id, error.verdict) == ("server.timeout", Verdict.INCONCLUSIVE)


def test_an_answer_in_one_piece_may_be_silent_until_it_is_complete(stub: StubServer) -> None:
    def slow(exchange: Exchange) -> None:
        time.sleep(1.0)
        healthy()(exchange)

    with connect(stub, replace(PATIENT, silence_s=0.4, total_s=10.0)) as engine:
        assert Capability.CHAT in engine.capabilities
        stub.on(CHAT, slow)
        assert engine.generate(ASK).content == "Paris is the capital of France."
        assert failure(engine.stream, ASK).finding_id == "server.timeout"


def test_no_answer_during_the_run(stub: StubServer) -> None:
    assert fails_later(stub, hang(), HASTY).finding_id == "server.timeout"


@pytest.mark.parametrize("piece", [b": ping\n\n", PART, b"x"])
def test_a_slow_drip_ends_at_the_deadline(stub: StubServer, piece: bytes) -> None:
    started = time.monotonic()
    error = fails_later(stub, drip(piece, 0.05), HASTY)
    assert (error.finding_id, error.verdict) == ("server.timeout", Verdict.INCONCLUSIVE)
    assert time.monotonic() - started < 10.0


def test_a_half_closed_stream_keeps_what_had_come(stub: StubServer) -> None:
    error = fails_later(stub, cut_after(PART, PART))
    assert (error.finding_id, error.verdict) == ("server.stream_cut", Verdict.INCONCLUSIVE)
    assert getattr(error, "partial_text", "") == "ParPar"


def test_a_stream_that_ends_politely_but_too_early(stub: StubServer) -> None:
    error = fails_later(stub, events(PART))
    assert (error.finding_id, error.verdict) == ("server.stream_cut", Verdict.INCONCLUSIVE)


def test_what_happens_after_the_end_mark_does_not_matter(stub: StubServer) -> None:
    end = (
        sse({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}) + b"data: [DONE]\n\n"
    )
    with connect(stub) as engine:
        assert Capability.STREAM in engine.capabilities
        stub.on(CHAT, cut_after(PART, end))
        assert engine.stream(ASK).content == "Par"


@pytest.mark.parametrize("announce", [True, False])
def test_a_gigabyte_is_cut(stub: StubServer, announce: bool) -> None:
    error = fails_later(stub, huge(announce=announce))
    assert (error.finding_id, error.verdict) == ("server.too_large", Verdict.ERROR)
    assert f"{PATIENT.max_bytes:,}" in error.message


def test_a_decompression_bomb_is_cut(stub: StubServer) -> None:
    stub.everywhere(bomb())
    assert failure(connect, stub).finding_id == "server.too_large"


def test_compressed_answers_are_read_and_damaged_ones_named(stub: StubServer) -> None:
    good = gzip.compress(json.dumps({"data": [{"id": MODEL}]}).encode())
    stub.on("GET /v1/models", lambda e: e.send(good, **{"Content-Encoding": "gzip"}))
    connect(stub).close()
    stub.on("GET /v1/models", lambda e: e.send(b"not gzip", **{"Content-Encoding": "gzip"}))
    assert failure(connect, stub).finding_id == "server.invalid_stream"
    stub.on("GET /v1/models", lambda e: e.send(b"x", **{"Content-Encoding": "br"}))
    assert "'br'" in failure(connect, stub).message


# Redirects


def test_a_redirect_within_the_server_is_followed(stub: StubServer) -> None:
    stub.on("GET /v1/models", redirect("/v1/models/"))
    stub.on("GET /v1/models/", models(MODEL))
    stub.on(CHAT, redirect(CHAT.removeprefix("POST ") + "/"))
    stub.on(CHAT + "/", healthy())
    assert connect_and_stream(stub).content.startswith("Paris")


def test_a_redirect_elsewhere_is_named_and_not_followed(
    stub: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_KEY", "sk-very-secret")
    with StubServer() as other:
        stub.everywhere(redirect(other.url + "/v1/models?token=abc"))
        error = failure(lambda: connect(stub, api_key_env="STUB_KEY"))
        assert other.exchanges == []
        assert other.url + "/v1/models" in error.message
    assert (error.finding_id, error.verdict) == ("server.redirected", Verdict.ERROR)
    assert "abc" not in error.message


def test_a_redirect_that_would_drop_the_body_is_not_followed(stub: StubServer) -> None:
    error = fails_later(stub, redirect("/elsewhere", 302))
    assert error.finding_id == "server.redirected"


def test_a_redirect_in_circles(stub: StubServer) -> None:
    stub.everywhere(redirect("/v1/models"))
    assert failure(connect, stub).finding_id == "server.redirected"


# Addresses


def test_ipv6_and_path_prefix() -> None:
    try:
        server = StubServer("::1")
    except OSError:
        pytest.skip("no IPv6 here")
    with server as stub:
        stub.on("GET /team/a/v1/models", models(MODEL))
        with ServerEngine.connect(stub.url + "/team/a/", limits=PATIENT) as engine:
            assert engine.url == stub.url + "/team/a/v1"


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(
    stub: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    connect(stub).close()
    error = failure(ServerEngine.connect, "http://server.invalid")
    assert error.finding_id == "server.unreachable"


def test_concurrent_requests_share_one_engine(stub: StubServer) -> None:
    stub.on(CHAT, healthy(seconds_per_chunk=0.01))
    with connect(stub) as engine, ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: engine.stream(ASK), range(16)))
    assert {r.content for r in replies} == {"Paris is the capital of France."}
    assert all(r.timing and all(a <= b for a, b in pairwise(r.timing.chunk_times)) for r in replies)
