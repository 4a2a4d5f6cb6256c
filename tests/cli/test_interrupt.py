"""Ctrl-C in the middle of `assay check`: exit 130, at once, with what was measured."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable

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


def interrupted(stub: StubServer, behaviour: Stuck, sign: int) -> tuple[int, str, float]:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "assay",
            "check",
            stub.url,
            "--json",
            "--parallel",
            "1",
            "--samples",
            "2",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        until = time.monotonic() + 120
        while not behaviour.waiting and time.monotonic() < until and process.poll() is None:
            time.sleep(0.02)
        assert behaviour.waiting, "the run never came to the request that hangs"
        time.sleep(1.5)  # the answers that came before are graded meanwhile
        began = time.monotonic()
        process.send_signal(sign)
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, time.monotonic() - began


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_in_the_middle_of_the_probes(sign: signal.Signals) -> None:
    # Fifteen texts of the first probes are there when the second turn of the next one hangs.
    behaviour = Stuck(lambda e: "messages" in e.body and len(e.body["messages"]) > 2)
    with serving(behaviour) as stub:
        code, out, seconds = interrupted(stub, behaviour, sign)
    report = json.loads(out)
    texts = [s for p in report["results"]["probes"] for s in p["samples"]]
    assert (code, report["exit_code"]) == (130, 130)
    assert len(texts) >= 10
    assert {s["label"] for s in texts} == {"ok"}
    assert report["verdict"] == "inconclusive"
    assert report["results"]["throughput"]["valid"] is False
    assert seconds < 5


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
