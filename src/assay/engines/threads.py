"""How many threads a run uses on a CPU: the cores that are free."""

from __future__ import annotations

import os
import time
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from assay.runs import Kept
from assay.engines.cgroup import cpu_quota, read_text

_SAMPLE_SECONDS = 0.25


_DAY = 86_400.0


_run: tuple[Any, int] | None = None
"""What the run is known by, and its threads where it goes on."""


def choose_threads() -> int:
    """How many threads torch should use: `OMP_NUM_THREADS` where it is set, else those of the
    interrupted run that goes on (`begin_run`), else the cores that were free when they were first
    counted.

    The choice is made once a process, so that both sides of a comparison add their numbers in the
    same order.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    return (_run and min(_run[1], len(_allowed_cpus()))) or count_free_cores()


@cache
def count_free_cores() -> int:
    """The cores that are free now, at least one.

    Free cores are the least of: the physical cores that this process may run on (its affinity), the
    CPU quota of its cgroup, and those that other programs leave idle over a quarter of a second.
    The load average stands in where the system does not count idle time; it lags by a minute and
    also counts what this process did itself. One thread too many costs far more than one too few:
    at the end of every operation all threads wait for the one that shares its core.
    """
    cpus = _allowed_cpus()
    before = _busy_seconds(cpus)
    if before is not None:
        time.sleep(_SAMPLE_SECONDS)
        after = _busy_seconds(cpus)
        busy = (after - before) / _SAMPLE_SECONDS if after is not None else 0.0
    else:
        busy = os.getloadavg()[0]
    cores = min(float(len({_core_of(cpu) for cpu in cpus})), len(cpus) - busy, cpu_quota())
    return max(1, round(cores))


def use_threads(wanted: int = 0) -> int:
    """Have torch use `wanted` threads, or as many as `choose_threads` says; returns
    their number.
    """
    import torch

    threads = wanted or choose_threads()
    torch.set_num_threads(threads)
    return threads


def begin_run(about: Any) -> None:
    """Begin a run, or go on with one that was interrupted less than a day ago: with as many threads
    as it had.

    What is scored depends on the threads in its last bits: with as many as are free by now, nothing
    that was kept would fit. `about` is plain data by which the run is known.
    """
    global _run
    threads, since = _kept_threads().get(about, (0, 0.0))
    _run = (about, threads if 0 <= time.time() - since < _DAY else 0)


def _kept_threads() -> Kept:
    from assay.runs import Kept, cache_path  # numpy, which `assay --help` does without

    return Kept(cache_path("threads"))


def interrupt_run() -> None:
    """Keep the number of threads of the run that is interrupted, for `begin_run`."""
    if _run:
        _kept_threads().put(_run[0], (choose_threads(), time.time()))


def _allowed_cpus() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _core_of(cpu: int) -> str:
    """What tells a physical core from others: the CPUs that share it."""
    return read_text(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def _busy_seconds(cpus: frozenset[int]) -> float | None:
    """Seconds since the start of the system in which `cpus` were not idle, own time left out; None
    where that is not counted.
    """
    total, seen = 0.0, False
    for line in read_text("proc/stat").splitlines():
        name, *columns = line.split()
        if (
            name.startswith("cpu")
            and name[3:].isdecimal()
            and int(name[3:]) in cpus
            and len(columns) >= 8
        ):
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, columns[:8])
            total += user + nice + system + irq + softirq + steal
            seen = True
    return total / os.sysconf("SC_CLK_TCK") - time.process_time() if seen else None
