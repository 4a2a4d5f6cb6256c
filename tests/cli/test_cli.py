from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from assay.cli.main import invoke
from stub_server import StubServer, close_at_once, healthy, not_found, page, status


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = invoke([*arguments, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["exit_code"] == code
    assert report["schema"] == "assay/1"
    return code, report


QUICK = ("--repeats", "3", "--samples", "1", "--timeout", "20")


def check(capsys: pytest.CaptureFixture[str], url: str, *more: str) -> tuple[int, dict[str, Any]]:
    return run(capsys, "check", url, *QUICK, *more)


def words(text: str) -> tuple[str, ...]:
    first, *rest = text.split(" ")
    return (first, *(f" {w}" for w in rest))


LOOP = words("I am sure that " + "the name of " * 60)
LONDON = words("The capital of France is London, a large city on the river Thames.")


def answering(chunks: tuple[str, ...], **fields: Any) -> StubServer:
    stub = StubServer()
    for route in ("POST /v1/chat/completions", "POST /v1/completions"):
        stub.on(route, healthy(chunks=chunks, **fields))
    return stub


@pytest.mark.parametrize(
    "arguments",
    [["check"], ["check", "u", "--samples", "x"], ["grade"], ["no-such-verb"], ["check", "u", "--nonsense"]],
)
def test_a_wrong_command_line_is_one_json_object_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, report = run(capsys, *arguments)
    assert code == 2
    assert report["verdict"] == "error"
    assert report["findings"][0]["id"].endswith(".usage")


def test_nothing_listens(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = check(capsys, "http://127.0.0.1:9")
    assert (code, report["findings"][0]["id"]) == (2, "server.unreachable")


@pytest.mark.parametrize(
    ("route", "behaviour", "code"),
    [
        ("GET /v1/models", status(401), 2),
        ("GET /v1/models", page(), 2),
        ("*", status(503), 2),
        ("*", not_found(), 2),
        ("*", close_at_once(), 2),
    ],
)
def test_a_server_that_cannot_be_examined(
    capsys: pytest.CaptureFixture[str], route: str, behaviour: Any, code: int
) -> None:
    with StubServer() as stub:
        stub.everywhere(behaviour) if route == "*" else stub.on(route, behaviour)
        assert check(capsys, stub.url)[0] == code


def test_a_wrong_model_name_is_answered_with_the_names_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with StubServer() as stub:
        code, report = check(capsys, stub.url, "--model", "gpt-9")
    assert code == 2
    assert "stub-model" in report["findings"][0]["title"]


def test_a_sane_server_is_graded_and_timed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    with answering(words("Paris is the capital of France."), seconds_per_chunk=0.01) as stub:
        code, report = check(capsys, stub.url, "--html", str(html))
    probes = {p["name"]: p for p in report["results"]["probes"]}
    assert code in (0, 1, 3)
    assert probes["france"]["status"] == "run"
    assert {s["label"] for s in probes["france"]["samples"]} == {"ok"}
    assert probes["france"]["samples"][0]["text_head"] == "Paris is the capital of France."
    throughput = report["results"]["throughput"]
    assert throughput["samples"] == 3
    # Six chunks of a token each, 10 ms apart: at most 100 tokens a second.
    assert 20 < throughput["decode_tokens_per_s"]["median"] <= 105
    assert html.read_text().startswith("<!DOCTYPE html>")


def test_a_looping_server_fails_and_its_speed_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(LOOP, finish_reason="length") as stub:
        code, report = check(capsys, stub.url)
    assert code == 1
    assert report["results"]["throughput"]["valid"] is False
    ids = {f["id"] for f in report["findings"] if f["severity"] == "error"}
    assert "coherence.degenerate" in ids
    finding = next(f for f in report["findings"] if f["id"] == "coherence.degenerate")
    assert finding["causes"] and any("vllm serve" in r for r in finding["remedies"])


def test_billed_tokens_without_text_fail(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(("",) * 60, finish_reason="length") as stub:
        code, report = check(capsys, stub.url)
    assert code == 1
    assert any(f["id"] in ("coherence.empty", "coherence.degenerate") for f in report["findings"])


def test_london_is_a_warning_alone_and_an_error_against_one_who_knew(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    only = ("--probe", "france", "--samples", "3")
    with answering(words("The capital of France is Paris, a large city on the river Seine.")) as stub:
        _, knew = check(capsys, stub.url, *only)
    reference = tmp_path / "run.json"
    knew["verdict"] = "pass"
    reference.write_text(json.dumps(knew))
    with answering(LONDON) as stub:
        _, alone = check(capsys, stub.url, *only)
        code, against = check(capsys, stub.url, *only, "--reference", str(reference))
    wrong = [f for f in alone["findings"] if f["id"] == "coherence.wrong_answer"]
    assert {f["severity"] for f in wrong} == {"warning"}
    assert code == 1
    assert any(f["id"] == "coherence.wrong_answer" and f["severity"] == "error" for f in against["findings"])


@pytest.mark.parametrize("content", [None, "not json", "{}", '{"command": "grade", "results": {}}'])
def test_a_reference_that_is_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | None
) -> None:
    reference = tmp_path / "run.json"
    if content is not None:
        reference.write_text(content)
    code, report = check(capsys, "http://127.0.0.1:9", "--reference", str(reference))
    assert (code, report["findings"][0]["id"]) == (2, "coherence.reference")


def test_a_bug_is_one_line_and_exit_70(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("assay.coherence.check.run_check", broken)
    assert invoke(["check", "http://127.0.0.1:9"]) == 70
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "RuntimeError: two lines" in captured.err


def test_help_is_quick_and_the_core_has_no_torch() -> None:
    def seconds() -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "assay", "--help"], check=True, capture_output=True)
        return time.perf_counter() - began

    # Other programs share the machine: the best of some runs is what the program itself needs.
    assert min(seconds() for _ in range(8)) < 0.25
    program = "import sys; import assay.cli.main as m; m.build(); import assay.coherence.check; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "False"


def test_json_is_alone_on_stdout_of_a_real_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "assay", "check", "http://127.0.0.1:9", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert json.loads(done.stdout)["command"] == "check"
