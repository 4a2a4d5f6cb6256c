"""A key comes from the named environment variable, goes to the server, and nowhere else."""

import json
import logging
import traceback
from collections.abc import Iterator

import pytest

from assay.engines import Message, Request
from assay.engines.server.engine import ServerEngine
from assay.engines.server.http import Limits
from assay.errors import AssayError
from stub_server import StubServer, close_at_once, hang, healthy, page, rate_limited, status, text

KEY = "sk-0123456789abcdef"
PATIENT = Limits(retries=1, first_backoff_s=0.01)
HASTY = Limits(silence_s=0.8, total_s=1.4, retries=1, first_backoff_s=0.01)
ASK = Request(messages=(Message("user", "hi"),), max_tokens=4)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubServer]:
    monkeypatch.setenv("STUB_KEY", f"{KEY}\n")
    with StubServer() as server:
        yield server


def connect(stub: StubServer, limits: Limits = PATIENT) -> ServerEngine:
    return ServerEngine.connect(stub.url, api_key_env="STUB_KEY", limits=limits)


def everything_about(error: AssayError) -> str:
    chain = "".join(traceback.format_exception(error))
    return chain + repr(error) + str(error.__dict__) + json.dumps(error.to_finding().to_json())


def test_the_key_is_sent_as_bearer_token(stub: StubServer) -> None:
    with connect(stub) as engine:
        engine.generate(ASK)
    assert {e.headers["Authorization"] for e in stub.exchanges} == {f"Bearer {KEY}"}


def test_no_key_is_sent_unless_one_is_named(
    stub: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with ServerEngine.connect(stub.url, limits=PATIENT) as engine:
        engine.generate(ASK)
    assert all("Authorization" not in e.headers for e in stub.exchanges)


def test_descriptions_do_not_hold_it(stub: StubServer) -> None:
    with connect(stub) as engine:
        shown = (
            json.dumps(engine.describe())
            + repr(engine)
            + repr(engine.capabilities)
            + repr(engine.__dict__)
        )
    assert KEY not in shown


@pytest.mark.parametrize(
    "behaviour",
    [
        status(401, f"Incorrect API key provided: {KEY}"),
        status(400, f"key {KEY} and {KEY}"),
        status(500, KEY),
        rate_limited("9999"),
        page(f"<html><title>{KEY}</title>"),
        text(f"what is {KEY}?"),
        hang(),
        close_at_once(),
    ],
)
def test_errors_do_not_hold_it_even_if_the_server_repeats_it(
    stub: StubServer, behaviour: object, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    stub.everywhere(behaviour)  # type: ignore[arg-type]
    with pytest.raises(AssayError) as caught:
        connect(stub, HASTY)
    assert KEY not in everything_about(caught.value)
    assert KEY not in caplog.text.replace(f"key={KEY}", "")


def test_capability_reasons_do_not_hold_it(stub: StubServer) -> None:
    stub.on("POST /v1/completions", status(400, f"no completions for {KEY}"))
    with connect(stub) as engine:
        assert KEY not in json.dumps(engine.capabilities.to_json())


def test_credentials_in_the_url_are_used_and_not_shown(stub: StubServer) -> None:
    url = stub.url.replace("http://", "http://me:pa55word@")
    with ServerEngine.connect(url, limits=PATIENT) as engine:
        assert "pa55word" not in json.dumps(engine.describe())
        stub.on("POST /v1/chat/completions", status(403, "pa55word is wrong"))
        engine.capabilities  # noqa: B018 (probed before the failure)
        with pytest.raises(AssayError) as caught:
            engine.generate(ASK)
    assert "pa55word" not in everything_about(caught.value)
    assert stub.exchanges[0].headers["Authorization"].startswith("Basic ")


@pytest.mark.parametrize(
    ("value", "word"),
    [(None, "not set"), ("", "not set"), ("ключ", "cannot carry"), ("a\nb", "cannot carry")],
)
def test_a_variable_that_holds_no_key(
    stub: StubServer, monkeypatch: pytest.MonkeyPatch, value: str | None, word: str
) -> None:
    if value is None:
        monkeypatch.delenv("STUB_KEY")
    else:
        monkeypatch.setenv("STUB_KEY", value)
    with pytest.raises(AssayError, match=word) as caught:
        connect(stub)
    assert "STUB_KEY" in caught.value.message
    assert not value or value not in caught.value.message
    assert stub.exchanges == []


def test_the_answer_of_the_model_is_left_alone(stub: StubServer) -> None:
    """Masking belongs to errors; the text under test is never changed."""
    stub.on("POST /v1/chat/completions", healthy(chunks=(f"say {KEY}",)))
    with connect(stub) as engine:
        assert engine.generate(ASK).content == f"say {KEY}"
