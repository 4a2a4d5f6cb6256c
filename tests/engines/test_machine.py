"""What is free on a machine, read from files of a machine of our own making, and batches that are
halved.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from assay.cli.main import invoke
from assay.engines import cgroup, device, threads
from assay.errors import AssayError

STAT = "proc/stat"
GIB = 1 << 30


class Machine:
    """A tree of /proc and /sys; its CPUs spend `busy` of each second at work while a quarter of a
    second is slept.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        monkeypatch.setattr(cgroup, "ROOT", root)
        monkeypatch.setattr(threads, "_run", None)  # what tests of other files began
        monkeypatch.setattr(
            threads.os, "sched_getaffinity", lambda _: set(self.cpus), raising=False
        )
        monkeypatch.setattr(threads.time, "process_time", lambda: self.own)
        monkeypatch.setattr(threads.time, "sleep", self._sleep)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        self.cpus, self.busy, self.own = list(range(8)), 0.0, 0.0
        self._spent = 100.0
        self._write_stat()

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def _sleep(self, seconds: float) -> None:
        self._spent += seconds * self.busy
        self._write_stat()

    def _write_stat(self) -> None:
        ticks = round(self._spent * os.sysconf("SC_CLK_TCK"))
        lines = [f"cpu{n} {ticks if n == 0 else 0} 0 0 999 0 0 0 0 0 0" for n in range(16)]
        self.write(STAT, "\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *lines, "intr 5"]))

    def threads(self) -> int:
        threads.count_free_cores.cache_clear()
        return threads.choose_threads()


@pytest.fixture
def computer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    yield Machine(tmp_path, monkeypatch)
    threads.count_free_cores.cache_clear()


def test_a_quiet_machine_gives_all_its_cores(computer: Machine) -> None:
    assert computer.threads() == 8


def test_what_others_use_is_left_to_them(computer: Machine) -> None:
    found = {}
    for busy in (0.3, 1.0, 2.6, 7.8, 12.0):
        computer.busy = busy
        found[busy] = computer.threads()
    assert found == {0.3: 8, 1.0: 7, 2.6: 5, 7.8: 1, 12.0: 1}


def test_only_the_cpus_that_it_may_use_count_and_two_on_one_core_are_one(computer: Machine) -> None:
    computer.cpus = [2, 3, 10, 11]
    assert computer.threads() == 4
    for cpu, both in ((2, "2,10"), (10, "2,10"), (3, "3,11"), (11, "3,11")):
        computer.write(
            f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", both + "\n"
        )
    assert computer.threads() == 2


@pytest.mark.parametrize(
    ("quota", "threads"),
    [("max 100000", 8), ("50000 100000", 1), ("250000 100000", 2), ("900000", 8)],
)
def test_a_quota_of_a_cgroup_is_kept(computer: Machine, quota: str, threads: int) -> None:
    computer.write("proc/self/cgroup", "0::/a/b")
    computer.write("sys/fs/cgroup/a/cpu.max", quota)
    assert computer.threads() == threads


def test_a_quota_of_the_older_kind_is_kept_as_a_container_sees_it(computer: Machine) -> None:
    computer.write("proc/self/cgroup", "3:cpu,cpuacct:/docker/123\n2:memory:/docker/123")
    computer.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "300000")
    computer.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    assert computer.threads() == 3


def test_the_load_stands_in_where_nobody_counts(
    computer: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (computer.root / STAT).unlink()
    monkeypatch.setattr(threads.os, "getloadavg", lambda: (6.2, 1.0, 1.0))
    assert computer.threads() == 2


def test_what_the_user_says_holds(computer: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    computer.busy = 8.0
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert computer.threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "none")
    assert computer.threads() == 1


def test_a_run_that_was_interrupted_goes_on_with_as_many_threads(
    computer: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(computer.root / "cache"))
    monkeypatch.setattr(threads, "_run", None)

    def begin(about: str, busy: float = 0.0) -> int:
        computer.busy = busy
        threads.begin_run([about])
        return computer.threads()

    assert begin("one") == 8
    threads.interrupt_run()
    assert begin("one", busy=5.0) == 8 and begin("other", busy=5.0) == 3
    computer.cpus = [0, 1]
    assert begin("one", busy=1.0) == 2  # not more than there are
    computer.cpus = list(range(8))
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    assert begin("one") == 6
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(threads, "_DAY", 0.0)
    assert begin("one", busy=5.0) == 3


def test_this_machine_has_something_free() -> None:
    assert (
        1
        <= threads.choose_threads()
        <= max(os.cpu_count() or 1, int(os.environ.get("OMP_NUM_THREADS", 1)))
    )
    assert device.free_memory() > 0


def test_free_memory_is_what_the_narrowest_limit_leaves(computer: Machine) -> None:
    assert device.free_memory() == 4 * GIB  # nobody says
    computer.write("proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {20 * GIB // 1024} kB\n")
    assert device.free_memory() == 20 * GIB
    computer.write("proc/self/cgroup", "0::/")
    computer.write("sys/fs/cgroup/memory.max", "max")
    computer.write("sys/fs/cgroup/memory.current", str(3 * GIB))
    computer.write("sys/fs/cgroup/memory.stat", f"anon 5\ninactive_file {GIB}")
    assert device.free_memory() == 20 * GIB
    computer.write("sys/fs/cgroup/memory.max", str(8 * GIB))
    assert device.free_memory() == 6 * GIB
    computer.write("sys/fs/cgroup/memory.max", str(GIB))
    assert device.free_memory() == 0


def test_free_memory_within_a_limit_of_the_older_kind(computer: Machine) -> None:
    computer.write("proc/meminfo", f"MemAvailable: {20 * GIB // 1024} kB\n")
    computer.write("proc/self/cgroup", "4:memory:/x")
    for name, value in (("limit_in_bytes", 4 * GIB), ("usage_in_bytes", GIB)):
        computer.write(f"sys/fs/cgroup/memory/x/memory.{name}", str(value))
    computer.write("sys/fs/cgroup/memory/x/memory.stat", f"total_inactive_file {GIB // 2}")
    assert device.free_memory() == 3 * GIB + GIB // 2


@pytest.mark.parametrize(
    ("error", "ran_out"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"), True),  # noqa: E501
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),  # noqa: E501
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)  # fmt: skip
def test_which_errors_say_that_memory_ran_out(error: Exception, ran_out: bool) -> None:
    assert device.out_of_memory(error) is ran_out


class Worker:
    """Work that fits for `room` items at once."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.tried: list[int] = []

    def __call__(self, part: Any) -> list[int]:
        self.tried.append(len(part))
        if len(part) > self.room:
            raise MemoryError
        return [10 * item for item in part]


def too_large(item: int) -> AssayError:
    return device.memory_error(f"item {item}", "cpu")


def test_batches_are_halved_and_stay_so() -> None:
    worker, batches = Worker(3), device.Batches(8)
    assert list(batches.run(range(11), worker, too_large)) == [(i, 10 * i) for i in range(11)]
    assert worker.tried == [8, 4, 2, 2, 2, 2, 2, 1]
    assert batches.note() == {"windows": 2, "asked": 8}
    again = batches.again(8)
    assert (again.size, again.note()) == (2, {"windows": 2, "asked": 8})
    assert again.again(1).note() == {"windows": 1}
    assert device.Batches(4).again(8).note() == {"windows": 8}


def test_one_item_that_does_not_fit_is_named_and_other_errors_pass() -> None:
    with pytest.raises(AssayError, match="out of memory with item 0 on cpu") as caught:
        list(device.Batches(4).run(range(3), Worker(0), too_large))
    assert (caught.value.finding_id, caught.value.verdict.exit_code) == (
        "fidelity.out_of_memory",
        2,
    )

    def broken(part: Any) -> list[int]:
        raise RuntimeError("shapes")

    with pytest.raises(RuntimeError, match="shapes"):
        list(device.Batches(4).run(range(3), broken, too_large))


@contextmanager
def half_a_core() -> Iterator[Callable[[], None]]:
    """A cgroup of half a core, as a function that puts a process into it; skips where none can be
    made.
    """
    root = Path("/sys/fs/cgroup")
    group = (
        root if (root / "cgroup.controllers").exists() else root / "cpu"
    ) / f"assay-test-{os.getpid()}"
    limits = {"cpu.max": "50000 100000"} if group.parent == root else {"cpu.cfs_quota_us": "50000"}
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error.strerror}")
    try:
        try:
            for name, text in limits.items():
                (group / name).write_text(text)
        except OSError as error:
            pytest.skip(f"no quota can be set here: {error.strerror}")
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None
    finally:
        group.rmdir()


def one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def words_of(model: Path, cache: Path, *more: str) -> list[str]:
    specs = [f"hf:{model}", f"hf:{model}?dtype=float32"]
    return [
        "compare",
        *specs,
        "--length",
        "64",
        "--no-floors",
        *more,
        "--json",
        str(cache / "out.json"),
    ]


def compared(
    model: Path, cache: Path, before: Callable[[], None], *more: str
) -> tuple[int, dict[str, Any], str]:
    settings = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {
        "ASSAY_CACHE": str(cache)
    }
    done = subprocess.run(
        [sys.executable, "-m", "assay", *words_of(model, cache, *more)],
        env=settings, preexec_fn=before, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    return done.returncode, json.loads((cache / "out.json").read_text()), done.stdout


@pytest.mark.engine
def test_on_one_core_one_thread_is_used_and_said(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, body, shown = compared(tiny_llama, tmp_path, one_core, "--windows", "8")
    assert code in (0, 1, 3) and body["environment"]["threads"] == 1
    assert body["results"]["reference"]["threads"] == body["results"]["engine"]["threads"] == 1
    assert "8 windows, 1 thread\n" in shown
    torch = pytest.importorskip("torch")
    own = torch.get_num_threads()
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    try:
        words = words_of(tiny_llama, tmp_path, "--windows", "8", "--threads", "2")
        assert invoke(words) in (0, 1, 3)
    finally:
        torch.set_num_threads(own)
    assert json.loads((tmp_path / "out.json").read_text())["results"]["engine"]["threads"] == 2
    assert "8 windows, 2 threads\n" in capsys.readouterr().out


@pytest.mark.engine
def test_in_a_container_of_half_a_core_a_budget_is_kept_with_one_thread(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with half_a_core() as enter:
        code, body, _ = compared(tiny_llama, tmp_path, enter, "--budget", "0.7")
    assert code in (0, 1, 3), body["findings"]
    assert body["environment"].get("threads", 1) == 1
    if "times" in body["results"]:
        assert body["results"]["times"]["seconds"] < 150  # 42 s were given
