"""The one way to resume: values kept by key, damage, full disks, interrupts, two runs at once; and
folders of one run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.errors import UsageError
from assay.run_lock import RunLock
from assay.runs import Kept, KeptFile, keep_value, read_value, source_digest

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(key=plain, value=plain)
def test_what_is_kept_comes_back(
    key: Any, value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("kept")
    Kept(folder).put(key, value)
    assert Kept(folder).get(key) == value
    assert key in Kept(folder) and [key] not in Kept(folder)


def test_arrays_come_back_with_type_and_shape(tmp_path: Path) -> None:
    arrays = {
        "kl": np.arange(6, dtype=np.float32).reshape(2, 3),
        "top1": np.array([True, False]),
        "n": np.array(3),
    }
    Kept(tmp_path).put("a", arrays)
    back = Kept(tmp_path).get("a")
    assert {k: (v.dtype, v.shape) for k, v in back.items()} == {
        k: (v.dtype, v.shape) for k, v in arrays.items()
    }
    assert all(np.array_equal(back[k], v) for k, v in arrays.items())


@dataclass(frozen=True)
class Settings:
    bits: int
    path: Path = Path("m")


def test_everything_in_the_key_counts_and_its_order_does_not(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.within({"model": "m", "bits": 4}).put(Settings(4), 1)
    assert kept.within({"bits": 4, "model": "m"}).get(Settings(4)) == 1
    for other in (kept, kept.within({"model": "n", "bits": 4}), Kept(tmp_path, {"bits": 4})):
        assert other.get(Settings(4)) is None
    assert kept.within({"model": "m", "bits": 4}).get(Settings(5)) is None
    with pytest.raises(TypeError):
        kept.put(object(), 1)  # its repr would be another in every run


def test_a_value_is_measured_once_and_what_was_measured_outlives_an_interrupt(
    tmp_path: Path,
) -> None:
    calls: list[str] = []

    def run(stop: str = "") -> list[int]:
        kept, found = Kept(tmp_path), []
        for name in ("a", "b", "c"):

            def measure(name: str = name) -> int:
                if name == stop:
                    raise KeyboardInterrupt
                calls.append(name)
                return ord(name)

            found.append(kept.have(name, measure))
        return found

    with pytest.raises(KeyboardInterrupt):
        run(stop="c")
    assert run() == [97, 98, 99]
    assert calls == ["a", "b", "c"]
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@given(data=st.data())
def test_a_damaged_entry_is_measured_again_and_said(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("kept")
    value = data.draw(st.sampled_from([{"kl": 1.5, "name": "ä"}, {"x": np.arange(5.0)}]))
    Kept(folder).put("k", value)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    cut = data.draw(st.booleans())
    file.write_bytes(
        whole[:at] if cut else whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :]
    )
    kept = Kept(folder)
    back = kept.have("k", lambda: "measured again")
    # A changed byte of the line that says what follows may leave the value as it was.
    if back == "measured again":
        (finding,) = kept.notices("kv")
        assert finding.id == "kv.kept_damaged" and "measured again" in finding.title
        assert Kept(folder).get("k") == "measured again"
    else:
        assert str(back) == str(value)


def test_an_entry_of_another_key_is_measured_again_and_said(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.put("a", [1.0])
    (a,) = tmp_path.iterdir()
    kept.put("b", [2.0])
    (b,) = (path for path in tmp_path.iterdir() if path != a)
    shutil.copy(b, a)
    again = Kept(tmp_path)
    assert again.have("a", lambda: [1.0]) == [1.0]
    assert again.get("b") == [2.0]
    assert [f.id for f in again.notices("kv")] == ["kv.kept_damaged"]
    assert Kept(tmp_path).get("a") == [1.0]


def test_an_entry_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.put("a", [1.0])
    (path,) = tmp_path.iterdir()
    head, _, body = path.read_bytes().partition(b"\n")
    old = json.loads(head)
    del old["key"]
    path.write_bytes(json.dumps(old).encode() + b"\n" + body)
    assert Kept(tmp_path).get("a") == [1.0]


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "inner").touch()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a folder": _folder,
    "a pipe": os.mkfifo,
    "no end": lambda path: path.symlink_to("/dev/zero"),
    "deep": lambda path: path.write_bytes(b"[" * 10**6),
    "deep after its head": lambda path: path.write_bytes(b'{"format": 1}\n' + b"[" * 10**6),
    "a number": lambda path: path.write_bytes(b"1\n"),
    "empty": lambda path: path.touch(),
    "plain JSON": lambda path: path.write_text('{"reference": 9.0}'),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
def test_what_is_no_entry_costs_one_measurement(
    damage: Callable[[Path], object], tmp_path: Path
) -> None:
    Kept(tmp_path).put("k", 1)
    (path,) = tmp_path.iterdir()
    path.unlink()
    damage(path)
    kept = Kept(tmp_path)
    assert kept.have("k", lambda: 2) == 2
    assert [f.id for f in kept.notices("kv")] == ["kv.kept_damaged"]
    assert Kept(tmp_path).get("k") == 2
    value = tmp_path / "size.json"
    damage(value)
    assert read_value(value) is None
    keep_value(value, [3])
    assert read_value(value) == [3]


def test_a_value_of_another_file_is_not_believed(tmp_path: Path) -> None:
    keep_value(tmp_path / "size.json", [8])
    (tmp_path / "size.json").rename(tmp_path / "floors.json")
    assert read_value(tmp_path / "floors.json") is None
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_next_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    kept = Kept(tmp_path / "file" / "folder")
    assert kept.have("k", lambda: [1]) == [1]
    assert kept.within("x").have("k", lambda: [2]) == [2]
    assert kept.have("k", lambda: [3]) == [1] and "k" in kept
    (finding,) = kept.notices("gap")
    assert finding.id == "gap.not_kept" and "ASSAY_CACHE" in finding.remedies[0]


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    """The limit on a file's size stands for the disk: writing fails half-way, as it does where no
    room is left.
    """
    child = """
import resource, signal, sys
from pathlib import Path
from assay.runs import Kept, write_atomically
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1])
write_atomically(folder / "store", "old")
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_atomically(folder / "store", "new" * 10_000)
except OSError as error:
    print(error.strerror)
kept = Kept(folder / "kept")
assert kept.have("k", lambda: "v" * 10_000) == "v" * 10_000
assert kept.have("k", lambda: "other") == "v" * 10_000
print(kept.notices("kv")[0].title)
"""
    done = subprocess.run(
        [sys.executable, "-c", child, tmp_path], capture_output=True, text=True, check=True
    )
    said = done.stdout.splitlines()
    assert said[0] == "File too large" and "File too large" in said[1]
    assert (tmp_path / "store").read_text() == "old"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["kept", "store"]


def _work(folder: str, start: Any, results: Any) -> None:
    kept, own = Kept(Path(folder)), 0
    start.wait()
    for i in range(40):

        def measure(i: int = i) -> dict[str, int]:
            nonlocal own
            own += 1
            time.sleep(0.001)
            return {"value": i * i}

        assert kept.have(["entry", i], measure) == {"value": i * i}
    results.put((own, len(kept.notices("kv"))))


def test_two_equal_runs_at_once_share_what_they_measure(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(2), context.Queue()
    runs = [context.Process(target=_work, args=(str(tmp_path), start, results)) for _ in range(2)]
    for run in runs:
        run.start()
    found = [results.get(timeout=60) for _ in runs]
    for run in runs:
        run.join()
        assert run.exitcode == 0
    assert 40 <= sum(own for own, _ in found) <= 80 and not any(damaged for _, damaged in found)
    assert len(list(tmp_path.iterdir())) == 40


def test_a_killed_run_leaves_whole_entries(tmp_path: Path) -> None:
    child = "import sys, itertools; from pathlib import Path; from assay.runs import Kept\n"
    child += "kept = Kept(Path(sys.argv[1]))\n"
    child += (
        "for i in itertools.count(): kept.put(i % 50, 'x' * 200_000 + str(i)); i == 60 and"
        " print(flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", child, tmp_path], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
    kept = Kept(tmp_path)
    assert all(kept.get(i, "").startswith("x" * 200_000) for i in range(50))
    assert kept.notices("kv") == []


def test_entries_that_were_used_longest_ago_go_first(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    for name in ("old", "used", "new"):
        kept.put(name, "x" * 1000)
        for file in tmp_path.iterdir():
            if file.stat().st_mtime > time.time() - 100:
                os.utime(file, (time.time() - 7200,) * 2)
    kept.get("used")
    kept.put("new", "x" * 1000)
    kept.trim(2500)
    assert "old" not in kept and "used" in kept and "new" in kept
    kept.trim(0)  # what was used within the hour may be about to be read by another run
    assert "used" in kept


def test_the_source_is_part_of_what_decides() -> None:
    assert source_digest("stats") == source_digest("stats") != source_digest("stats", "report")


# A file of the user's.

PLAN = {"model": "m", "skip": [1, 2]}


def rows_file(path: Path, plan: dict[str, Any] = PLAN) -> KeptFile:
    return KeptFile(path, plan, "rows/1", "kv.rows")


def test_rows_are_measured_once_and_outlive_the_run(tmp_path: Path) -> None:
    path, calls = tmp_path / "rows.json", []
    for name in ("fp8", "fp8", "bf16"):
        assert rows_file(path).have(name, lambda name=name: calls.append(name) or {"kl": 1}) == {
            "kl": 1
        }
    assert calls == ["fp8", "bf16"]
    assert set(json.loads(path.read_text())["rows"]) == {"fp8", "bf16"}


def test_two_runs_of_one_file_keep_the_rows_of_both(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    first, second = rows_file(path), rows_file(path)
    first.have("a", lambda: 1)
    second.have("b", lambda: 2)
    first.have("c", lambda: 3)
    assert json.loads(path.read_text())["rows"] == {"a": 1, "b": 2, "c": 3}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no rows"),
        ("[]", "no rows"),
        ('{"format": "other", "plan": {}, "rows": {}}', "no rows"),
        (
            '{"format": "rows/1", "plan": {"model": "n", "skip": [1, 2], "x": 1}, "rows": {}}',
            "model, x",
        ),
    ],
)
def test_files_of_something_else_are_refused_and_left_alone(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        rows_file(path)
    assert path.read_text() == text


def test_rows_that_cannot_be_kept_are_refused_before_they_are_measured(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        rows_file(tmp_path / "no" / "rows.json")


# Folders of one run.

HOLD = (
    "import sys; from pathlib import Path; from assay.run_lock import RunLock;"
    " RunLock().folder(Path(sys.argv[1])); print(1, flush=True); input()"
)


@contextmanager
def another_process(folder: Path) -> Iterator[None]:
    """A process that holds `folder`."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "1\n"
        try:
            yield
        finally:
            process.kill()


def test_a_free_folder_is_given_as_it_is_and_stays(tmp_path: Path) -> None:
    wanted = tmp_path / "deep" / "run"
    with RunLock() as lock:
        assert lock.folder(wanted) == wanted
        assert lock.folder(wanted) == wanted  # of the same run again
        (wanted / "kept").touch()
    assert (wanted / "kept").exists()


def test_a_folder_that_another_process_has_is_left_alone(tmp_path: Path) -> None:
    wanted = tmp_path / "run"
    with another_process(wanted), RunLock() as lock:
        own = lock.folder(wanted)
        assert own != wanted and own.parent == wanted.parent and own.is_dir()
        assert lock.folder(wanted) == own
        lock.release()
        assert not own.exists() and wanted.exists()
    with RunLock() as lock:  # that process was killed
        assert lock.folder(wanted) == wanted


def test_a_folder_may_be_deleted_by_its_owner_and_claimed_by_the_next(tmp_path: Path) -> None:
    wanted = tmp_path / "run"
    first, second, third = RunLock(), RunLock(), RunLock()
    assert first.folder(wanted) == wanted
    shutil.rmtree(wanted)
    assert second.folder(wanted) == wanted  # a new one of that name, which the first has no part in
    first.release()
    assert third.folder(wanted) != wanted
    second.release()
    third.release()
    assert wanted.is_dir() and list(tmp_path.iterdir()) == [wanted]
