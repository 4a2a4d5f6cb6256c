"""The hard end of a budget: what stalls is cut off on the command line, and nowhere else."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from assay import deadline, signals
from assay.deadline import limit, settled
from assay.verdict import Finding, Report, Severity, Verdict


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = {sign: signal.getsignal(sign) for sign in (*signals.ENDING, signal.SIGALRM)}
    monkeypatch.setattr(signals, "_requests", signals._Requests())
    monkeypatch.setattr(signals, "_watch_reader", lambda descriptor: None)
    monkeypatch.setattr(deadline._State, "ran_out", False)
    signals.listen()
    others, _ = signal.setitimer(signal.ITIMER_REAL, 0.0)  # of who limits the time of tests
    yield
    assert signal.setitimer(signal.ITIMER_REAL, others)[0] == 0.0
    for sign, handler in before.items():
        signal.signal(sign, handler)


def cut() -> Report:
    finding = Finding("kv.interrupted", Severity.INFO, "interrupted: what was scored is kept")
    return Report("kv eval", Verdict.INCONCLUSIVE, findings=(finding,), interrupted=True)


def test_what_stalls_is_cut_off_and_nobody_interrupted_it(listening: None) -> None:
    with pytest.raises(KeyboardInterrupt), limit(0.05):
        time.sleep(60)
    report = settled(cut())
    assert (report.interrupted, report.exit_code) == (False, 3)
    assert [finding.id for finding in report.findings] == ["kv.out_of_time"]
    assert settled(cut()).interrupted  # the next run has its own time


def test_a_request_to_end_stays_one(listening: None) -> None:
    with pytest.raises(KeyboardInterrupt), limit(60):
        signal.raise_signal(signal.SIGTERM)
    assert settled(cut()).interrupted


def test_what_ends_in_time_is_left_alone(listening: None) -> None:
    with limit(0.05):
        pass
    time.sleep(0.1)
    assert settled(cut()).interrupted


def test_of_two_limits_the_sooner_counts(listening: None) -> None:
    with pytest.raises(KeyboardInterrupt), limit(0.05), limit(60):
        time.sleep(60)
    with limit(60):
        with pytest.raises(KeyboardInterrupt), limit(0.05):
            time.sleep(60)
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 50 < left <= 60


def test_a_budget_that_is_spent_already_measures_nothing(listening: None) -> None:
    with pytest.raises(KeyboardInterrupt), limit(-3):
        time.sleep(60)


def test_a_library_keeps_its_signals() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with limit(0.01):
        time.sleep(0.05)
    assert signal.getsignal(signal.SIGALRM) is before
