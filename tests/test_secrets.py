"""A key that a server repeats is in no output: file, screen, object or store."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from assay import secrets
from assay.cli.main import invoke
from assay.engines import Message, Request
from assay.engines.server.engine import ServerEngine
from assay.runs import write_atomically
from assay.secrets import HIDDEN, register_secret, scrub, scrubbed
from assay.verdict import Finding, Quote, Report, Severity, Table, Verdict
from stub_server import Exchange, StubServer

KEY = "sk-SECRETKEY-1234567890abcdef"
ASK = Request(messages=(Message("user", "hi"),), max_tokens=4)


@pytest.fixture(autouse=True)
def no_other_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_known", set())


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (f"a {KEY} b {KEY}", f"a {HIDDEN} b {HIDDEN}"),
        (f"cut {KEY[:12]}", f"cut {HIDDEN}"),
        (f"cut {KEY[:12]}… (99 more characters)", f"cut {HIDDEN}… (99 more characters)"),
        (f"…{KEY[9:]} and on", f"…{HIDDEN} and on"),
        (f"cut {KEY[:5]}", f"cut {KEY[:5]}"),
        (f"{KEY[:12]} of an example", f"{KEY[:12]} of an example"),
    ],
)
def test_a_text_without_the_key(text: str, clean: str) -> None:
    assert scrub(text) == text
    register_secret(KEY)
    assert scrub(text) == clean


def test_other_forms_of_a_secret() -> None:
    register_secret("pass/word+1", "me")
    basic = base64.b64encode(b"me:pass/word+1").decode()
    for form in (basic, "pass%2Fword%2B1"):
        assert scrub(f"got {form}.") == f"got {HIDDEN}."


def test_a_key_that_is_a_word_is_hidden_where_it_is_a_key() -> None:
    register_secret("EMPTY")
    assert scrub("EMPTY: Bearer EMPTY, EMPTYING") == f"EMPTY: Bearer {HIDDEN}, EMPTYING"


def test_values_of_every_form() -> None:
    register_secret(KEY)
    table = Table("t", [KEY], [["1", f"x{KEY}"]], numeric=frozenset({0}))
    clean = scrubbed({KEY: [table, (1, KEY)], "n": 3})
    assert clean == {
        HIDDEN: [Table("t", [HIDDEN], [["1", f"x{HIDDEN}"]], numeric=frozenset({0})), (1, HIDDEN)],
        "n": 3,
    }
    other = Table("t", ["a"], [["b"]])
    assert scrubbed(other) is other


def test_a_report_holds_no_secret() -> None:
    register_secret(KEY)
    report = Report(
        "check",
        Verdict.FAIL,
        subject={"model": KEY},
        findings=(Finding("server.x", Severity.ERROR, KEY, evidence={KEY: [KEY]}),),
        results={"texts": {KEY: KEY}},
        blocks=(Quote("q", KEY),),
        summary=KEY,
    )
    assert KEY not in repr(report) + report.to_html() + json.dumps(report.to_json())


def test_a_stored_text_holds_no_secret(tmp_path: Path) -> None:
    register_secret(KEY)
    write_atomically(tmp_path / "kept.json", json.dumps({"text": KEY}))
    assert json.loads((tmp_path / "kept.json").read_text()) == {"text": HIDDEN}


@pytest.fixture
def echoing() -> Iterator[StubServer]:
    """A server that repeats the header of every request in all that it says."""

    def told(e: Exchange) -> str:
        return str(e.headers.get("Authorization"))

    def answer(e: Exchange) -> None:
        said = f"Your header was {told(e)} and that is the end of this text, thank you very much."
        part = {"index": 0, "finish_reason": "stop", "text": said, "delta": {"content": said}}
        chunk = {"choices": [part | {"message": {"role": "assistant", "content": said}}]}
        if e.body.get("stream"):
            e.send(
                f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode(), kind="text/event-stream"
            )
        else:
            e.json(chunk)

    with StubServer() as stub:
        stub.on("POST /v1/chat/completions", answer).on("POST /v1/completions", answer)
        stub.on("GET /version", lambda e: e.json({"version": told(e)}))
        card = {"id": "m", "object": "model", "owned_by": "vllm"}
        stub.on("GET /v1/models", lambda e: e.json({"data": [card | {"root": told(e)}]}))
        yield stub


def test_a_server_that_repeats_the_key_puts_it_into_no_output(
    echoing: StubServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ECHO_KEY", KEY)
    files = {name: tmp_path / f"r.{name}" for name in ("json", "html", "markdown", "junit")}
    options = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    arguments = ["--quick", "--no-throughput", "-v", "--api-key-env", "ECHO_KEY", *options]
    invoke(["check", echoing.url, *arguments])
    shown = capfd.readouterr()
    written = [file.read_text(encoding="utf-8") for file in files.values()]
    assert all(HIDDEN in text for text in (shown.out, *written))
    for text in (shown.out, shown.err, *written):
        assert "SECRETKEY" not in text


def test_the_text_under_test_is_the_server_s_own(
    echoing: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is judged is not changed, only what is told."""

    monkeypatch.setenv("ECHO_KEY", KEY)
    with ServerEngine.connect(echoing.url, api_key_env="ECHO_KEY") as engine:
        assert KEY in engine.generate(ASK).content
