"""A real llama-server under watch: restarted, put to sleep, and replaced by another model at night
behind the same address.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from assay.demo import Server, llama_server
from assay.demo.models import SMOLLM2, gguf_of
from assay.monitor.canary import Canary, State
from assay.monitor.loop import Watch
from assay.monitor.options import WatchOptions
from assay.monitor.report import report_of
from assay.runs import cache_dir
from assay.serving.launch import free_port
from monitor.watched import impatient

pytestmark = [pytest.mark.engine, pytest.mark.llama]
BINARY = cache_dir("llama.cpp") / "bin" / "llama-server"


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    if not BINARY.exists():
        pytest.skip("no llama-server: bash benchmarks/build/build_llama_cpp.sh")
    monkeypatch.setattr("assay.monitor.loop.cache_dir", lambda name: tmp_path)
    return free_port()


@contextmanager
def served(port: int, *more: str, alias: str = "day") -> Iterator[Server]:
    with llama_server(
        gguf_of(SMOLLM2),
        BINARY,
        max_model_len=1024,
        streams=4,
        port=port,
        alias=alias,
        extra_args=more,
    ) as server:
        yield server


def watch(port: int) -> Watch:
    url = f"http://127.0.0.1:{port}"
    return Watch(url, WatchOptions(listen="none"), Canary(url, timeout=60))  # asks least rounds


def texts(watched: Watch, kind: str) -> list[str]:
    return [e["text"] for e in watched.events if e["kind"] == kind]


def test_restarts_are_survived_and_another_model_at_night_is_found(port: int) -> None:
    watched = watch(port)
    with served(port):
        rounds = [watched.step() for _ in range(14)]
        assert {r.state for r in rounds} <= {State.OK, State.BUSY} and not watched.alarms
        assert not watched.learning and all(r.token_bits for r in rounds)
    # It is gone, and comes back as it was: the baseline stands, and nothing is learnt anew.
    assert [watched.step().state for _ in range(2)] == [State.DOWN] * 2 and set(watched.alarms) == {
        "down"
    }
    learnt = dict(watched.changes.numbers.base) if watched.changes else {}
    with served(port):
        for _ in range(3):
            assert watched.step().state in (State.OK, State.BUSY)
        assert not watched.alarms and watched.changes is not None
        assert learnt.items() <= watched.changes.numbers.base.items()
        # The watch itself is restarted, and goes on where it was.
        watched.canary.close()
        watched = watch(port)
        assert watched.step().state in (State.OK, State.BUSY) and not watched.alarms
    # At night somebody restarts it with another RoPE base under the same name.
    with served(port, "--rope-freq-base", "3000"):
        for _ in range(40):
            watched.step()
            if watched.alarms:
                break
        assert {name.partition(".")[0] for name in watched.alarms} <= {
            "bits_per_token",
            "first_tokens",
            "tool_call",
        }
        assert watched.alarms and report_of(watched).exit_code == 1
    watched.canary.close()


def test_another_name_behind_the_address_is_told_at_once(port: int) -> None:
    watched = watch(port)
    with served(port):
        assert watched.step().state in (State.OK, State.BUSY)
    assert watched.step().state is State.DOWN
    with served(port, alias="night"):
        watched.step()
        assert "it lists night, and day no longer" in watched.alarms["model"]["why"]
    watched.canary.close()


def test_a_process_that_sleeps_is_broken_and_wakes_up(port: int) -> None:
    watched = watch(port)
    with served(port) as server:
        assert watched.step().state in (State.OK, State.BUSY)
        impatient(watched)
        os.killpg(server.pid, signal.SIGSTOP)
        try:
            states = [watched.step().state for _ in range(2)]
        finally:
            os.killpg(server.pid, signal.SIGCONT)
        assert states == [State.BROKEN] * 2 and "hangs" in watched.alarms["broken"]["why"]
        watched.canary.close()
        for _ in range(5):
            if watched.step().state is State.OK:
                break
        assert not watched.alarms
    watched.canary.close()
