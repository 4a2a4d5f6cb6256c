"""Costly things are built once, whole or not at all."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from assay.demo import build_once


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    return tmp_path


def test_built_once_and_found_again(cache: Path) -> None:
    calls = []

    def make(folder: Path) -> None:
        calls.append(folder)
        (folder / "weights").write_text("1")

    first = build_once("models/tiny", make)
    assert build_once("models/tiny", make) == first == cache / "models" / "tiny"
    assert len(calls) == 1
    assert (first / "weights").read_text() == "1"
    assert [path.name for path in first.parent.iterdir()] == ["tiny"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_was_interrupted_leaves_nothing_and_is_built_again(
    cache: Path, error: type[BaseException]
) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("1")
        raise error

    with pytest.raises(error):
        build_once("models/tiny", fail)
    assert not list((cache / "models").iterdir())
    build_once("models/tiny", lambda folder: (folder / "all").touch())
    assert (cache / "models" / "tiny" / "all").exists()


def _slow(folder: Path) -> None:
    with (folder.parent / "calls").open("a") as file:
        file.write("call\n")
    (folder / "weights").touch()  # a folder with nothing in it is no build
    time.sleep(0.3)


def _build(_: int) -> str:
    return str(build_once("models/tiny", _slow))


def test_two_processes_build_once(cache: Path) -> None:
    # Not forked: this process has threads by then, whose locks a fork may copy while they are held.
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        found = pool.map(_build, range(3), chunksize=1)
    assert set(found) == {str(cache / "models" / "tiny")}
    assert (cache / "models" / "calls").read_text() == "call\n"
