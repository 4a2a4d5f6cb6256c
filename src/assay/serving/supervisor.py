"""A process between the doctor and a server: when the doctor ends, however it ends, everything
under it ends too.

It is run by its path with the standard library alone. Orphans of the server become its children
(PR_SET_CHILD_SUBREAPER), so that also a worker that left the process group is found. It ends the
server when its standard input closes.

A worker of Ray that ends kills its own children with SIGKILL, after which nothing would end what
the server started: with ASSAY_SUPERVISOR_APART a process between the two is that child, and its
end is the supervisor's request to end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE = 3.0
"""Seconds between the request to end and the end: a server whose answers are not read any more may
wait for its clients.
"""
_PDEATHSIG, _SUBREAPER = 1, 36


def _in_child() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _prctl(_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def descendants() -> list[int]:
    """Process ids of everything below this process."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except (OSError, UnicodeDecodeError):
                continue
            if fields and fields[0] != "Z":
                parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found, todo = [], [os.getpid()]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def _reap() -> int | None:
    """Take the status of every child that ended; that of the server, if it is among them."""
    status = None
    while True:
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == SERVER:
            status = os.waitstatus_to_exitcode(code)


def end_all(grace: float = GRACE) -> None:
    """End every process below this one: ask, then kill."""
    begun = time.monotonic()
    asked: set[int] = set()
    while left := descendants():
        late = time.monotonic() - begun > grace
        for pid in left:
            if late or pid not in asked:
                asked.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        _reap()
        time.sleep(0.05)
    _reap()


SERVER = 0


def main() -> int:
    """`supervisor.py LOG COMMAND…`: run the command; says `started PID`, `ended STATUS` and `gone`
    on standard output.
    """
    global SERVER
    log, command = sys.argv[1], sys.argv[2:]
    if os.environ.pop("ASSAY_SUPERVISOR_APART", "") and (between := os.fork()):
        return os.waitstatus_to_exitcode(os.waitpid(between, 0)[1])
    doctor = os.getppid()
    for sign in (signal.SIGINT, signal.SIGHUP):
        signal.signal(sign, signal.SIG_IGN)
    ending = []
    signal.signal(signal.SIGTERM, lambda number, frame: ending.append(number))
    _prctl(_SUBREAPER, 1)
    _prctl(_PDEATHSIG, signal.SIGTERM)
    try:
        with open(log, "wb") as out:  # noqa: PTH123
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_in_child,
            )
    except OSError as error:
        print(f"failed {error.strerror}: {command[0]}", flush=True)
        return 1
    SERVER = server.pid
    _say(f"started {server.pid}")
    told = False
    while not ending and os.getppid() == doctor:
        readable, _, _ = select.select([0], [], [], 0.1)
        if readable and not os.read(0, 1024):
            break
        if not told and (status := _reap()) is not None:
            told = True
            _say(f"ended {status}")
    end_all()
    _say("gone")
    return 0


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # the doctor is gone
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
