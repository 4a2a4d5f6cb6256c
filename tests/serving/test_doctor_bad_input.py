"""What can go wrong around a doctor: ports, disks, other doctors, servers that never come,
interrupts. Real processes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from assay.errors import AssayError
from assay.runs import cache_dir
from assay.serving import launch
from assay.serving.command import read_command
from assay.serving.launch import StartFailed, launched, tail_of
from serving.asking import SERVER, ask, marked

pytestmark = pytest.mark.engine


def test_a_second_doctor_waits_for_the_first_and_gives_up_in_time() -> None:
    with (cache_dir("locks") / "doctor-all.lock").open("a+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write("4711")
        other.flush()
        with pytest.raises(AssayError, match=r"another doctor \(process 4711\)"):
            ask("--harmless-a", "1", budget=0.05)
        threading.Timer(1.5, lambda: fcntl.flock(other, fcntl.LOCK_UN)).start()
        assert ask("--harmless-a", "1").exit_code == 0


def test_a_port_that_is_taken_meanwhile_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = [taken.getsockname()[1], launch.free_port()]
        monkeypatch.setattr(launch, "free_port", lambda: ports.pop(0))
        with launched(
            read_command([], SERVER), frozenset(), tmp_path / "log", timeout=120
        ) as running:
            assert running.alive() and ports == []


@pytest.mark.parametrize(
    ("extra", "kind", "says"),
    [
        ("--crash", "died", "another shape"),
        ("--memory", "memory", "out of memory"),
        ("--refuses", "refused", "unrecognized"),
        ("--silent", "silent", "not ready after 2 s"),
        ("--mute", "silent", "answers no request after 2 s"),
    ],
)
def test_each_way_not_to_start_is_told_apart(
    extra: str, kind: str, says: str, tmp_path: Path
) -> None:
    timeout = 2.0 if kind == "silent" else 120.0
    with (
        pytest.raises(StartFailed, match=says) as failed,
        launched(
            read_command([], f"{SERVER} {extra}"), frozenset(), tmp_path / "log", timeout=timeout
        ),
    ):
        pass
    assert failed.value.kind == kind


def test_a_setting_with_which_the_server_dies_at_once_is_not_called_guilty() -> None:
    report = ask("--harmless-a", "1", "--crash")
    roles = {s["name"]: (s["role"], s["evidence"]) for s in report.results["settings"]}
    assert report.exit_code == 3 and report.results["guilty"] == []
    assert roles["--crash"][0] == "cannot_run" and "another shape" in roles["--crash"][1]
    assert roles["--harmless-a"][0] == "innocent"


def test_too_little_room_for_logs_is_said_before_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(launch.shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(AssayError, match="only 1 MiB are free") as failed:
        ask("--harmless-a", "1")
    assert failed.value.finding_id == "server.disk_full"


def test_a_disk_that_fills_up_ends_the_doctor_with_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=90m", "tmpfs", str(disk)]
    if (
        shutil.which("mount") is None
        or subprocess.run(mounted, capture_output=True, check=False).returncode
    ):
        pytest.skip("a small file system cannot be mounted here")
    try:
        monkeypatch.setenv("ASSAY_CACHE", str(disk))
        report = ask("--harmless-a", "1", "--chatty", "40", fault_rate=1 / 3)
        assert report.exit_code == 3 and report.results["baseline"]["verdict"] == "pass"
        assert any(f.id == "server.disk_full" and "free in" in f.title for f in report.findings)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def test_a_lock_is_held_while_a_server_starts_and_free_while_it_is_asked(tmp_path: Path) -> None:
    lock, held = tmp_path / "lock", []

    def taken() -> bool:
        with lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
            return False

    command = read_command([], f"{SERVER} --delay 2")
    threading.Timer(1.0, lambda: held.append(taken())).start()
    with launched(command, frozenset(), tmp_path / "log", timeout=120, lock=lock):
        time.sleep(0.2)
        assert held == [True] and not taken()
    time.sleep(0.2)
    assert not taken()
    with lock.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(StartFailed, match="held by another for 1 s"):
            launched(command, frozenset(), tmp_path / "log", timeout=1, lock=lock).__enter__()


def test_an_adapter_is_compared_with_its_base_on_one_server(tmp_path: Path) -> None:
    from assay.serving.symptoms import _beside_base

    for extra, differ in (("", 6), (" --ignored", 0)):
        command = read_command([], f"{SERVER} --lora-modules mine{extra}")
        with launched(command, frozenset(), tmp_path / "log", timeout=120) as running:
            assert _beside_base(running.url, "mine", None) == {
                "adapter_asked": 6,
                "adapter_differ": differ,
            }


def test_to_find_out_what_a_server_can_do_takes_nothing_of_the_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from assay.engines.server.engine import ServerEngine
    from assay.serving.symptoms import Measure, measure

    whole = ServerEngine.describe
    monkeypatch.setattr(ServerEngine, "describe", lambda engine: (time.sleep(4), whole(engine))[1])
    with launched(read_command([], SERVER), frozenset(), tmp_path / "log", timeout=30) as running:
        seen = measure(
            running.url, Measure(3.0, 8, tools=False), 0, (), None, kinds=(), log=running.log
        )
    assert {"burst", "france", "story"} <= {p.name for p in seen.record.probes if p.samples}


def test_a_baseline_that_is_broken_beyond_doubt_is_asked_no_more(tmp_path: Path) -> None:
    from assay.serving.symptoms import Measure, Observation, measure, see

    def asked(extra: str) -> Observation:
        with launched(
            read_command([], SERVER + extra), frozenset(), tmp_path / "log", timeout=30
        ) as running:
            return measure(
                running.url, Measure(20.0, 24, tools=False), 0, (), None, kinds=(), log=running.log
            )

    broken, whole = asked(" --broken"), asked("")
    assert see(broken, None).certain and not broken.record.timed and whole.record.timed
    assert whole.record.prefill_tokens_per_s is None  # which no rule of the doctor looks at


def test_the_budget_does_not_run_while_another_doctor_is_waited_for() -> None:
    from assay.options import DoctorOptions
    from assay.progress import NO_PROGRESS
    from assay.serving.doctor import Doctor

    options = DoctorOptions(
        command_template=SERVER, seconds=3.0, budget=1.0, fault_rate=1.0, ladder=False
    )
    doctor = Doctor(read_command(["--harmless-a", "1"], SERVER), options, NO_PROGRESS)
    doctor.starts.until = 0.0  # as if the wait had taken all of it
    found = doctor.run()
    assert not found.out_of_time and found.given_state == "good"


def test_a_start_that_is_unclear_is_asked_longer_and_a_clear_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from assay.coherence.rules.rule import Ruling
    from assay.serving import symptoms

    def asked(state: str) -> set[str]:
        whole = judge(baseline.record)
        ruling = Ruling("degenerate_rate", state, "so it is said")  # type: ignore[arg-type]
        monkeypatch.setattr(symptoms, "judge", lambda *_: replace(whole, rulings=(ruling,)))
        how = symptoms.Measure(0.01, 8, tools=False, longer=20.0)
        seen = symptoms.measure(running.url, how, 0, (), baseline, kinds=(), log=running.log)
        return {p.name for p in seen.record.probes if p.samples}

    judge = symptoms.judge
    with launched(read_command([], SERVER), frozenset(), tmp_path / "log", timeout=30) as running:
        how = symptoms.Measure(5.0, 8, tools=False)
        baseline = symptoms.measure(running.url, how, 0, (), None, kinds=(), log=running.log)
        assert asked("good") == {"burst"} and asked("unclear") > {"burst", "france"}


def test_the_head_of_a_long_log_is_kept_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"first line\n" + b"x" * 500 + b"\nlast line\n")
    assert tail_of(log, 10, 11) == "first line\n\n[...]\nlast line\n"
    assert tail_of(log, 400, 200) == log.read_text() and tail_of(log, 10) == "last line\n"


@pytest.mark.parametrize("starts", [2, 4])
def test_an_interrupt_in_a_later_stage_keeps_what_was_measured(starts: int, tmp_path: Path) -> None:
    mark = f"mark-{os.getpid()}-later-{starts}"
    command = [
        sys.executable,
        "-m",
        "assay",
        "doctor",
        "--json",
        str(tmp_path / "report.json"),
        "--budget",
        "2",
        "--seconds",
        "5",
        "--no-tools",
        "--fault-rate",
        "1",
        "--command-template",
        f"{SERVER} --spawn {mark}",
        "--",
        "--harmless-a",
        "1",
        "--kv",
        "fp8",
        "--harmless-b",
        "2",
    ]
    doctor = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert doctor.stderr is not None
    try:
        begun = 0
        for line in doctor.stderr:
            begun += line.rstrip().endswith(": starting")
            if begun == starts + 1:
                break
        time.sleep(0.7)
        doctor.send_signal(signal.SIGINT)
        doctor.stderr.read()
        assert doctor.wait(timeout=120) == 130
    finally:
        doctor.kill()
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["results"]["starts"]) == starts
    assert marked(mark) == []
    again = subprocess.run(command, capture_output=True, check=False, timeout=200)
    second = json.loads((tmp_path / "report.json").read_text())["results"]
    assert again.returncode == 1 and second["guilty"] == ["--kv"]
    assert sum(start["resumed"] for start in second["starts"]) == starts


def test_the_live_table_shows_starts_symptoms_and_the_time_left() -> None:
    import contextlib
    import io
    from collections.abc import Iterator

    from rich.console import Console

    from assay.cli.progress import starts_table
    from assay.options import DoctorOptions
    from assay.progress import NO_PROGRESS
    from assay.serving.doctor import Doctor
    from assay.serving.run import run_doctor

    seen: list[str] = []

    def drawn(doctor: Doctor, height: int) -> str:
        console = Console(file=io.StringIO(), width=100)
        console.print(starts_table(doctor, height))
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    @contextlib.contextmanager
    def watch(doctor: Doctor) -> Iterator[None]:
        yield
        doctor.starts.now = "with --kv, start 2: asking"
        seen.extend((drawn(doctor, 40), drawn(doctor, 8)))

    options = DoctorOptions(
        command_template=SERVER, seconds=5.0, budget=2.0, fault_rate=1.0, ladder=False, tools=False
    )
    run_doctor(["--harmless-a", "1", "--kv", "fp8"], options, NO_PROGRESS, watch)
    full, low = seen
    lines = full.splitlines()
    assert (
        all(len(line.rstrip()) <= 100 for line in lines) and lines[0].split()[0] == "configuration"
    )
    assert any(
        line.startswith("with --kv") and "floods" in line and line.rstrip().endswith("bad")
        for line in lines
    )
    assert "asking (4 starts so far," in lines[-1] and lines[-1].rstrip().endswith("left)")
    assert len(low.splitlines()) < len(lines) and "\nbaseline" not in low
