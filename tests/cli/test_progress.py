from __future__ import annotations

import io
import re
import threading
import time

import pytest

from assay.cli import progress as module
from assay.cli.progress import progress


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_piped_progress_is_a_few_plain_lines(clock):
    stream = io.StringIO()
    with progress(100, "probes", file=stream) as bar:
        for _ in range(100):
            clock[0] += 3
            bar.advance()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "probes …"
    assert lines[1] == "probes: 10 of 100, about 4 min 30 s left"
    assert lines[-1] == "probes: 100 of 100 in 300 s"
    assert len(lines) == 11
    assert "\x1b" not in stream.getvalue()


def test_quick_work_says_two_lines(clock):
    stream = io.StringIO()
    with progress(1000, "files", file=stream) as bar:
        for _ in range(1000):
            bar.advance()
    assert stream.getvalue().splitlines() == ["files …", "files: 1000 of 1000 in 0 s"]


def test_work_of_unknown_size_is_counted(clock):
    stream = io.StringIO()
    with progress(None, "bytes", file=stream) as bar:
        for _ in range(3):
            clock[0] += 10
            bar.advance(5)
        bar.update(description="megabytes", total=20)
        bar.note("halfway\x1b[2J")
    assert stream.getvalue().splitlines() == [
        "bytes …",
        "bytes: 5",
        "bytes: 10",
        "bytes: 15",
        "halfway⟨ESC⟩[2J",
        "megabytes: 15 of 20 in 30 s",
    ]


def test_steps_that_an_earlier_run_kept_say_nothing_of_the_speed(clock):
    stream = io.StringIO()
    with progress(100, "probes", file=stream) as bar:
        for step in range(60):
            clock[0] += 0.001 if step < 50 else 2
            bar.advance()
    # Fifty were read in a moment; ten took two seconds each.
    assert stream.getvalue().splitlines()[1:-1] == ["probes: 55 of 100, about 90 s left"]


def test_work_that_runs_over_its_size_promises_nothing(clock):
    speed = module.Speed(0.0)
    speed.learn(3, 30.0)
    assert (speed.seconds(9), speed.seconds(2), speed.seconds(None)) == (60.0, None, None)
    assert module.Speed(0.0).seconds(5) is None


def test_quiet_progress_is_silent():
    stream = io.StringIO()
    with progress(3, "probes", quiet=True, file=stream) as bar:
        bar.advance()
        bar.update(description="x", total=9)
        bar.note("x")
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    with progress(2, "probes [bold]", file=stream) as bar:
        bar.advance()
        bar.note("a note")
        bar.advance()
    text = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "probes [bold]" in text and "2/2" in text and "a note" in text
    # Last of all the cursor is shown again and the bar's line is erased.
    assert stream.getvalue().rindex("\x1b[2K") > stream.getvalue().rindex("2/2")
    assert stream.getvalue().count("\x1b[?25h") == stream.getvalue().count("\x1b[?25l")


def test_a_bar_tells_the_time_that_is_left(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    with progress(4, "probes", file=stream) as bar:
        time.sleep(0.05)
        bar.advance()
        bar.note("a note")
    assert "about 1 s left" in stream.getvalue()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with progress(2, "probes", file=stream):
        pass
    assert stream.getvalue().startswith("probes …\n")
    assert "\x1b" not in stream.getvalue()


def test_the_end_is_said_even_if_the_work_fails(clock):
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt), progress(4, "probes", file=stream) as bar:
        bar.advance()
        raise KeyboardInterrupt
    assert stream.getvalue().splitlines()[-1] == "probes: 1 of 4 in 0 s"


def test_a_log_that_went_away_does_not_stop_the_work():
    stream = io.StringIO()
    with progress(2, "probes", file=stream) as bar:
        stream.close()
        bar.advance()


def test_threads_lose_no_step():
    stream = io.StringIO()
    with progress(4000, "steps", file=stream) as bar:
        threads = [
            threading.Thread(target=lambda: [bar.advance() for _ in range(1000)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert "steps: 4000 of 4000" in stream.getvalue()
