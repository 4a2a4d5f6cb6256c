"""Python that a model wrote, run where it can do no harm.

`sandbox_child` confines itself before it runs the code: Landlock, seccomp, namespaces, limits.
Where the kernel lacks one of these the code is not run, unless that is accepted.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

from assay.coherence.record import AnswerCheck
from assay.coherence.sandbox_child import OUTPUT_BYTES
from assay.errors import AssayError

TIMEOUT_S = 5.0
_CHILD = Path(__file__).with_name("sandbox_child.py")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
_FILES = ("/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
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


class SandboxIncomplete(AssayError):
    """The kernel, or what runs this process, lacks a part of the sandbox."""

    def __init__(self, missing: list[str]) -> None:
        super().__init__(
            f"--run-code needs a sandbox, and this machine lacks {', '.join(missing)}",
            finding_id="coherence.sandbox",
            remedy=(
                "leave --run-code out, run assay outside of the container, install bubblewrap, or"
                " insist with --run-code=unsafe"
            ),
            evidence={"missing": missing},
        )


def require_sandbox() -> None:
    """Raise `SandboxIncomplete` unless code can be run safely here."""
    run_python("", "")


def run_fibonacci(source: str, *, unsafe: bool = False) -> AnswerCheck:
    """Whether `source` defines a function that returns Fibonacci numbers."""
    status, output = run_python(_HARNESS, source, unsafe=unsafe)
    # Status 0 alone would let code pass that ends the process before its values are compared.
    passed = status == 0 and output == "right"
    return AnswerCheck(
        "code_runs", passed, "" if passed else output or f"ended with status {status}"
    )


def run_python(
    program: str, stdin: str, timeout: float = TIMEOUT_S, *, unsafe: bool = False
) -> tuple[int, str]:
    """Run `program` in the sandbox with `stdin`.

    Args:
        program: Source of Python.
        stdin: What the program reads.
        timeout: Seconds after which it is killed.
        unsafe: Run it also where the sandbox is incomplete, with the parts that are there.

    Returns:
        The exit status and the last line that was printed. A program that runs into a limit has a
        status other than 0 and a line that says which.

    Raises:
        SandboxIncomplete: A part of the sandbox is missing and `unsafe` is not set.
    """
    prefix: tuple[str, ...] = ()
    while True:
        missing, status, output = _run(program, stdin, timeout, unsafe, prefix)
        if not missing or unsafe:
            return status, output
        if prefix or not (prefix := _bubblewrap()):
            raise SandboxIncomplete(missing)


def _run(
    program: str, stdin: str, timeout: float, unsafe: bool, prefix: tuple[str, ...]
) -> tuple[list[str], int, str]:
    """What is missing, the exit status, and the last line."""
    # Output goes to a file of limited size: from a pipe, a flood would fill this process's memory.
    with (
        tempfile.TemporaryDirectory(prefix="assay-sandbox-") as folder,
        tempfile.TemporaryFile() as printed,
        tempfile.TemporaryFile() as report,
    ):
        mode = "unsafe" if unsafe else "safe"
        python = (sys.executable, "-I", "-S", "-B", str(_CHILD))
        parent = "0" if prefix else str(os.getpid())
        given = (program, json.dumps(_readable()), mode, str(report.fileno()), parent)
        process = subprocess.Popen(
            [*prefix, *python, *given],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={},
            start_new_session=True,
            pass_fds=(report.fileno(),),
        )
        try:
            process.communicate(stdin.encode("utf-8", "replace"), timeout=timeout)
        except subprocess.TimeoutExpired:
            return [], 1, f"no end after {timeout:g} s"
        finally:
            # What it started dies with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        report.seek(0)
        missing = json.loads(report.read() or b'["a sandbox that starts"]')
        printed.seek(0)
        output = printed.read(OUTPUT_BYTES)
    if len(output) == OUTPUT_BYTES:
        return missing, 1, f"printed {OUTPUT_BYTES >> 10} KiB or more"
    text = output.decode("utf-8", "replace").strip()
    if process.returncode < 0:
        return missing, 1, f"killed by {signal.Signals(-process.returncode).name}"
    return missing, process.returncode, text.splitlines()[-1][:200] if text else ""


@cache
def _readable() -> tuple[str, ...]:
    """Folders and files that Python itself needs to read."""
    own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    own |= {str(Path(path).resolve()) for path in own}
    return (*sorted(own), *_LIBRARIES, *_FILES)


def _bubblewrap() -> tuple[str, ...]:
    """The command of bubblewrap, which may make namespaces where a program may not; () without."""
    program = shutil.which("bwrap")
    if program is None:
        return ()
    return (
        program,
        "--unshare-user",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--die-with-parent",
        "--ro-bind",
        "/",
        "/",
        "--dev",
        "/dev",
        "--proc",
        "/proc",
        "--",
    )
