"""Requests to end: what a library does to the handlers is undone, and repeats are one request."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from assay import signals


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[signals._Requests]:
    before = {sign: signal.getsignal(sign) for sign in signals.ENDING}
    requests = signals._Requests()
    monkeypatch.setattr(signals, "_requests", requests)
    monkeypatch.setattr(signals, "_watch_reader", lambda descriptor: None)
    signals.listen()
    yield requests
    for sign, handler in before.items():
        signal.signal(sign, handler)


@pytest.mark.parametrize("sign", signals.ENDING)
def test_each_is_an_interrupt_of_its_own_exit_code(
    sign: signal.Signals, listening: signals._Requests
) -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(sign)
    assert signals.received() == sign
    assert signals.exit_code() == 128 + sign
    assert not signals.asked_again()


def test_what_comes_within_a_second_is_the_same_request(listening: signals._Requests) -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGHUP)
    assert signals.exit_code() == 143 and not signals.asked_again()
    listening.latest -= 2 * signals.ONE_REQUEST  # a while later
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signals.asked_again() and signals.exit_code() == 143


def test_a_report_is_written_to_its_end(listening: signals._Requests) -> None:
    with signals.writing():
        signal.raise_signal(signal.SIGTERM)
    assert signals.received() is None
    listening.latest -= 2 * signals.ONE_REQUEST
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


def test_a_second_request_ends_a_report_that_hangs() -> None:
    code = """
import signal, time
from assay import signals
signals.listen()
with signals.writing():
    signal.raise_signal(signal.SIGTERM)
    time.sleep(1.2)
    signal.raise_signal(signal.SIGTERM)
print("not reached")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (143, b"")


def test_handlers_of_a_library_are_replaced_again(listening: signals._Requests) -> None:
    with signals.handlers_kept():
        signal.signal(signal.SIGTERM, lambda sign, frame: sys.exit(sign))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) == listening.take


def test_a_library_that_exits_by_its_handler_is_interrupted(listening: signals._Requests) -> None:
    with pytest.raises(KeyboardInterrupt), signals.handlers_kept():
        signal.signal(signal.SIGTERM, lambda sign, frame: sys.exit(sign))
        signal.raise_signal(signal.SIGTERM)
    assert signals.exit_code() == 143


def test_handlers_of_a_user_of_the_library_are_theirs() -> None:
    def own(sign: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, own)
    try:
        with pytest.raises(SystemExit), signals.handlers_kept():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            sys.exit(3)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
