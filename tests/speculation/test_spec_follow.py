from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import spec_lines as lines

from assay.errors import AssayError
from assay.speculation import growing as module
from assay.speculation.follow import follow
from assay.speculation.options import SpecOptions
from assay.speculation.spec import examine, judge_run
from assay.verdict import Report


def followed(
    path: Path, *steps: Callable[[], None], interrupt: bool = False
) -> tuple[Report, list[str]]:
    """Follow `path` while `steps` happen, one at each look that finds nothing new."""
    left = list(steps)
    time = [0.0]
    said: list[str] = []

    def sleep(seconds: float) -> None:
        time[0] += 1.0
        if left:
            left.pop(0)()
        elif interrupt:
            raise KeyboardInterrupt
        else:
            time[0] = 1e9

    report = report_of(str(path), seconds=1e6, say=said.append, sleep=sleep, clock=lambda: time[0])
    return report, said


def report_of(name: str, **options: Any) -> Report:
    run, interrupted = follow(name, SpecOptions(), **options)
    return replace(judge_run(run, [name], SpecOptions()), interrupted=interrupted)


def append(path: Path, text: str) -> Callable[[], None]:
    def step() -> None:
        with path.open("a") as out:
            out.write(text)

    return step


def test_new_lines_are_read_as_they_come(tmp_path: Path) -> None:
    log = tmp_path / "s.log"
    log.write_text(lines.vllm_v1([80, 60], 100) + "\n")
    line = lines.vllm_v1([70, 50], 100)
    report, said = followed(
        log, append(log, "noise\n"), append(log, line[:90]), append(log, line[90:] + "\n")
    )
    assert report.results["record"]["drafts"] == 200
    assert len(said) == 1 and "healthy" in said[0], "half a line is not a line"


def test_an_empty_log_may_be_followed(tmp_path: Path) -> None:
    log = tmp_path / "s.log"
    log.touch()
    report, _ = followed(log, append(log, lines.vllm_v1([80, 60], 100) + "\n"))
    assert report.results["health"] == "healthy"


def test_rotation(tmp_path: Path) -> None:
    log = tmp_path / "s.log"
    log.write_text(lines.vllm_v1([80, 60], 100) + "\n")

    def rotate() -> None:
        append(log, lines.vllm_v1([70, 60], 100) + "\n")()
        log.rename(tmp_path / "s.log.1")
        log.write_text(lines.vllm_v1([60, 60], 100) + "\n")

    report, _ = followed(log, rotate)
    assert report.results["record"]["drafts"] == 300


def test_truncation(tmp_path: Path) -> None:
    log = tmp_path / "s.log"
    log.write_text((lines.vllm_v1([80, 60], 100) + "\n") * 3)

    def truncate() -> None:
        log.write_text(lines.vllm_v1([9, 9], 10) + "\n")

    report, _ = followed(log, truncate)
    assert report.results["record"]["drafts"] == 310


def test_an_interrupt_still_reports(tmp_path: Path) -> None:
    log = tmp_path / "s.log"
    log.write_text(lines.vllm_v1([80, 60], 100) + "\n")
    report, _ = followed(log, interrupt=True)
    assert report.exit_code == 130
    assert report.results["record"]["drafts"] == 100


def test_standard_input_ends_the_following(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (lines.vllm_v1([80, 60], 100) + "\n" + lines.vllm_v1([70, 60], 100)).encode()
    batches = [text[:300].splitlines()[:1], text.splitlines()[1:]]
    monkeypatch.setattr(module, "_standard_input", lambda *_: iter(batches))
    report = report_of("-", say=lambda _: None)
    assert report.results["record"]["drafts"] == 200


def test_what_cannot_be_followed(tmp_path: Path) -> None:
    for name in ("http://127.0.0.1:9", str(tmp_path / "none.log")):
        with pytest.raises(AssayError):
            examine([name], SpecOptions(follow=True, seconds=0.1))


def test_the_same_health_is_not_told_at_every_line(tmp_path: Path) -> None:
    log = tmp_path / "s.log"
    log.touch()
    good, dead = lines.vllm_v1([80, 60], 100) + "\n", lines.vllm_v1([0, 0], 100) + "\n"
    _, said = followed(log, *[append(log, good)] * 8, *[append(log, dead)] * 9)
    # The good windows within ten seconds are told once; the change is told at once.
    assert [s.split()[2].rstrip(":") for s in said][:2] == ["healthy", "degraded"]
    assert len(said) <= 4


def test_following_standard_input_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, (lines.vllm_v1([80, 60], 100) + "\n").encode())
    with os.fdopen(read_end) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        # Nothing more comes, and the other end stays open.
        report = report_of("-", seconds=0.2, say=lambda _: None)
    os.close(write_end)
    assert report.results["record"]["drafts"] == 100
