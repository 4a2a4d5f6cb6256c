"""Collective calls of threads, where a test has no process group."""

from __future__ import annotations

import threading
from typing import Any

import torch


class Together:
    """So many ranks, each a thread: `gather` waits for all of them, as a process group does."""

    def __init__(self, ranks: int) -> None:
        self._slots: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks, timeout=30)

    def gather(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        self._slots[rank] = tensor.clone()
        self._barrier.wait()
        found = torch.stack(self._slots)
        self._barrier.wait()
        return found
