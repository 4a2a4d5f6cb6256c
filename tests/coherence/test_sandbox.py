from __future__ import annotations

from pathlib import Path

import pytest

from assay.coherence.sandbox import run_fibonacci, run_python

RIGHT = "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n"


@pytest.mark.parametrize(
    "source",
    [
        RIGHT,
        "def fib(n):\n    seq = [0, 1]\n    while len(seq) < n:\n        seq.append(seq[-1] + seq[-2])\n    return seq[:n]\n",
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
        ("def fibonacci(n):\n    while True: pass\n", "s"),
        ("def fibonacci(n):\n    return bytearray(1 << 40)\n", "MemoryError"),
        ("import os\nfor _ in range(99): os.fork()\n", "os.fork is not allowed"),
        ("import subprocess\nsubprocess.run(['ls'])\n", "not allowed"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 9))\n", "not allowed"),
        ("open('x', 'w').write('x')\n", ""),
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


def test_nothing_is_written(tmp_path: Path) -> None:
    target = tmp_path / "written"
    run_python(f"open({str(target)!r}, 'w').write('x' * 100)", "")
    assert not target.exists() or target.read_text() == ""


def test_an_endless_loop_ends_in_time() -> None:
    assert run_python("while True: pass", "", timeout=1.0) == (1, "no end after 1 s")


def test_a_flood_of_output_is_bounded() -> None:
    status, output = run_python("print('x' * 10_000_000)", "")
    assert status == 0
    assert len(output) <= 200
