"""Hashing: the digests are those of sha256sum and git, a second run hashes only what changed, an
interrupt loses little.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.checkpoint.digests import (
    BLOCK,
    GRANULARITY_NS,
    MAX_GIT_BYTES,
    WORTH_BYTES,
    Digest,
    DigestCache,
    hash_bytes,
    hash_files,
    hash_stream,
)
from assay.checkpoint.local_files import wants_hash
from assay.checkpoint.options import AUTO_BYTES, VerifyOptions
from assay.checkpoint.trusted import Expected, Source
from checkpoint.asking import Ask, finding


def digests_of(
    paths: list[Path], cache: DigestCache, workers: int | None = None
) -> dict[str, Digest]:
    result: dict[str, Digest] = {}
    hash_files([(p.name, p, p.stat().st_size) for p in paths], cache, result, workers=workers)
    return result


def age(path: Path) -> None:
    """Wait until the file is old enough to be remembered."""
    time.sleep(max(0, path.stat().st_ctime_ns + 2 * GRANULARITY_NS - time.time_ns()) / 1e9)


@settings(max_examples=30, deadline=None)
@given(data=st.binary(max_size=3000))
def test_both_digests_are_those_of_git_and_sha256(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("d") / "f"
    path.write_bytes(data)
    counts: list[int] = []
    sha256, git = hash_stream(path, len(data), counts.append, threading.Event())
    assert sha256 == hashlib.sha256(data).hexdigest()
    assert git == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    assert hash_bytes(data) == Digest(sha256, git)
    assert sum(counts) == len(data)


def test_the_blob_id_is_the_one_that_git_computes(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(os.urandom(4096))
    done = subprocess.run(
        ["git", "hash-object", str(path)], capture_output=True, text=True, check=True
    )
    assert hash_stream(path, 4096, lambda n: None, threading.Event())[1] == done.stdout.strip()


def test_a_file_of_many_blocks_and_an_odd_end(tmp_path: Path) -> None:
    path = tmp_path / "f"
    data = os.urandom(3 * BLOCK + 17)
    path.write_bytes(data)
    found = digests_of([path], DigestCache(None))["f"]
    assert found.sha256 == hashlib.sha256(data).hexdigest()


def test_a_large_file_gets_no_blob_id(tmp_path: Path) -> None:
    path = tmp_path / "big"
    with path.open("wb") as stream:
        stream.truncate(MAX_GIT_BYTES + 1)
    assert hash_stream(path, MAX_GIT_BYTES + 1, lambda n: None, threading.Event())[1] == ""


def test_a_second_run_hashes_nothing_and_any_change_is_hashed_again(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    file.write_bytes(os.urandom(WORTH_BYTES))
    age(file)
    cache = DigestCache(tmp_path / "c" / "digests")
    first = digests_of([file], cache)[file.name]
    again = digests_of([file], cache)[file.name]
    assert (first.cached, again.cached) == (False, True)
    assert (first.sha256, first.git_sha1) == (again.sha256, again.git_sha1)
    cache = DigestCache(tmp_path / "c" / "digests")  # in another process
    assert digests_of([file], cache)[file.name].cached
    # The same size and, set back, the same modification time: only the change time tells.
    before = file.stat()
    file.write_bytes(os.urandom(WORTH_BYTES))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    age(file)
    changed = digests_of([file], cache)[file.name]
    assert not changed.cached
    assert changed.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_replaced_file_is_another_file(tmp_path: Path) -> None:
    file, other = tmp_path / "w", tmp_path / "other"
    file.write_bytes(bytes(WORTH_BYTES))
    other.write_bytes(b"\1" * WORTH_BYTES)
    stamp = file.stat().st_mtime_ns
    os.utime(other, ns=(stamp, stamp))
    age(other)
    cache = DigestCache(tmp_path / "digests")
    digests_of([file], cache)
    other.replace(file)
    assert not digests_of([file], cache)["w"].cached


def test_a_file_written_this_moment_is_not_remembered(tmp_path: Path) -> None:
    file = tmp_path / "w"
    cache = DigestCache(tmp_path / "digests")
    file.write_bytes(bytes(WORTH_BYTES))
    digests_of([file], cache)
    assert not digests_of([file], cache)["w"].cached


@pytest.mark.parametrize("damage", ["garbage", "folder", "read-only parent"])
def test_a_cache_that_cannot_be_kept_costs_time_only(tmp_path: Path, damage: str) -> None:
    place = tmp_path / "digests"
    if damage == "garbage":
        place.write_bytes(b"not a database" * 100)
    elif damage == "folder":
        place.mkdir()
    else:
        place = Path("/proc/nowhere/digests")
    file = tmp_path / "w"
    file.write_bytes(bytes(WORTH_BYTES))
    age(file)
    cache = DigestCache(place)
    assert digests_of([file], cache)["w"].sha256 == hashlib.sha256(bytes(WORTH_BYTES)).hexdigest()
    assert digests_of([file], cache)["w"].sha256 is not None


def test_a_file_that_goes_away_is_a_problem_not_an_exception(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.write_bytes(b"x")
    result: dict[str, Digest] = {}
    hash_files([("here", here, 1), ("gone", tmp_path / "gone", 1)], DigestCache(None), result)
    assert result["here"].sha256
    assert result["gone"].problem == "No such file or directory"


def test_a_file_that_grows_meanwhile_gets_no_digest(tmp_path: Path) -> None:
    file = tmp_path / "w"
    file.write_bytes(bytes(4 * BLOCK))

    def grow(count: int) -> None:
        with file.open("ab") as stream:
            stream.write(b"x")

    result: dict[str, Digest] = {}
    # It is read until its end, so the first block alone must not keep it growing for ever.
    grown = iter([grow])
    hash_files(
        [("w", file, 4 * BLOCK)],
        DigestCache(None),
        result,
        lambda n: next(grown, lambda c: None)(n),
    )
    assert result["w"].problem == "it changed while it was being read"


def test_several_threads_hash_the_same_as_one(tmp_path: Path) -> None:
    paths = [tmp_path / f"f{i}" for i in range(20)]
    for i, path in enumerate(paths):
        path.write_bytes(os.urandom(1000 * i))
    assert digests_of(paths, DigestCache(None), 8) == digests_of(paths, DigestCache(None), 1)


# Which files are hashed.

VOUCHED = [Source("the Hub", {"a": Expected("the Hub", sha256="0" * 64, size=10)}, complete=True)]


@pytest.mark.parametrize(
    ("hashing", "name", "size", "total", "wanted"),
    [
        ("auto", "a", 10, 100, True),
        ("auto", "b", 10, AUTO_BYTES, True),
        ("auto", "b", 10, AUTO_BYTES + 1, False),
        ("auto", "a", 10, AUTO_BYTES + 1, True),
        ("auto", "a", 9, AUTO_BYTES + 1, False),  # its size is wrong already
        ("all", "b", 10, AUTO_BYTES + 1, True),
        ("none", "a", 10, 100, False),
    ],
)
def test_what_is_hashed(hashing: str, name: str, size: int, total: int, wanted: bool) -> None:
    assert wants_hash(name, size, total, VOUCHED, VerifyOptions(hashing=hashing)) is wanted


def test_a_manifest_of_a_huge_checkpoint_hashes_it() -> None:
    assert wants_hash("b", 10, AUTO_BYTES + 1, [], VerifyOptions(write_manifest=Path("x")))


def test_every_file_has_its_sha256(ask: Ask, model: Path) -> None:
    code, report = ask(model)
    assert code == 3
    for row in report["results"]["files"]:
        assert row["sha256"] == hashlib.sha256((model / row["path"]).read_bytes()).hexdigest()
    assert report["results"]["bytes"]["hashed"] == sum(
        f["size"] for f in report["results"]["files"]
    )


def test_headers_only_reads_no_body_and_says_so(ask: Ask, model: Path) -> None:
    code, report = ask(model, "--hash", "none", "--allow-unverified")
    assert code == 0
    assert report["results"]["bytes"]["hashed"] == 0
    assert {f["sha256"] for f in report["results"]["files"]} == {None}


def test_a_terabyte_with_nothing_to_hold_it_against_is_not_hashed(ask: Ask, model: Path) -> None:
    # Sparse: no block of it is on the disk.
    with (model / "extra.gguf.part").open("wb") as stream:
        stream.truncate(1 << 40)
    began = time.monotonic()
    code, report = ask(model, "--allow-unverified")
    assert code == 0
    assert time.monotonic() - began < 20
    assert any("not hashed" in f["title"] for f in report["findings"])


# Interrupts.


def remembered(cache: Path) -> int:
    """How many digests the cache holds by now."""
    return sum(not p.name.startswith(".") for p in cache.iterdir()) if cache.is_dir() else 0


def test_ctrl_c_keeps_what_was_hashed_and_the_next_run_goes_on(tmp_path: Path, model: Path) -> None:
    for name, size in (("a.bin", 64 << 20), ("b.bin", 8 << 30)):
        with (model / name).open("wb") as stream:
            stream.truncate(size)
    age(model / "b.bin")
    environment = os.environ | {"ASSAY_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "assay", "verify", str(model), "--json", "--workers", "2"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    until = time.monotonic() + 120
    while not remembered(tmp_path / "cache" / "digests") and time.monotonic() < until:
        time.sleep(0.05)  # until the first file is done; the second takes much longer
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert time.monotonic() - began < 15
    assert "Traceback" not in err
    report = json.loads(out)
    assert (report["exit_code"], report["verdict"]) == (130, "inconclusive")
    rows = {f["path"]: f["sha256"] for f in report["results"]["files"]}
    assert rows["a.bin"] == hashlib.sha256(bytes(64 << 20)).hexdigest()
    assert rows["b.bin"] is None
    assert report["results"]["tensors"] == 39
    (model / "b.bin").unlink()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert json.loads(done.stdout)["results"]["bytes"]["from_cache"] == 64 << 20


def test_an_interrupt_does_not_hide_a_fault(
    ask: Ask, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from assay.checkpoint import local_files

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    os.truncate(model / "model-00002-of-00002.safetensors", 5000)
    monkeypatch.setattr(local_files, "hash_files", interrupted)
    code, report = ask(model, "--allow-unverified")
    assert (code, report["verdict"]) == (130, "fail")
    assert finding(report, "truncated")
