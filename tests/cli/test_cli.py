from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from check_servers import PROSE, Sane, answering, check, ids, run, serving, words

from assay.cli.main import invoke
from stub_server import Exchange, StubServer, healthy, models, status

LOOP = words("I am sure that " + "the name of " * 60)
LONDON = words("The capital of France is London, a large city on the river Thames.")


@pytest.mark.parametrize(
    "arguments",
    [
        ["check"],
        ["check", "u", "--samples", "x"],
        ["check", "u", "--samples", "0"],
        ["check", "u", "--repeats", "2"],
        ["check", "u", "--probe", "stroy"],
        ["check", "u", "--reference", "a", "--reference-engine", "hf:b"],
        ["grade"],
        ["no-such-verb"],
        ["check", "u", "--nonsense"],
        ["check", "u", "--timeout", "inf"],
        ["check", "u", "--timeout", "nan"],
        ["check", "u", "--seed", "99999999999999999999"],
        ["check", "u", "--longest-needle", "99999999999999999999"],
        ["check", "http://127.0.0.1:9", "--html", "no/such/folder/report.html"],
        ["check", "http://127.0.0.1:9", "--junit", "."],
    ],
)
def test_a_wrong_command_line_is_one_json_object_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, report = run(capsys, *arguments)
    assert code == 2
    assert report["verdict"] == "error"
    assert report["findings"][0]["id"].endswith(".usage")


def test_a_slip_on_the_command_line_is_answered_in_plain_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments, said in (
        (["chek"], "ERROR  assay: No such command 'chek'. The nearest is 'check'."),
        (["kv", "evl"], "No such command 'evl'. The nearest is 'eval'."),
        (["xyzzy"], "No such command 'xyzzy'.\n"),
        (["check", "u", "--samples", "x"], "Invalid value for '--samples': not a whole number."),
        (["check", "u", "--budget", "x"], "Invalid value for '--budget': not a number."),
    ):
        assert invoke(arguments) == 2
        assert said in capsys.readouterr().out
    assert invoke(["check", "--help"]) == 0
    assert "[default: 1%; 0% to 100%]" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("area", "arguments"),
    [
        (
            "server",
            ("check", "http://127.0.0.1:9", "--reference-engine", "hf:.?kv_cache_dtype=int3"),
        ),
        ("server", ("check", "http://127.0.0.1:9", "--reference-engine", "gguf:.")),
        ("checkpoint", ("verify", ".", "--serve-args", "--kv-cache-dtype 'fp8")),
        ("fidelity", ("compare", "hf:.?kv_cache_dtype=int3", "hf:.")),
        ("fidelity", ("compare", "hf:.", "http://127.0.0.1:9/?x=1")),
        ("fidelity", ("reference", "hf:.?kv_cache_dtype=int3", "--text", "x", "--out", "x")),
        ("kv", ("kv", "eval", "hf:.?kv_cache_dtype=int3", "--codec", "identity")),
        ("kv", ("kv", "eval", "vllm:.?max_model_len=x", "--codec", "identity")),
        ("kv", ("kv", "eval", "gguf:x", "--codec", "identity")),
        ("kv", ("kv", "eval", "hf:.", "--codec", "identity", "--seed", "9223372036854775808")),
        ("kv", ("kv", "eval", "hf:.", "--codec", "int", "--margin-ppl", "5")),
        ("kv", ("kv", "eval", "hf:.", "--codec", "k:int(bits=4)", "--stream", "v")),
        ("kv", ("kv", "diagnose", "hf:.", "--codec", "v:int(bits=4)", "--stream", "k")),
        ("kv", ("kv", "sweep", "hf:.", "--codec", "v:int(bits=4)", "--stream", "k")),
        ("kv", ("kv", "sweep", "http://u:secret@127.0.0.1:9", "--codec", "int", "--windows", "1")),
        ("kv", ("kv", "noise", "hf:.", "--seed", "-1")),
        ("gap", ("gap", "hf:.", "hf:.", "--codec", "int", "--seed", "-1")),
        ("kv", ("kv", "noise", "hf:.", "--text", "/nowhere/x.txt", "--html", "/nowhere/x.html")),
        ("gap", ("gap", "hf:.?kv_cache_dtype=int3", "hf:.", "--codec", "identity")),
        ("gap", ("gap", "hf:.", "hf:.", "--codec", "identity", "--margin-ppl", "many")),
        ("speculation", ("spec", "a.log", "--for", "3")),
    ],
)
def test_a_wrong_use_is_of_the_area_of_its_verb_wherever_it_is_noticed(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    area: str,
    arguments: tuple[str, ...],
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    code, report = run(capsys, *arguments)
    assert (code, [f["id"] for f in report["findings"]]) == (2, [f"{area}.usage"])


def test_a_group_without_a_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["kv"]) == 2
    shown = capsys.readouterr()
    assert shown.out.startswith("Usage: assay kv")
    assert all(name in shown.out for name in ("eval", "sweep", "serve"))
    code, report = run(capsys, "kv", "evl")
    assert (code, report["command"]) == (2, "kv")
    assert report["findings"][0]["remedies"] == ["assay kv --help"]
    code, report = run(capsys, "kv", "eval")
    assert report["findings"][0]["remedies"] == ["assay kv eval --help"]


def test_a_wrong_model_name_is_answered_with_the_names_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with StubServer() as stub:
        code, report = check(capsys, stub.url, "--model", "gpt-9")
    assert code == 2
    assert "stub-model" in report["findings"][0]["title"]


def test_a_sane_server_passes_without_a_finding(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    html = tmp_path / "report.html"
    with serving(Sane()) as stub:
        code, report = check(capsys, stub.url, "--samples", "3", "--html", str(html))
    probes = {p["name"]: p for p in report["results"]["probes"]}
    assert (code, report["verdict"], report["findings"]) == (0, "pass", [])
    assert set(report) == {
        "schema",
        "command",
        "verdict",
        "exit_code",
        "subject",
        "findings",
        "results",
        "environment",
    }
    assert {p["status"] for p in probes.values()} == {"run"}
    assert len(probes["france"]["samples"]) == 4
    for probe in probes.values():
        for sample in probe["samples"]:
            assert set(sample) >= {
                "label", "kind", "onset_char", "finish_reason", "completion_tokens", "text_head",
            }  # fmt: skip
            assert (sample["label"], sample["kind"], sample["onset_char"]) == ("ok", None, None)
            assert all(c["passed"] for c in sample["checks"]), sample
    assert probes["story"]["samples"][0]["text_head"] == PROSE[:200]
    throughput = report["results"]["throughput"]
    assert (throughput["valid"], throughput["samples"]) == (True, 3)
    assert set(throughput["ttft_s"]) == {"median", "min", "max"}
    assert html.read_text().startswith("<!DOCTYPE html>")


def test_a_looping_server_fails_and_its_speed_does_not_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
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


def test_reasoning_that_never_ends_is_inconclusive(capsys: pytest.CaptureFixture[str]) -> None:
    with answering((), reasoning=PROSE, finish_reason="length", scores=False, echo=False) as stub:
        code, report = check(capsys, stub.url, "--samples", "3", "--no-throughput")
    assert code == 3
    assert "coherence.truncated_reasoning" in ids(report)
    assert {s["label"] for p in report["results"]["probes"] for s in p["samples"]} == {
        "truncated_reasoning"
    }


def test_neither_the_key_nor_a_folder_leaves_the_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STUB_KEY", "sk-hidden-0123456789")
    files = [tmp_path / name for name in ("r.html", "r.xml", "r.md")]
    outputs = [
        x
        for o, f in zip(("--html", "--junit", "--markdown"), files, strict=True)
        for x in (o, str(f))
    ]

    def repeats_the_key(e: Exchange) -> None:
        if e.body.get("tools"):
            status(400, "refused for " + e.headers["Authorization"])(e)
        else:
            healthy(chunks=LOOP, finish_reason="length")(e)

    with serving(repeats_the_key) as stub:
        stub.on("GET /v1/models", models("stub-model", root="/srv/private/model"))
        code, report = check(capsys, stub.url, "--api-key-env", "STUB_KEY", *outputs)
        sent = [e.headers.get("Authorization") for e in stub.exchanges if e.body]
    assert code == 1
    assert set(sent) == {"Bearer sk-hidden-0123456789"}
    assert "sk-hidden" not in json.dumps(report)
    assert all("sk-hidden" not in file.read_text() for file in files)
    assert "/srv/private" not in json.dumps({k: v for k, v in report.items() if k != "subject"})
    assert str(tmp_path) not in json.dumps(report)


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


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")],
    ids=["host", "GPU"],
)
def test_memory_that_runs_out_is_no_bug(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def greedy(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("assay.coherence.check.run_check", greedy)
    code, report = run(capsys, "check", "http://127.0.0.1:9")
    assert (code, report["verdict"]) == (2, "error")
    (finding,) = report["findings"]
    assert finding["id"] == "server.out_of_memory"
    assert finding["title"].startswith("out of memory: ")
    assert finding["remedies"]


def test_a_cache_that_cannot_be_made_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "file"))
    code, report = run(capsys, "demo")
    assert code == 2
    assert "cannot make the cache folder" in report["findings"][0]["title"]


def test_the_demo_asks_for_its_packages_before_it_fetches_anything(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "assay.demo.run.find_spec", lambda name: None if name == "gguf" else object()
    )
    monkeypatch.setattr("assay.demo.run.prepare", lambda _: pytest.fail("it began to install"))
    code, report = run(capsys, "demo")
    assert code == 2
    assert "not installed: gguf" in report["findings"][0]["title"]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_standard_stream_that_is_closed_is_no_bug(tmp_path: Path, closed: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text(PROSE)
    for more in ("", " --json"):
        command = (
            f"{shlex.quote(sys.executable)} -m assay grade {shlex.quote(str(text))}{more} {closed}"
        )
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_json_is_alone_on_stdout_of_a_real_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "assay", "check", "http://127.0.0.1:9", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert json.loads(done.stdout)["command"] == "check"
