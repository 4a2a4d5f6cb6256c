"""Python that a model wrote, run where it can do no harm."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile

from assay.coherence.record import AnswerCheck

TIMEOUT_S = 5.0
_MEMORY_BYTES = 512 << 20
_OUTPUT_BYTES = 1 << 16
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
# Limits hold no one off from deleting or emptying a file, and the one on processes does not hold
# for root. So the interpreter itself refuses to change anything of the system, to make a process,
# or to open a socket.
_GUARD = """
import os, sys
def _guard(event, arguments, refused=PermissionError,
           prefixes=("os.", "subprocess.", "socket.", "ctypes.", "shutil.", "resource."),
           harmless=("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.putenv", "os.unsetenv"),
           writing=os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & writing:
        raise refused("writing a file is not allowed here")
    if event.startswith(prefixes) and event not in harmless:
        raise refused(event + " is not allowed here")
sys.addaudithook(_guard)
del _guard, os
"""
# Calls the function that was defined and compares it with the real sequence, whichever of the two
# usual starts it has.
_HARNESS = """
import sys
source = sys.stdin.read()
space = {"__name__": "answer"}
try:
    exec(compile(source, "answer", "exec"), space)
except SystemExit:
    pass  # a script may end so; what it defined is there
named = space.get("fibonacci") or next(
    (v for k, v in space.items() if "fib" in k.lower() and callable(v)), None)
if named is None:
    print("no function with fib in its name"); sys.exit(1)
values = [named(n) for n in range(1, 9)]
good = ([1, 1, 2, 3, 5, 8, 13, 21], [0, 1, 1, 2, 3, 5, 8, 13], [1, 2, 3, 5, 8, 13, 21, 34])
lists = [v for v in values if isinstance(v, (list, tuple))]
if values in good or (lists and len(lists) == 8 and list(lists[-1])[-1] in (13, 21)):
    print("right"); sys.exit(0)
print("wrong values: " + repr(values)[:200]); sys.exit(1)
"""


def run_fibonacci(source: str) -> AnswerCheck:
    """Whether `source` defines a function that returns Fibonacci numbers."""
    status, output = run_python(_HARNESS, source)
    # Status 0 alone would let code pass that ends the process before its values are compared.
    passed = status == 0 and output == "right"
    return AnswerCheck(
        "code_runs", passed, "" if passed else output or f"ended with status {status}"
    )


def run_python(program: str, stdin: str, timeout: float = TIMEOUT_S) -> tuple[int, str]:
    """Run `program` in the sandbox with `stdin`; returns its exit status and the end of what it
    printed.

    A child that runs into a limit ends with a status other than 0 and a line that says which.
    """
    # Output goes to a file of limited size: from a pipe, a flood would fill this process's memory.
    with (
        tempfile.TemporaryDirectory(prefix="assay-sandbox-") as folder,
        tempfile.TemporaryFile() as printed,
    ):
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", _GUARD + program],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={},
            start_new_session=True,
            preexec_fn=_confine,
        )
        try:
            process.communicate(stdin.encode("utf-8", "replace"), timeout=timeout)
        except subprocess.TimeoutExpired:
            return 1, f"no end after {timeout:g} s"
        finally:
            # Whatever it started dies with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        output = printed.read(_OUTPUT_BYTES)
    if len(output) == _OUTPUT_BYTES:
        return 1, f"printed {_OUTPUT_BYTES >> 10} KiB or more"
    text = output.decode("utf-8", "replace").strip()
    if process.returncode < 0:
        return 1, f"killed by {signal.Signals(-process.returncode).name}"
    return process.returncode, text.splitlines()[-1][:200] if text else ""


def _confine() -> None:
    """Limits of the child, set between fork and exec."""
    import resource

    limits = {
        resource.RLIMIT_CPU: int(TIMEOUT_S) + 1,
        resource.RLIMIT_AS: _MEMORY_BYTES,
        resource.RLIMIT_FSIZE: _OUTPUT_BYTES,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
    }
    # A network namespace of its own needs a user namespace; where the kernel refuses both, no
    # network is the best effort that a missing DNS configuration and the empty environment make.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
