"""Ctrl-C and SIGTERM while a real model is scored: what there is is shown, and the same
command goes on from there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest

pytestmark = pytest.mark.engine

Stop = Callable[[Path], bool]


class Run(NamedTuple):
    process: subprocess.Popen[str]
    out: IO[str]
    err: IO[str]

    def said(self) -> str:
        """Exit code, report and standard error, for the message of a test that fails."""
        self.out.seek(0), self.err.seek(0)
        return (
            f"exit code {self.process.poll()}\n{self.out.read()[:4000]}\n{self.err.read()[-4000:]}"
        )

    def report(self) -> dict[str, Any]:
        self.out.seek(0)
        return json.loads(self.out.read())  # type: ignore[no-any-return]


LIMIT = 240
"""Seconds in which a busy machine comes to the point that a test waits for."""


@contextmanager
def started(cache: Path, *words: str, threads: int = 0) -> Iterator[Run]:
    settings = {**os.environ, "ASSAY_CACHE": str(cache), "OMP_WAIT_POLICY": "PASSIVE"}
    settings |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        command = [sys.executable, "-m", "assay", *words, "--json"]
        process = subprocess.Popen(command, env=settings, stdout=out, stderr=err, text=True)
        try:
            yield Run(process, out, err)
        finally:
            process.kill()
            process.wait()


def interrupted(
    cache: Path, stop: Stop, sign: signal.Signals, *words: str, threads: int = 0
) -> dict[str, Any]:
    """The report of a run that gets a signal as soon as `stop` says so of its cache."""
    with started(cache, *words, threads=threads) as run:
        until = time.monotonic() + LIMIT
        while not stop(cache):
            assert run.process.poll() is None, (
                f"it ended before it could be interrupted: {run.said()}"
            )
            assert time.monotonic() < until, f"it never came to that point: {run.said()}"
            time.sleep(0.02)
        run.process.send_signal(sign)
        assert run.process.wait(LIMIT) == 128 + sign, run.said()
        body = run.report()
    assert body["exit_code"] == 128 + sign and body["verdict"] == "inconclusive"
    # It goes on with as many threads, or what is kept under that number would not fit.
    assert kept(cache, "threads")
    return body


def whole(cache: Path, *words: str) -> dict[str, Any]:
    """The report of a run that comes to its end."""
    with started(cache, *words) as run:
        assert run.process.wait(LIMIT) in (0, 1, 3), run.said()
        return run.report()


def kept(cache: Path, folder: str = "") -> dict[str, int]:
    """Every file of a folder of the cache with its number in the file system, which is another once
    it is written anew.
    """
    files = (p for p in (cache / folder).rglob("*") if p.is_file() and not p.name.startswith("."))
    return {str(p): p.stat().st_ino for p in files}


def ids(body: dict[str, Any]) -> set[str]:
    return {finding["id"] for finding in body["findings"]}


def test_compare_while_it_scores_its_reference(tiny_llama: Path, tmp_path: Path) -> None:
    words = (
        "compare",
        str(tiny_llama),
        f"hf:{tiny_llama}?dtype=float32",
        "--windows",
        "600",
        "--length",
        "1024",
    )

    def stored(cache: Path, count: int) -> bool:
        manifest = next(cache.glob("compare/*/reference/manifest.json"), None)
        return manifest is not None and len(json.loads(manifest.read_text())["windows"]) >= count

    # Another load leaves another number of threads free; what is kept fits all the same.
    body = interrupted(tmp_path, lambda cache: stored(cache, 4), signal.SIGTERM, *words, threads=2)
    scored = body["results"]["scored"]
    assert scored["of"] == 600 and 4 <= scored["reference"] < 600
    assert body["results"]["candidates"] == [] and ids(body) == {"fidelity.interrupted"}
    assert f"{scored['reference']} of 600 passages are kept" in body["findings"][0]["title"]
    before = kept(tmp_path, "compare")
    more = scored["reference"] + 4
    again = interrupted(
        tmp_path, lambda cache: stored(cache, more), signal.SIGTERM, *words, threads=1
    )
    assert again["results"]["scored"]["reference"] >= more
    after = kept(tmp_path, "compare")
    states = {path: number for path, number in before.items() if "states" in path}
    assert len(states) >= 4 and states.items() <= after.items()  # not one of them was scored again


def test_compare_while_it_scores_its_candidate(tiny_llama: Path, tmp_path: Path) -> None:
    coarse = f"hf:{tiny_llama}?weights=int(bits=8)"
    words = (
        "compare",
        str(tiny_llama),
        coarse,
        "--windows",
        "64",
        "--length",
        "128",
        "--batch",
        "4",
        "--no-floors",
    )
    body = interrupted(
        tmp_path, lambda cache: len(kept(cache, "compare")) > 70 + 4, signal.SIGINT, *words
    )
    assert "fidelity.interrupted" in ids(body)
    (candidate,) = body["results"]["candidates"]
    assert 12 <= candidate["windows"] < 64 and candidate["kld"]["lo"] is not None
    before = {p: n for p, n in kept(tmp_path, "compare").items() if "candidate-00" in p}
    again = interrupted(
        tmp_path,
        lambda cache: len(kept(cache, "compare")) > 72 + len(before),
        signal.SIGINT,
        *words,
    )
    assert again["results"]["windows"] > candidate["windows"]
    assert before.items() <= kept(tmp_path, "compare").items()


def test_gap_shows_what_it_has_and_goes_on(tiny_llama: Path, tmp_path: Path) -> None:
    words = (
        "gap",
        str(tiny_llama),
        f"hf:{tiny_llama}?weights=int(bits=8)",
        "--codec",
        "fp8",
        "--phases",
        "2",
        "--windows",
        "8",
        "--fresh",
        "0",
        "--length",
        "128",
    )
    body = interrupted(
        tmp_path, lambda cache: len(kept(cache, "measured")) >= 4, signal.SIGTERM, *words
    )
    assert "gap.interrupted" in ids(body)
    # At least a run of its own, or the first windows of one, each with an interval.
    assert all(
        row["kl"]["lo"] <= row["kl"]["value"] for row in body["results"]["measured"].values()
    )
    assert body["results"]["measured"]
    before = kept(tmp_path, "measured")
    done = whole(tmp_path, *words)
    assert [b["name"] for b in done["results"]["buckets"]] == [
        "engine",
        "codec",
        "interaction",
        "harness",
    ]
    after = kept(tmp_path, "measured")
    # What is told of a run is written again with every piece of it; what was scored is not.
    scored = {
        path: number
        for path, number in before.items()
        if Path(path).read_bytes().startswith(b'{"format": "assay-kept/1", "kind": "arrays"')
    }
    assert scored and scored.items() <= after.items()


@pytest.mark.slow
def test_sweep_in_its_second_row(tiny_llama: Path, tmp_path: Path) -> None:
    words = (
        "kv", "sweep", str(tiny_llama), "--codec", "fp8", "--codec", "int(bits=4,group=16)",
        "--windows", "24", "--length", "256", "--batch", "4",
    )  # fmt: skip
    first = 6 + 1  # batches of the first row, and what took part in it
    body = interrupted(
        tmp_path, lambda cache: len(kept(cache, "measured")) >= first + 2, signal.SIGINT, *words
    )
    whole_row, cut = body["results"]["rows"]
    assert (whole_row["codec"], whole_row["windows"]) == (
        "fp8",
        24,
    ) and "interrupted" not in whole_row
    assert cut["interrupted"] and 4 <= cut["windows"] < 24
    assert "kv.interrupted" in ids(body)
    before = kept(tmp_path)
    done = whole(tmp_path, *words)
    assert [row["windows"] for row in done["results"]["rows"]] == [24, 24]
    assert done["results"]["rows"][0]["kld"] == whole_row["kld"]
    states = {path: number for path, number in before.items() if "/states/" in path}
    assert states and states.items() <= kept(tmp_path).items()


def test_reference_says_what_is_stored_and_goes_on(tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "stored"
    words = ("reference", str(tiny_llama), "--windows", "600", "--length", "512", "--no-floors")

    def stored(cache: Path) -> bool:
        manifest = out / "manifest.json"
        return manifest.exists() and len(json.loads(manifest.read_text())["windows"]) >= 4

    with started(tmp_path, *words, "--out", str(out)) as run:
        until = time.monotonic() + LIMIT
        while not stored(tmp_path):
            assert run.process.poll() is None and time.monotonic() < until, run.said()
            time.sleep(0.02)
        run.process.send_signal(signal.SIGHUP)
        assert run.process.wait(LIMIT) == 129, run.said()
        body = run.report()
    assert ids(body) == {"fidelity.interrupted"}
    assert 4 <= body["results"]["stored"] < body["results"]["windows"]
    assert "goes on from there" in body["findings"][0]["title"]
