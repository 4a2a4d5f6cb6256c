"""The device that a model runs on, and how many windows fit in its memory together."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from assay.engines.scoring import ScoreJob, ScoringPath
from assay.errors import AssayError

if TYPE_CHECKING:
    pass
from assay.engines.cgroup import cgroup, read_text

Item = TypeVar("Item")


Result = TypeVar("Result")


_UNKNOWN_MEMORY = 4 << 30
"""Bytes that are taken to be free where the system does not say."""


def choose_device(asked: str = "auto") -> str:
    """The device of that name; for `auto` the GPU where torch finds one, else the CPU."""
    if asked != "auto":
        return asked
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def free_memory(device: Any = "cpu") -> int:
    """Bytes that a computation on `device` (a torch.device or its name) can still take.

    A GPU: what its driver calls free, and what torch's allocator holds without using it. A CPU: the
    memory that the system calls available, within the limits of the cgroups; cached files count as
    free.
    """
    if str(device).startswith("cuda"):
        import torch

        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + held)
    available = [
        1024 * int(line.split()[1])
        for line in read_text("proc/meminfo").splitlines()
        if line.startswith("MemAvailable:")
    ]
    for version, limit, usage, cached in (
        (2, "memory.max", "memory.current", "inactive_file"),
        (1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        files = (cgroup("memory", name, version) for name in (limit, usage, "memory.stat"))
        for most, used, statistics in zip(*files, strict=False):
            if most.isdecimal():
                facts = dict(line.split()[:2] for line in statistics.splitlines())
                available.append(max(0, int(most) - int(used) + int(facts.get(cached, 0))))
    return min(available, default=_UNKNOWN_MEMORY)


_SHARE = 0.7
"""Of the free memory that a batch may take: the rest is for the logits of its rows, and for what
the formula leaves out.
"""


_TOKENS_AT_ONCE = {"cpu": 4_096, "cuda": 65_536}


_WINDOWS_AT_ONCE = {"cpu": 16, "cuda": 64}
"""Beyond these more tokens of a prefill, and more windows that are decoded, make nothing faster."""


def window_bytes(
    config: Any, size: int, length: int, job: ScoreJob, token_bytes: int, *, eager: bool = False
) -> int:
    """Bytes that one window of `length` tokens takes while a model of transformers scores it.

    With T tokens in the cache, S in the largest block that goes through at once, d the width of the
    model, f that of its feed-forward layers (of the experts that a token goes to), H heads of width
    w and b = `size` bytes a number, it takes

        the cache          T · `token_bytes` (of all layers; 0 where none is kept)
        one layer at work  S · (6 d + 3 f + 2 H w) · b
        eager attention    H · S · T · (b + 4), only where it is asked for
        final states       2 · T · d · b: blocks of them and the whole

    bytes. The prefill path keeps no cache (T = S) unless a hook reads one. `config` has the names
    of transformers.
    """
    width = config.hidden_size
    heads = getattr(config, "num_attention_heads", None) or 1
    head_dim = getattr(config, "head_dim", None) or width // heads
    inner = getattr(config, "intermediate_size", None) or 4 * width
    prefill = job.path is ScoringPath.PREFILL
    block = (
        length
        if prefill
        else max(job.scored_from, job.chunk if job.path is ScoringPath.CHUNKED else 1)
    )
    work = block * (6 * width + 3 * inner + 2 * heads * head_dim) * size
    if eager:
        work += heads * block * length * (size + 4)
    return int(length * token_bytes + work + 2 * length * width * size)


def windows_at_once(device: str, length: int, job: ScoreJob, window: int, free: int) -> int:
    """How many windows of `window` bytes run together on a device of that type: at least one."""
    kind = "cuda" if device == "cuda" else "cpu"
    prefill = job.path is ScoringPath.PREFILL
    enough = _TOKENS_AT_ONCE[kind] // length if prefill else _WINDOWS_AT_ONCE[kind]
    return max(1, min(enough, int(_SHARE * max(0, free)) // window))


def out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, numpy, torch or a library of NVIDIA says that memory ran out."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and any(
        words in said
        for words in (
            "can't allocate memory",
            "not enough memory",
            "out of memory",
            "STATUS_ALLOC_FAILED",
        )
    )


def memory_error(what: str, device: Any, remedy: str = "") -> AssayError:
    """The error for `what` that does not fit into memory even by itself."""
    return AssayError(
        f"out of memory with {what} on {device}",
        finding_id="fidelity.out_of_memory",
        remedy=remedy
        or (
            "give a smaller --length, a smaller type (?dtype=bfloat16) or another device"
            " (?device=cpu)"
        ),
    )


class Batches:
    """Runs items side by side, `size` at once; where memory runs out, half as many, and so on from
    there.
    """

    def __init__(self, size: int, most: int | None = None) -> None:
        """`size` is what is wanted, `most` what has been found to fit at most."""
        self.asked = size
        self.size = min(size, most or size)
        self.halved = 0
        self._most = most

    def again(self, size: int) -> Batches:
        """For more of the same items: not more at once than has been found to fit."""
        return Batches(size, self.size if self.halved else self._most)

    def run(
        self,
        items: Sequence[Item],
        work: Callable[[Sequence[Item]], Sequence[Result]],
        too_large: Callable[[Item], AssayError],
    ) -> Iterator[tuple[Item, Result]]:
        """Each item with its result, in order; `too_large` makes the error for an item that does
        not fit alone.
        """
        done = 0
        while done < len(items):
            part, found = items[done : done + self.size], None
            try:
                found = work(part)
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                if len(part) == 1:
                    raise too_large(part[0]) from error
            if found is None:  # the error is gone by now, and with it what its frames held
                self.size, self.halved = len(part) // 2, self.halved + 1
                give_back()
                continue
            yield from zip(part, found, strict=True)
            done += len(part)

    def note(self) -> dict[str, int]:
        """How many ran together, and how many were to where memory was too small for them, for the
        record.
        """
        return {"windows": self.size} | ({"asked": self.asked} if self.size < self.asked else {})


def give_back() -> None:
    """Return memory that is not used any more to the system, which takes it for free from then on.

    glibc keeps what a model's tensors took: without `malloc_trim` a second model came on top of the
    first.
    """
    gc.collect()
    with suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
