"""Whatever a server sends, an attempt ends by the clock, and what it sent is read within bounds."""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from assay.engines import Message, Request
from assay.engines.server.engine import ServerEngine
from assay.engines.server.http import Limits
from assay.engines.server.metrics import MAX_SERIES, parse_metrics
from assay.errors import AssayError
from stub_server import Behaviour, Exchange, StubServer, models, redirect, text

LIMITS = Limits(retries=0, first_backoff_s=0.01)
HASTY = replace(LIMITS, silence_s=0.6, total_s=1.0)
ASK = Request(messages=(Message("user", "hi"),), max_tokens=4)
CHAT = "POST /v1/chat/completions"
HUGE = "1" + "0" * 400


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with StubServer() as server:
        yield server


def failure(stub: StubServer, limits: Limits) -> AssayError:
    with pytest.raises(AssayError) as caught:
        ServerEngine.connect(stub.url, limits=limits)
    return caught.value


def repeat(head: bytes, piece: bytes, pause: float = 0.05) -> Behaviour:
    """Send `head` as it is, then `piece` again and again."""

    def behave(e: Exchange) -> None:
        e.write(head)
        while not e.stub.closing.wait(pause):
            e.write(piece)

    return behave


@pytest.mark.parametrize(
    "behaviour",
    [
        pytest.param(repeat(b"HTTP/1.1 200 OK\r\nX-a: ", b"a"), id="header drip"),
        pytest.param(
            repeat(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;", b"a"),
            id="chunk extension drip",
        ),
        pytest.param(repeat(b"", b"HTTP/1.1 102 Processing\r\n\r\n"), id="informational answers"),
        pytest.param(repeat(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 500, 0.001), id="1xx flood"),
        pytest.param(repeat(b"HTTP/1.1 500 x\r\n\r\n", b"a"), id="body of an error"),
        pytest.param(repeat(b"HTTP/1.1 200 OK\r\n\r\n", b" "), id="body"),
    ],
)
def test_an_attempt_ends_by_the_clock_however_the_bytes_arrive(
    stub: StubServer, behaviour: Behaviour
) -> None:
    stub.everywhere(behaviour)
    began = time.monotonic()
    error = failure(stub, HASTY)
    assert time.monotonic() - began < 10
    assert error.finding_id in ("server.timeout", "server.failing")


def test_the_clock_that_ends_an_attempt_is_named(stub: StubServer) -> None:
    stub.everywhere(repeat(b"HTTP/1.1 200 OK\r\nX-a: ", b"a"))
    assert "had not finished its answer after 1 s" in failure(stub, HASTY).message


def test_a_kept_connection_takes_the_clock_of_its_next_request(stub: StubServer) -> None:
    """The first request leaves a connection; its time does not run for the second one."""
    with ServerEngine.connect(stub.url, limits=replace(LIMITS, total_s=2.0)) as engine:
        engine.generate(ASK)
        for _ in range(3):
            time.sleep(0.9)
            engine.generate(ASK)


@pytest.mark.parametrize("code", [301, 307])
@pytest.mark.parametrize(
    "to", ["http://127.0.0.1:99999/", "http://xn--/", "http://[::1/", "http://a:b/", "   "]
)
def test_a_redirect_to_no_address(stub: StubServer, to: str, code: int) -> None:
    stub.everywhere(redirect(to, code))
    error = failure(stub, LIMITS)
    assert error.finding_id == "server.redirected"
    assert "\n" not in error.message


def test_halves_of_a_character_in_two_chunks_are_joined(stub: StubServer) -> None:
    chunks = [
        f'{{"choices":[{{"index":0,"delta":{{"content":"{half}"}},"finish_reason":null}}]}}'
        for half in ("smile \\ud83d", "\\ude00 and \\ud83d")
    ]
    with ServerEngine.connect(stub.url, limits=LIMITS) as engine:
        engine.capabilities  # noqa: B018 (probed before the answers change)
        stub.on(CHAT, sse_of("\n\ndata: ".join(chunks)))
        assert engine.stream(ASK).content == "smile 😀 and \N{REPLACEMENT CHARACTER}"


def sse_of(document: str) -> Behaviour:
    return text(f"data: {document}\n\ndata: [DONE]\n\n", "text/event-stream")


@pytest.mark.parametrize(
    "answer",
    [
        f'{{"choices":[{{"index":0,"message":{{"content":"x"}},"finish_reason":"stop"}}],'
        f'"usage":{{"prompt_tokens":{HUGE},"completion_tokens":1e300}}}}',
        '{"choices":[{"index":[0],"message":{"content":"x"}}]}',
        '{"choices":[{"index":0,"message":{"content":"\\ud800"}}]}',
        '{"choices":[{"index":0,"finish_reason":"stop","message":{"content":'
        + '[{"text":' * 450
        + '"x"'
        + "}]" * 450
        + "}}]}",
        '{"error":' * 900 + '"x"' + "}" * 900,
        '{"choices":[{"index":0,"message":{"tool_calls":[{"function":{"name":"a","arguments":'
        + '{"a":' * 930
        + "1"
        + "}" * 930
        + "}}]}}]}",
    ],
)
def test_an_odd_answer_is_a_reply_or_one_clear_line(stub: StubServer, answer: str) -> None:
    with ServerEngine.connect(stub.url, limits=LIMITS) as engine:
        engine.capabilities  # noqa: B018 (probed before the answers change)
        for action, behaviour in (
            (engine.generate, text(answer)),
            (engine.stream, sse_of(answer.replace('"message"', '"delta"'))),
        ):
            stub.on(CHAT, behaviour)
            try:
                reply = action(ASK)
            except AssayError as error:
                assert "\n" not in error.message
                assert len(error.message) < 400
            else:
                assert reply.prompt_tokens is None
                reply.content.encode()


@pytest.mark.parametrize("tokens", [f"[{HUGE}]", "[-1]", "[1.5]", f"[{'1,' * 99_999}1]"])
def test_ids_that_no_text_has_are_no_tokens(stub: StubServer, tokens: str) -> None:
    with ServerEngine.connect(stub.url, limits=LIMITS) as engine:
        engine.capabilities  # noqa: B018 (probed with honest tokens)
        stub.on("POST /tokenize", text(f'{{"tokens":{tokens}}}'))
        with pytest.raises(AssayError) as caught:
            engine.tokenize("The capital of France")
        assert caught.value.finding_id == "server.not_json"


def test_a_model_with_an_odd_length_and_name(stub: StubServer) -> None:
    stub.on("GET /v1/models", models("m\ud800", max_model_len=int(HUGE)))
    with ServerEngine.connect(stub.url, limits=LIMITS) as engine:
        assert engine.max_model_len is None
        engine.model.encode()


@pytest.mark.parametrize(
    "page",
    [
        "# TYPE a gauge\n" + "".join(f'a{{x="{i}"}} 1\n' for i in range(MAX_SERIES + 1)),
        '# TYPE a gauge\na{x="' + "b" * 100_000 + '"} 1\n',
        "a" * 1_000_000,
        "\n" * 1_000_000,
    ],
)
def test_a_page_of_metrics_without_end_is_not_read(stub: StubServer, page: str) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match="a page of metrics"):
        parse_metrics(page)
    assert time.monotonic() - began < 2
    stub.on("GET /metrics", lambda e: e.send(page.encode(), kind="text/plain"))
    with ServerEngine.connect(stub.url, limits=LIMITS) as engine:
        assert "a page of metrics" in dict(engine.capabilities.absent)["metrics"]
