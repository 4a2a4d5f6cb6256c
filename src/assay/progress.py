"""How long work tells that it goes on, without knowing who listens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TextIO

Advance = Callable[[], None]
"""One more step of the work is done."""

Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""`progress(what, steps)` opens a piece of work and yields the function to call after each step;
without steps it tells `what` and no more."""


@contextmanager
def _silent(what: str, steps: int) -> Iterator[Advance]:
    yield lambda: None


NO_PROGRESS: Progress = _silent
"""Discards what it is told."""


def span(seconds: float) -> str:
    """Seconds in words."""
    whole = max(1, round(seconds))
    if whole < 100:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 6000 else f"{whole // 60} min"


def is_terminal(stream: TextIO) -> bool:
    """Whether a bar, a table or colours can be drawn there."""
    isatty = getattr(stream, "isatty", None)
    return bool(isatty and isatty()) and os.environ.get("TERM", "") not in ("dumb", "unknown")
