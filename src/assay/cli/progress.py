"""Progress of long work, on standard error: a bar on a terminal, a few plain lines elsewhere,
nothing if quiet; a table of a doctor's starts.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast

from assay.progress import is_terminal, span

if TYPE_CHECKING:
    from rich.console import RenderableType

    from assay.serving.doctor import Doctor

PLAIN_SECONDS = 10.0
"""Least time between two plain lines."""
KEPT_SECONDS = 0.02
"""A step that takes less than this, before any that took longer, was read and not measured."""


class Progress(Protocol):
    """What work reports to. Every method may be called from any thread."""

    def advance(self, steps: float = 1, /) -> None:
        """`steps` more are done."""

    def update(self, *, description: str | None = None, total: float | None = None) -> None:
        """The work goes by another name, or its size is now known."""

    def note(self, text: str, /) -> None:
        """Print one line beside the progress."""


@contextlib.contextmanager
def progress(
    total: float | None,
    description: str,
    *,
    quiet: bool = False,
    sizes: bool = False,
    file: TextIO | None = None,
) -> Iterator[Progress]:
    """Show how far work of `total` steps (None: unknown) has come, until the block ends, however it
    ends.

    With `sizes` the steps are bytes, shown with a unit and a speed.
    """
    stream = file or sys.stderr
    if quiet:
        yield _Silent()
    elif is_terminal(stream):
        with _bar(total, description, stream, sizes) as bar:
            yield bar
    else:
        from assay.report.text import size_text

        plain = _Plain(total, description, stream, size_text if sizes else "{:g}".format)
        try:
            yield plain
        finally:
            plain.finish()


@dataclass
class Speed:
    """The speed of work, learnt from its steps; what was kept by an earlier run comes in a moment
    and tells nothing of it.
    """

    since: float
    kept: float = 0.0
    done: float = 0.0
    now: float = 0.0

    def learn(self, done: float, now: float) -> None:
        """So many steps are done at a time of the clock."""
        if self.kept == self.done and now - self.since < KEPT_SECONDS * (done - self.kept):
            self.since, self.kept = now, done
        self.done, self.now = done, now

    def seconds(self, total: float | None) -> float | None:
        """Until all of it is done; None while it is unknown."""
        if not total or self.done <= self.kept or self.done > total:
            return None
        return (total - self.done) * (self.now - self.since) / (self.done - self.kept)


class _Lasting:
    """A stream whose end (a terminal that was closed, a full disk) does not stop the work."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write as far as that is possible."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush as far as that is possible."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


class _Silent:
    def advance(self, steps: float = 1, /) -> None:
        """Say nothing."""

    def update(self, *, description: str | None = None, total: float | None = None) -> None:
        """Say nothing."""

    def note(self, text: str, /) -> None:
        """Say nothing."""


class _Plain:
    """Lines for logs: the start, at most one every `PLAIN_SECONDS` and tenth of the work, and the
    end.
    """

    def __init__(
        self,
        total: float | None,
        description: str,
        stream: TextIO,
        written: Callable[[float], str] = "{:g}".format,
    ) -> None:
        self._written = written
        self._total, self._description, self._stream = total, description, stream
        self._done = 0.0
        self._begun = self._said_at = time.monotonic()
        self._speed = Speed(self._begun)
        self._said_share = 0.0
        self._lock = threading.Lock()
        self._say(f"{description} …")

    def advance(self, steps: float = 1, /) -> None:
        """Count, and say so if enough has happened since the last line."""
        with self._lock:
            self._done += steps
            self._speed.learn(self._done, time.monotonic())
            share = self._done / self._total if self._total else 1.0
            now = time.monotonic()
            far = share - self._said_share >= 0.1 or not self._total
            if far and now - self._said_at >= PLAIN_SECONDS and share < 1.0 + (not self._total):
                self._said_at, self._said_share = now, share
                self._say(f"{self._description}: {self._count()}{self._left()}")

    def update(self, *, description: str | None = None, total: float | None = None) -> None:
        """Take the new name and size; the next line uses them."""
        with self._lock:
            self._description = self._description if description is None else description
            self._total = self._total if total is None else total

    def note(self, text: str, /) -> None:
        """Print `text` as a line."""
        with self._lock:
            self._say(text)

    def finish(self) -> None:
        """Say how far it came, and how long that took."""
        with self._lock:
            self._say(
                f"{self._description}: {self._count()} in {time.monotonic() - self._begun:.0f} s"
            )

    def _count(self) -> str:
        done = self._written(self._done)
        return f"{done} of {self._written(self._total)}" if self._total else done

    def _left(self) -> str:
        seconds = self._speed.seconds(self._total)
        return "" if seconds is None else f", about {span(seconds)} left"

    def _say(self, line: str) -> None:
        from assay.report.text import one_line

        # A log that went away must not stop the work.
        with contextlib.suppress(OSError, ValueError):
            encoding = getattr(self._stream, "encoding", None) or "utf-8"
            self._stream.write(f"{one_line(line)}\n".encode(encoding, "replace").decode(encoding))
            self._stream.flush()


@contextlib.contextmanager
def _bar(
    total: float | None, description: str, stream: TextIO, sizes: bool = False
) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        ProgressColumn,
        SpinnerColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    from assay.report.text import one_line

    console = Console(
        file=cast(TextIO, _Lasting(stream)),
        markup=False,
        emoji=False,
        highlight=False,
        no_color=bool(os.environ.get("NO_COLOR")),
    )
    speed = Speed(time.monotonic())

    class Left(ProgressColumn):
        def render(self, task: Task) -> Text:
            """The time that is left, by the measured speed."""
            seconds = speed.seconds(task.total)
            return Text("" if seconds is None or task.finished else f"about {span(seconds)} left")

    counts: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), TimeElapsedColumn(), Left())
    if sizes:
        counts = (
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            Left(),
        )
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *counts,
    )

    class Bar:
        def advance(self, steps: float = 1, /) -> None:
            """Move the bar."""
            shown.advance(task, steps)
            speed.learn(shown.tasks[0].completed, time.monotonic())

        def update(self, *, description: str | None = None, total: float | None = None) -> None:
            """Change the name or the length of the bar."""
            shown.update(
                task,
                description=None if description is None else one_line(description),
                total=total,
            )

        def note(self, text: str, /) -> None:
            """Print `text` above the bar."""
            console.print(Text(one_line(text)))

    # Transient: the report follows, and a full bar above it says nothing.
    with RichProgress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(one_line(description), total=total)
        yield Bar()


@contextlib.contextmanager
def show(what: str, steps: int) -> Iterator[Callable[[], None]]:
    """The `assay.progress.Progress` of the command line: the function it yields counts one step.

    Without steps `what` is a line to print.
    """
    if not steps:
        say(what)
        yield lambda: None
        return
    with progress(steps, what) as shown:
        yield lambda: shown.advance(1)


@contextlib.contextmanager
def show_bytes(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar in bytes, nothing for work that is done in a moment; the function it yields counts
    bytes.
    """
    with progress(total, what, quiet=total < _WORTH_SHOWING, sizes=True) as shown:
        yield shown.advance


_WORTH_SHOWING = 1 << 30


def say(line: str) -> None:
    """Print one line on standard error; a bar that is shown stays below it."""
    from assay.report.text import one_line

    with contextlib.suppress(OSError, ValueError):
        print(one_line(line), file=sys.stderr, flush=True)


@contextlib.contextmanager
def live_table(doctor: Doctor) -> Iterator[None]:
    """The starts so far, what is done now, and the time left, on standard error until the block
    ends.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console(
        file=cast(TextIO, _Lasting(sys.stderr)),
        markup=False,
        emoji=False,
        highlight=False,
        no_color=bool(os.environ.get("NO_COLOR")),
    )
    with Live(
        get_renderable=lambda: starts_table(doctor, console.height),
        console=console,
        refresh_per_second=2,
        transient=True,
    ):
        yield


def starts_table(doctor: Doctor, height: int) -> RenderableType:
    """One row a start; the oldest are left out where the terminal is too low."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from assay.report.text import one_line

    table = Table(box=None, pad_edge=False, expand=True)
    for name, more in (
        ("configuration", {"ratio": 5}),
        ("start", {"width": 5, "justify": "right"}),
        ("symptom", {"ratio": 6}),
        ("state", {"width": 10}),
    ):
        table.add_column(name, no_wrap=True, overflow="ellipsis", **more)
    colours = {"bad": "red", "good": "green"}
    starts = doctor.found.starts
    for start in starts[-max(3, height - 5) :]:
        state = start.seen.state.replace("_", " ")
        says = "; ".join(start.seen.bad.values()) or (
            "as the baseline" if start.configuration else ""
        )
        row = (doctor.starts.label(start.configuration), str(start.index + 1), says)
        table.add_row(
            *(one_line(word) for word in row), Text(state, colours.get(start.seen.state, "yellow"))
        )
    left = max(0.0, doctor.starts.left())
    now = f"{doctor.starts.now or 'working'} ({len(starts)} starts so far, {span(left)} left)"
    return Group(table, Text(one_line(now), no_wrap=True, overflow="ellipsis"))
