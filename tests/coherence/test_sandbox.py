from __future__ import annotations

from pathlib import Path

import pytest

from assay.coherence.sandbox import run_fibonacci, run_python

RIGHT = (
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n   "
    " return a\n"
)


@pytest.mark.parametrize(
    "source",
    [
        RIGHT,
        RIGHT + "print([fibonacci(n) for n in range(9)])\nimport sys\nsys.exit()\n",
        (
            "def fib(n):\n    seq = [0, 1]\n    while len(seq) < n:\n        seq.append(seq[-1] +"
            " seq[-2])\n    return seq[:n]\n"
        ),
    ],
)
def test_right_functions_pass(source: str) -> None:
    assert run_fibonacci(source).passed


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def fibonacci(n):\n    return n\n", "wrong values"),
        ("def other(n):\n    return n\n", "no function"),
        ("def fibonacci(n:\n", "SyntaxError"),
        ("def fibonacci(n):\n    return bytearray(1 << 40)\n", "MemoryError"),
        ("import os\nfor _ in range(99): os.fork()\n", "os.fork is not allowed"),
        ("import subprocess\nsubprocess.run(['ls'])\n", "not allowed"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 9))\n", "not allowed"),
        ("open('x', 'w').write('x')\n", "not allowed"),
        ("import sys; sys.exit(0)\n", "no function"),
        ("def fibonacci(n):\n    raise SystemExit\n", "status 0"),
        ("import os; os._exit(0)\n", "status 0"),
    ],
)
def test_wrong_and_hostile_code_fails_with_a_reason(source: str, says: str) -> None:
    check = run_fibonacci(source)
    assert not check.passed
    assert says in check.detail


def test_nothing_of_the_environment_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hidden")
    status, output = run_python("import os; print(sorted(os.environ))", "")
    assert status == 0
    assert "SECRET" not in output


@pytest.mark.parametrize(
    "program",
    [
        "open({path!r}, 'w')",
        "open({path!r}, 'a').write('x')",
        "open({path!r}, 'r+')",
        "import os; os.remove({path!r})",
        "import os; os.open({path!r}, os.O_WRONLY | os.O_TRUNC)",
        "import os; os.truncate({path!r}, 0)",
        "import os; os.rename({path!r}, {path!r} + '.old')",
        "import os; os.chmod({path!r}, 0)",
        "import shutil, os.path; shutil.rmtree(os.path.dirname({path!r}))",
        "import pathlib; pathlib.Path({path!r}).unlink()",
        "import pathlib; pathlib.Path({path!r} + '.new').mkdir()",
    ],
)
def test_files_stay_as_they_are(tmp_path: Path, program: str) -> None:
    kept = tmp_path / "folder" / "kept"
    kept.parent.mkdir()
    kept.write_text("as it was")
    mode = kept.stat().st_mode
    status, output = run_python(program.format(path=str(kept)), "")
    assert status != 0
    assert "not allowed here" in output
    assert (kept.read_text(), kept.stat().st_mode) == ("as it was", mode)
    assert [p.name for p in kept.parent.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    "program",
    [
        "import os, signal; os.kill(os.getppid(), signal.SIGTERM)",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "import socket; socket.getaddrinfo('localhost', 80)",
        "import ctypes; ctypes.CDLL(None)",
        "import multiprocessing as m; m.Process(target=print).start()",
    ],
)
def test_nothing_outside_is_reached(program: str) -> None:
    status, output = run_python(program, "")
    assert status != 0
    assert output


@pytest.mark.parametrize(
    "program",
    ["import math, re, random, collections, functools, typing; print(math.isqrt(49))", "print(7)"],
)
def test_plain_code_runs(program: str) -> None:
    assert run_python(program, "") == (0, "7")


def test_an_endless_loop_ends_in_time() -> None:
    assert run_python("while True: pass", "", timeout=1.0) == (1, "no end after 1 s")


@pytest.mark.parametrize(
    "program",
    [
        "print('x' * 10_000_000)",
        "while True: print('x' * 1000)",
        "import sys; sys.stderr.write('x' * 10**7)",
    ],
)
def test_a_flood_of_output_is_bounded(program: str) -> None:
    assert run_python(program, "") == (1, "printed 64 KiB or more")


def test_memory_is_limited() -> None:
    status, output = run_python("x = []\nwhile True: x.append(bytes(1 << 24))", "")
    assert status != 0
    assert "MemoryError" in output


@pytest.mark.parametrize("text", ["", "é " * 1000, "\x00", "\ud800"])
def test_any_text_may_be_the_source(text: str) -> None:
    check = run_fibonacci(text)
    assert not check.passed and check.detail
