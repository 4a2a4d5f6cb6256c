from __future__ import annotations

import itertools
import os
import random
import sys
import threading
from pathlib import Path

import pytest
import spec_lines as lines

from assay.errors import AssayError
from assay.speculation import read as halves
from assay.speculation import scan as scanner
from assay.speculation.sources import open_source

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the log is shared by two processes on Linux only"
)


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Share even small files, and count the processes that are started."""
    started: list[int] = []
    real = os.fork

    def fork() -> int:
        started.append(1)
        return real()

    monkeypatch.setattr(halves, "LARGE", 1 << 10)
    monkeypatch.setattr(halves, "_can_share", lambda: True)
    monkeypatch.setattr(os, "fork", fork)
    return started


def write(path: Path, rows: int, every: int, seed: int = 0) -> Path:
    rng = random.Random(seed)
    with path.open("w") as out:
        for i in range(rows):
            if i % every == every // 2:
                out.write(lines.vllm_engine(i % 3) + "\n")
                out.write(lines.vllm_v1([rng.randrange(50, 90), rng.randrange(50)], 90) + "\n")
            else:
                out.write(f"INFO:     10.0.0.{rng.randrange(99)} success {'x' * rng.randrange(60)}\n")
    return path


@pytest.mark.parametrize("every", [14, 30, 97, 400])
def test_both_parts_together_are_the_whole(tmp_path: Path, forks: list[int], every: int) -> None:
    log = write(tmp_path / "s.log", 9000, every, every)
    whole = list(scanner.interesting_lines(open_source(str(log))))
    source = open_source(str(log))
    assert list(halves.interesting_lines(source)) == whole
    assert forks == [1]
    assert source.size == log.stat().st_size


def test_a_log_without_a_quiet_place_is_read_by_one(tmp_path: Path, forks: list[int]) -> None:
    log = write(tmp_path / "s.log", 3000, 5)
    found = list(halves.interesting_lines(open_source(str(log))))
    assert found == list(scanner.interesting_lines(open_source(str(log)))) and forks == []


def test_utf_16_is_read_by_one(tmp_path: Path, forks: list[int]) -> None:
    log = write(tmp_path / "s.log", 3000, 97)
    wide = tmp_path / "wide.log"
    wide.write_text(log.read_text(), encoding="utf-16")
    found = list(halves.interesting_lines(open_source(str(wide))))
    assert found == list(scanner.interesting_lines(open_source(str(log)))) and forks == []


def test_lines_that_nobody_wants_any_more_end_the_other_process(tmp_path: Path, forks: list[int]) -> None:
    log = write(tmp_path / "s.log", 9000, 97)
    before = children()
    found = halves.interesting_lines(open_source(str(log)))
    assert len(list(itertools.islice(found, 3))) == 3
    assert len(children() - before) == 1
    found.close()
    assert children() == before


def children() -> set[str]:
    """Processes that this thread has started: other tests may keep servers."""
    return set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())


def test_a_part_that_cannot_be_read_is_not_left_out(
    tmp_path: Path, forks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = write(tmp_path / "s.log", 9000, 97)
    home, real = os.getpid(), os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if os.getpid() != home:
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(AssayError, match="could not be read to its end"):
        list(halves.interesting_lines(open_source(str(log))))
