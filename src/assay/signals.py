"""Any request to end a run is one KeyboardInterrupt of the main thread, and is remembered.

SIGINT, SIGTERM, SIGHUP and a reader of standard output that goes away all end a run as Ctrl-C does:
what was measured is kept and shown, and the exit code is 128 and the number of the signal. Shells,
`timeout` and service managers send one request as several signals at a time: those of one second
are one request. A later one is another KeyboardInterrupt, and ends the process at once while the
report is written.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import threading
import time
from collections.abc import Iterator
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a run."""
ONE_REQUEST = 1.0
"""Seconds in which further signals belong to the request that came before."""


class _Requests:
    """The requests of this process so far."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.count = 0
        self.latest = float("-inf")
        self.reader_gone = False
        self.writing = False

    def take(self, sign: int, frame: FrameType | None = None) -> None:
        """The handler of every signal that ends a run."""
        if self.reader_gone and sign == signal.SIGINT:
            sign, self.reader_gone = signal.SIGPIPE, False
        if self.writing and sign == signal.SIGPIPE:
            return
        before, self.latest = self.latest, time.monotonic()
        if self.latest - before < ONE_REQUEST:
            return
        self.count += 1
        if self.writing:
            if self.count > 1:
                os._exit(exit_code(sign))
            return  # the run is over: its report is written, under its own exit code
        self.first = self.first or signal.Signals(sign)
        raise KeyboardInterrupt


_requests = _Requests()


def listen() -> None:
    """Have every signal of `ENDING` end the run of this process; only from the main thread.

    SIGHUP stays ignored where it was, as `nohup` has it; SIGINT does not, since a shell ignores it
    for every program in the background.
    """
    for sign in ENDING:
        if sign != signal.SIGHUP or signal.getsignal(sign) is not signal.SIG_IGN:
            signal.signal(sign, _requests.take)
    _watch_reader(1)


def is_listening() -> bool:
    """Whether this is the main thread of a process whose signals end a run."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGTERM) == _requests.take


def received() -> signal.Signals | None:
    """The signal that asked this process to end first; None where there was none."""
    return _requests.first


def asked_again() -> bool:
    """Whether a second request came while the first was being answered."""
    return _requests.count > 1


def exit_code(sign: int | None = None) -> int:
    """Exit code of a run that a signal ended, by default that of `received`: 130 for Ctrl-C."""
    return 128 + int(sign or _requests.first or signal.SIGINT)


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """The report is written inside: the first request is not heard, one more ends the process."""
    before, _requests.writing = _requests.writing, True
    try:
        yield
    finally:
        _requests.writing = before


def finish() -> None:
    """The report is out: no request interrupts the end of the process."""
    _requests.writing = True


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Put the handlers back that a library replaces inside, such as Ray as it starts.

    A handler of the library that ends the process meanwhile is a request like any other. Nothing is
    done in another thread, where no handler can be set.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {sign: signal.getsignal(sign) for sign in ENDING}
    try:
        yield
    except SystemExit as ended:
        if before[signal.SIGTERM] != _requests.take:
            raise
        _requests.count += 1
        _requests.first = _requests.first or signal.SIGTERM
        raise KeyboardInterrupt from ended
    finally:
        for sign, handler in before.items():
            if handler is not None and signal.getsignal(sign) is not handler:
                signal.signal(sign, handler)


def _watch_reader(descriptor: int) -> None:
    """End the run when the reader of `descriptor`, a pipe or a socket, has gone."""
    try:
        kind = os.fstat(descriptor).st_mode
        if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
            return
        own = os.dup(descriptor)  # `--json` puts another file under the number
    except OSError:  # it is closed
        return
    main = threading.main_thread().ident

    def wait() -> None:
        reader = select.poll()
        reader.register(own, 0)  # an error alone: the other end is closed
        reader.poll()
        if main is not None:
            _requests.reader_gone = True
            signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=wait, name="assay-reader", daemon=True).start()
