"""A signal in the middle of `assay check`: its exit code, at once, with what was measured."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from check_servers import Sane, serving

from stub_server import Exchange, StubServer, hang


class Stuck:
    """Sane answers up to some point, then none at all."""

    def __init__(self, stuck: Callable[[Exchange], bool]) -> None:
        self.stuck = stuck
        self.waiting = 0

    def __call__(self, e: Exchange) -> None:
        if self.stuck(e):
            self.waiting += 1
            hang()(e)
        else:
            Sane()(e)


def command(stub: StubServer, *more: str) -> list[str]:
    words = [sys.executable, "-m", "assay", "check", stub.url, "--parallel", "1", "--samples", "2"]
    return [*words, *more]


def until_stuck(behaviour: Stuck, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    while not behaviour.waiting and time.monotonic() < until and process.poll() is None:
        time.sleep(0.02)
    assert behaviour.waiting, "the run never came to the request that hangs"
    time.sleep(1.5)  # the answers that came before are graded meanwhile


def interrupted(
    stub: StubServer, behaviour: Stuck, sign: int, times: int = 1
) -> tuple[int, str, float]:
    process = subprocess.Popen(
        command(stub, "--json"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        until_stuck(behaviour, process)
        began = time.monotonic()
        for _ in range(times):
            process.send_signal(sign)
            time.sleep(0.05 if times > 1 else 0)
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, time.monotonic() - began


def in_the_probes() -> Stuck:
    """Fifteen texts of the first probes are there when the second turn of the next one hangs."""
    return Stuck(lambda e: "messages" in e.body and len(e.body["messages"]) > 2)


def holds_texts(report: dict[str, Any], code: int) -> None:
    texts = [s for p in report["results"]["probes"] for s in p["samples"]]
    assert report["exit_code"] == code
    assert len(texts) >= 10
    assert {s["label"] for s in texts} == {"ok"}
    assert report["verdict"] == "inconclusive"
    assert report["results"]["throughput"]["valid"] is False


@pytest.mark.parametrize(
    ("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_in_the_middle_of_the_probes(sign: signal.Signals, code: int) -> None:
    behaviour = in_the_probes()
    with serving(behaviour) as stub:
        found, out, seconds = interrupted(stub, behaviour, sign)
    assert found == code
    holds_texts(json.loads(out), code)
    assert seconds < 5


def test_several_signals_at_a_time_are_one_request() -> None:
    # `timeout` signals its child and then its process group, systemd sends SIGTERM and SIGHUP.
    behaviour = in_the_probes()
    with serving(behaviour) as stub:
        found, out, _ = interrupted(stub, behaviour, signal.SIGTERM, times=4)
    assert found == 143
    holds_texts(json.loads(out), 143)


def test_timeout_prints_what_there_is() -> None:
    behaviour = in_the_probes()
    with serving(behaviour) as stub:
        process = subprocess.Popen(
            ["timeout", "120", *command(stub, "--json")],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            until_stuck(behaviour, process)
            process.send_signal(signal.SIGTERM)  # which it passes on as if its time had come
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode in (124, 143)
    holds_texts(json.loads(out), 143)


def test_a_reader_that_leaves_ends_the_run_and_the_files_are_written(tmp_path: Path) -> None:
    behaviour = in_the_probes()
    with serving(behaviour) as stub:
        process = subprocess.Popen(
            command(stub, "--json", str(tmp_path / "run.json")),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            until_stuck(behaviour, process)
            assert process.stdout is not None and process.stderr is not None
            process.stdout.close()
            assert process.wait(60) == 141
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()
    holds_texts(json.loads((tmp_path / "run.json").read_text(encoding="utf-8")), 141)


def test_a_terminal_that_closes_ends_the_run_and_the_files_are_written(tmp_path: Path) -> None:
    behaviour = in_the_probes()
    terminal, own = pty.openpty()
    with serving(behaviour) as stub:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", ON_A_TERMINAL),
                *command(stub, "--json", str(tmp_path / "run.json"), "--html"),
                str(tmp_path / "run.html"),
            ],
            stdin=own,
            stdout=own,
            stderr=own,
            text=True,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(own)
        read = threading.Thread(target=drain, args=(terminal,), daemon=True)
        read.start()
        try:
            until_stuck(behaviour, process)
            os.close(terminal)
            assert process.wait(60) == 129
        finally:
            process.kill()
    holds_texts(json.loads((tmp_path / "run.json").read_text(encoding="utf-8")), 129)
    assert "</html>" in (tmp_path / "run.html").read_text(encoding="utf-8")


ON_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Makes its standard input the terminal of its session, and becomes the command."""


def drain(terminal: int) -> None:
    """Read what a terminal shows, or its program waits; no longer than the run is stuck."""
    with suppress(OSError, ValueError):
        while True:
            if select.select([terminal], [], [], 0.1)[0]:
                os.read(terminal, 65536)


def test_nohup_holds() -> None:
    behaviour = in_the_probes()
    with serving(behaviour) as stub:
        process = subprocess.Popen(
            ["nohup", *command(stub, "--json")],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            until_stuck(behaviour, process)
            process.send_signal(signal.SIGHUP)
            time.sleep(0.5)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 143
    holds_texts(json.loads(out), 143)


def test_in_the_middle_of_the_timing() -> None:
    behaviour = Stuck(lambda e: bool(e.body.get("stream")) and e.body["max_tokens"] > 100)
    with serving(behaviour) as stub:
        code, out, seconds = interrupted(stub, behaviour, signal.SIGINT)
    report = json.loads(out)
    assert (code, report["verdict"]) == (130, "inconclusive")
    probes = {p["name"]: p for p in report["results"]["probes"]}
    assert probes["burst"]["samples"] and probes["story"]["samples"]
    assert probes["needle"]["reason"] == "the run was interrupted"
    assert report["results"]["throughput"]["samples"] == 0
    assert seconds < 5


def test_before_anything_was_measured() -> None:
    behaviour = Stuck(lambda e: bool(e.body))
    with serving(behaviour) as stub:
        code, out, _ = interrupted(stub, behaviour, signal.SIGINT)
    report = json.loads(out)
    assert code == 130
    assert report["findings"][0]["id"] == "server.interrupted"
