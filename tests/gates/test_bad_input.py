"""What goes wrong at a gate and a watch, on the command line: one line that says it, what to do,
and the right exit code.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from gate_servers import Right

from assay.cli.main import invoke
from cli.check_servers import Sane, serving
from stub_server import Exchange, StubServer, models


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with serving(Right(Sane())) as server:
        yield server


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = invoke([*arguments])
    out = capsys.readouterr()
    assert "Traceback" not in out.out + out.err
    return code, out.out


@pytest.mark.parametrize(
    ("contract", "line"),
    [
        ("[chek]\n", "unknown section [chek], the nearest is [check]"),
        (
            "[subject]\nserver = 'http://a'\n[check]\nmin_token_per_s = 3\n",
            "unknown option 'min_token_per_s', the nearest is 'min_tokens_per_s'",
        ),
        ("[check]\n", "[check] has nothing to examine: [subject] names no server"),
        ("[subject]\nserver = 'http://a'\n[compare]\n", "[compare] needs a reference"),
        (
            "[subject]\nengine = 'hf:x'\n[reference]\npack = 'none.pack'\n[compare]\n",
            "none.pack: No such file or directory",
        ),
        (
            "[subject]\nserver = 'http://a'\n[reference]\nengine = 'hf:x'\nkey = 'k'\n[check]\n",
            "key",
        ),
        ("[subject]\nserver = 3\n[check]\n", "server"),
        ("[check\n", "line 1"),
        ("", "asks for nothing: it has no section of a verb"),
    ],
)
def test_a_contract_that_makes_no_sense(
    here: Path, capsys: pytest.CaptureFixture[str], contract: str, line: str
) -> None:
    (here / "assay.toml").write_text(contract)
    code, out = said(capsys, "gate")
    first, *rest = out.splitlines()
    assert code == 2 and first.startswith("ERROR  assay gate: ") and line in first
    assert rest and rest[0].strip().startswith("→") and len(out.splitlines()) <= 4


def test_a_reference_that_is_missing_is_an_error_of_its_part(
    here: Path, stub: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "assay.toml").write_text(
        f"[subject]\nserver = '{stub.url}'\n[reference]\nidentity = 'none.json'\n[identity]\n"
    )
    code, out = said(capsys, "gate")
    assert (
        code == 2
        and "ERROR  the reference none.json cannot be read: No such file or directory" in out
    )
    code, out = said(capsys, "check", stub.url, "--identity", "none.json")
    assert (
        code == 2
        and out.startswith("ERROR  assay check: ")
        and "none.json cannot be read" in out.splitlines()[0]
    )


def test_two_servers_behind_one_address(
    here: Path, stub: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = itertools.count()
    stub.on("GET /version", lambda e: e.json({"version": f"0.3{next(numbers) % 2}.0"}))
    (here / "assay.toml").write_text(
        f"[subject]\nserver = '{stub.url}'\n[check]\nsamples = 1\nno_throughput = true\n"
    )
    code, out = said(capsys, "gate")
    warned = [line for line in out.splitlines() if line.startswith("WARN")]
    assert code == 3 and any(
        "server" in line and ("0.30.0" in line or "0.31.0" in line) for line in warned
    ), out


def test_a_model_that_changes_at_night_is_an_alarm_of_watch(
    stub: StubServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    arguments = ("watch", stub.url, "--listen", "none")
    assert said(capsys, *arguments, "--rounds", "14")[0] == 0
    stub.on("GET /v1/models", models("night"))
    for route in ("POST /v1/chat/completions", "POST /v1/completions"):
        sane = stub.behaviour(route)
        stub.on(route, lambda e, sane=sane: sane(_any_model(e)))
    code, out = said(capsys, *arguments, "--rounds", "1")
    assert code == 1 and "it lists night, and stub-model no longer" in out


def _any_model(e: Exchange) -> Exchange:
    e.body.pop("model", None)
    return e


class Strange(BaseHTTPRequestHandler):
    """Sends what no API sends."""

    body = b""

    def do_GET(self) -> None:
        self.wfile.write(self.body)

    do_POST = do_GET

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.parametrize(
    "body",
    [
        b"\x00\xff" * 500, b"HTTP/1.1 200 OK\r\n\r\n[[[[", b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n{",  # noqa: E501
        b'HTTP/1.1 200 OK\r\n\r\n{"data": [{"id": {"a": 1}}]}', b"HTTP/1.1 999 Strange\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",  # noqa: E501
    ],
)  # fmt: skip
def test_a_watch_never_dies_of_what_a_server_sends(
    body: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = type("Handler", (Strange,), {"body": body})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("assay.monitor.loop.Watch.wait", lambda self: 0.0)
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        code, out = said(
            capsys, "watch", url, "--listen", "none", "--rounds", "3", "--timeout", "2"
        )
    finally:
        server.shutdown()
        server.server_close()
    assert code in (1, 2) and out
