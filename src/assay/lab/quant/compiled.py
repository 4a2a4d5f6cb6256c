"""Loops compiled by numba for the CPU: whether they can be used, and how they are shared out among threads.

numba is imported when the first loop is needed, never before. Without it everything works, through torch.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from assay.fidelity.metrics_gpu import gives_the_same

_SAME: dict[Hashable, bool] = {}


def is_agreed(key: Hashable, compare: Callable[[], bool]) -> bool:
    """Whether the compiled loop called `key` may be used: `compare` holds it against torch once, at the first use.

    Where numba is missing, or ASSAY_NO_NUMBA is set, it may not; where it fails or differs, a warning says so.
    """
    if key not in _SAME:
        _SAME[key] = _is_installed() and gives_the_same(f"the compiled loop {key}", compare)
    return _SAME[key]


@cache
def _is_installed() -> bool:
    if os.environ.get("ASSAY_NO_NUMBA"):
        return False
    try:
        import numba  # noqa: F401
    except ModuleNotFoundError:
        return False
    except ImportError as error:  # numba refuses a numpy that is newer than itself
        warnings.warn(f"numba is not used: {error}"[:300], RuntimeWarning, stacklevel=2)
        return False
    return True


def in_parts(loop: Callable[[int, int], object], count: int, least: int) -> list[object]:
    """`loop(lo, hi)` over 0 … count in as many parts as torch has threads, of at least `least` each, in order.

    The loop must let go of Python's lock. numba's own threads are not used: they die in a forked process.
    """
    import torch

    parts = max(1, min(torch.get_num_threads(), count // least))
    if parts == 1:
        return [loop(0, count)]
    ends = [count * i // parts for i in range(parts + 1)]
    others = [_pool(os.getpid(), parts - 1).submit(loop, ends[i], ends[i + 1]) for i in range(1, parts)]
    return [loop(0, ends[1]), *(other.result() for other in others)]


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads of this process: those of a parent are gone after a fork."""
    return ThreadPoolExecutor(threads, thread_name_prefix="assay-loop")
