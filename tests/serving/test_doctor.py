"""The doctor on small real servers: guilty sets, what cannot run, bad input, and nothing left at
any exit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import assay
from assay.errors import AssayError
from assay.verdict import Report, Verdict
from serving.asking import SERVER, ask, marked

pytestmark = pytest.mark.engine


def roles(report: Report) -> dict[str, str]:
    return {s["name"]: s["role"] for s in report.results["settings"]}


def test_one_guilty_setting_is_found_and_the_others_are_acquitted(tmp_path: Path) -> None:
    file = tmp_path / "evidence.tar.zst"
    report = ask("--harmless-a", "1", "--kv", "fp8", "--harmless-b", "2", bundle=file)
    assert (report.exit_code, report.results["guilty"]) == (1, ["--kv"])
    assert roles(report) == {
        "--harmless-a": "innocent",
        "--kv": "guilty",
        "--harmless-b": "innocent",
    }
    assert (
        report.results["baseline"]["verdict"] == "pass"
        and report.results["given"]["verdict"] == "fail"
    )
    assert (
        "--kv" not in report.results["best"]["command"]
        and "--harmless-b 2" in report.results["best"]["command"]
    )
    assert "--kv fp8" in report.results["issue"] and report.to_html()

    from assay.serving.bundle_check import read_bundle, show_bundle, verify_bundle

    assert show_bundle(file).verdict is Verdict.FAIL
    assert verify_bundle(file).verdict is Verdict.PASS, verify_bundle(file).findings
    text = b"".join(read_bundle(file).values()).decode()
    assert "listening, kv=fp8" in text and str(Path.home()) + "/" not in text


def test_two_settings_that_fail_together_only() -> None:
    report = ask("--pair-a", "--harmless-a", "1", "--pair-b")
    assert report.results["guilty_sets"] == [["--pair-a", "--pair-b"]]
    assert roles(report)["--harmless-a"] == "innocent"


def test_a_healthy_command_passes_and_a_broken_baseline_is_said() -> None:
    assert ask("--harmless-a", "1").exit_code == 0
    broken = ask("--harmless-a", "1", command_template=SERVER + " --broken")
    assert broken.exit_code == 1 and broken.results["guilty"] == []
    assert any(f.id == "server.baseline_fails" for f in broken.findings)


def test_one_bad_start_in_three_is_found(tmp_path: Path) -> None:
    report = ask("--flaky", str(tmp_path / "count"), "--harmless-a", "1", fault_rate=1 / 3)
    assert report.results["guilty"] == ["--flaky"]


def test_a_second_command_takes_the_baseline_of_the_first_and_fresh_takes_nothing() -> None:
    first = ask("--harmless-a", "1")
    assert [s["resumed"] for s in first.results["starts"]] == [False, False]
    second = ask("--harmless-a", "1", "--kv", "fp8")
    assert second.results["guilty"] == ["--kv"]
    kept = {tuple(s["settings"]): s["resumed"] for s in second.results["starts"]}
    assert (
        kept[()] and kept[("--harmless-a",)] and not kept[("--kv",)]
    )  # acquitted by the start of the first command
    assert second.results["launches"] == 2
    again = ask("--harmless-a", "1", fresh=True)
    assert again.results["launches"] == 2 and again.exit_code == 0


def test_kept_speed_is_not_that_of_another_run(tmp_path: Path) -> None:
    from assay.options import DoctorOptions
    from assay.progress import NO_PROGRESS
    from assay.serving.command import read_command
    from assay.serving.doctor import Doctor
    from assay.serving.starts import Starts

    def doctor(*words: str) -> Starts:
        return Doctor(
            read_command(list(words), SERVER), DoctorOptions(command_template=SERVER), NO_PROGRESS
        ).starts

    one, two = doctor("--harmless-a", "1"), doctor("--harmless-b", "2")
    texts, speed = frozenset({"prompts"}), frozenset({"slower"})
    assert one._key(frozenset(), 0, texts) == two._key(frozenset(), 0, texts)
    assert one._key(frozenset(), 0, speed) != two._key(frozenset(), 0, speed)
    start = {"at": time.time() - 1800, "run": one.name, "observation": {"failed": ""}}
    assert one._counts(start) and two._counts(start)
    assert not two._counts(
        {**start, "observation": {"failed": "memory"}}
    )  # it may start the next time
    old = {**start, "at": time.time() - 7200}
    assert one._counts(old) and not two._counts(
        old
    )  # an interrupted run of the same command goes on for a day
    (one.folder / "done").touch()
    assert not one._counts(old)


def test_memory_is_told_apart_from_a_fault_and_an_ignored_flag_is_named() -> None:
    report = ask("--memory", "--nothing", "--harmless-a", "1")
    assert roles(report) == {
        "--memory": "cannot_run",
        "--nothing": "no_effect",
        "--harmless-a": "innocent",
    }
    assert report.exit_code == 3 and {"server.cannot_run", "server.no_effect"} <= {
        f.id for f in report.findings
    }


def test_a_loss_of_speed_at_equal_text_is_found_and_the_ladder_is_measured() -> None:
    # A token takes 10 ms, with the setting 40: what else runs on the machine makes no start twice
    # as slow as another.
    report = ask(
        "--harmless-a",
        "1",
        "--slow",
        "0.03",
        symptom=("speed",),
        slower=0.5,
        ladder=True,
        seconds=20.0,
        command_template=f"{SERVER} --pace 0.01",
    )
    assert report.results["guilty"] == ["--slow"] and report.results["symptoms"] == ["slower"]
    finding = next(f for f in report.findings if f.id == "throughput.guilty_setting")
    assert "% slower [" in finding.title
    rungs = report.results["ladder"]
    assert [rung["settings"] for rung in rungs] == [[], ["--harmless-a"]]
    assert all(
        r["tokens_per_s"]["lo"] <= r["tokens_per_s"]["value"] <= r["tokens_per_s"]["hi"]
        for r in rungs
    )
    assert report.results["best"]["settings"] == ["--harmless-a"]


def test_the_key_that_the_command_names_is_used_and_kept_out_of_the_report() -> None:
    report = ask(
        "--harmless-a",
        "1",
        command_template=SERVER + " --locked secret-key-1 --api-key secret-key-1",
    )
    assert report.exit_code == 0 and "secret-key-1" not in json.dumps(report.to_json()["subject"])


def test_a_server_that_dies_while_it_is_asked() -> None:
    assert ask("--dies", "--harmless-a", "1").results["guilty"] == ["--dies"]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("no-such-program {port}", "no program no-such-program"),
        (SERVER + " --refuses", "unrecognized"),
        (SERVER + " --memory", "out of memory"),
        (SERVER + " --locked other-key", "asks for a key"),
        ("docker run -p {port} vllm", "inside the container"),
    ],
)
def test_nothing_could_be_launched(
    template: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from assay.cli.main import invoke

    code = invoke(
        [
            "doctor",
            "--json",
            "--budget",
            "1",
            "--command-template",
            template,
            "--",
            "--harmless-a",
            "1",
        ]
    )
    report = json.loads(capsys.readouterr().out)
    assert code == 2 and says in json.dumps(report["findings"])


def test_lint_launches_nothing_and_an_answer_that_never_comes_is_given_up() -> None:
    report = assay.doctor(["vllm", "serve", "org/model", "--kv-cache-dtype", "fp8"], lint=True)
    assert report.results["launches"] == 0 and report.exit_code == 3
    silent = ask("--harmless-a", "1", command_template=SERVER + " --silent", start_timeout=2.0)
    assert silent.exit_code == 2


def test_a_spent_budget_keeps_what_was_measured(tmp_path: Path) -> None:
    words = ("--harmless-a", "1", "--delay", "1")
    first = ask(*words, budget=0.1, fault_rate=0.05)
    assert first.exit_code == 3 and 0 < first.results["launches"] < 59
    second = ask(*words, budget=0.15, fault_rate=0.05)
    assert any(start["resumed"] for start in second.results["starts"])


def test_a_changed_bundle_is_found_out(tmp_path: Path) -> None:
    from assay.serving.bundle_check import read_bundle, verify_bundle

    file = tmp_path / "b.tar.zst"
    file.write_bytes(b"\x28\xb5\x2f\xfdnonsense")
    with pytest.raises(AssayError, match="no bundle"):
        read_bundle(file)
    with pytest.raises(AssayError, match="No such file"):
        verify_bundle(tmp_path / "none")


@pytest.mark.parametrize(
    ("wait", "sign"),
    [
        ("starting", signal.SIGKILL), ("answering", signal.SIGKILL), ("measuring", signal.SIGKILL),
        ("starting", signal.SIGINT), ("answering", signal.SIGTERM), ("measuring", signal.SIGINT),
    ],
)  # fmt: skip
def test_nothing_is_left_whatever_kills_the_doctor_at_any_stage(
    sign: signal.Signals, wait: str, tmp_path: Path
) -> None:
    mark = f"mark-{os.getpid()}-{sign.value}-{wait}"
    extra = (
        " --silent" if wait == "starting" else " --mute" if wait == "answering" else " --slow 0.05"
    )
    command = [
        sys.executable,
        "-m",
        "assay",
        "doctor",
        "--json",
        "--budget",
        "2",
        "--command-template",
        f"{SERVER} --spawn {mark}{extra}",
        "--",
        "--harmless-a",
        "1",
    ]
    doctor = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while (
            len(marked(mark)) < 4 and time.monotonic() < until
        ):  # doctor, supervisor, server, its worker
            time.sleep(0.1)
        assert len(marked(mark)) >= 4
        time.sleep({"starting": 0.2, "answering": 1.0, "measuring": 3.0}[wait])
        doctor.send_signal(sign)
        doctor.wait(timeout=120)
        until = time.monotonic() + 120
        while marked(mark) and time.monotonic() < until:
            time.sleep(0.1)
        assert marked(mark) == []
        if sign is not signal.SIGKILL:
            assert doctor.returncode == 128 + sign
    finally:
        doctor.kill()
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
