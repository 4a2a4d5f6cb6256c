"""`assay doctor` and `assay bundle`: which setting breaks a serve command, and the evidence in one file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.cli.verb import verb
from assay.verdict import Report

if TYPE_CHECKING:
    from rich.console import RenderableType

    from assay.serving.doctor import Doctor

HELP = "Evidence of a doctor in one file: show it, or verify and judge it again offline."


@verb(
    "doctor",
    "assay.options:DoctorOptions",
    command="-- COMMAND... :: The serve command, such as `vllm serve ./model --kv-cache-dtype fp8`.",
)
def doctor(command: list[str] | None = None, **given: Any) -> Report:
    """Find the setting that breaks a serve command: launch it, bisect its settings, prove the guilty set.

    Each configuration is launched as often as its noise demands. Servers are stopped at every exit, and a
    run that was cut off goes on from there. Exit code 0 the command is as good as its baseline, 1 a guilty
    set was found or the baseline itself fails, 2 nothing could be launched, 3 undecided.
    """
    from assay.cli.progress import show
    from assay.options import DoctorOptions
    from assay.progress import NO_PROGRESS, is_terminal
    from assay.serving.run import run_doctor

    options = DoctorOptions.of(given)
    if is_terminal(sys.stderr):
        report = run_doctor(command or [], options, NO_PROGRESS, live_table)
    else:
        report = run_doctor(command or [], options, show)
    if options.issue and "issue" in report.results:
        print(report.results["issue"])
    return report


@contextmanager
def live_table(doctor: Doctor) -> Iterator[None]:
    """The starts so far, what is done now, and the time left, on standard error until the block ends."""
    from rich.console import Console
    from rich.live import Live

    console = Console(
        file=sys.stderr, markup=False, emoji=False, highlight=False, no_color=bool(os.environ.get("NO_COLOR"))
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

    from assay.progress import span
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
        says = "; ".join(start.seen.bad.values()) or ("as the baseline" if start.configuration else "")
        row = (doctor.label(start.configuration), str(start.index + 1), says)
        table.add_row(*(one_line(word) for word in row), Text(state, colours.get(start.seen.state, "yellow")))
    left = max(0.0, doctor.left())
    now = f"{doctor.now or 'working'} ({len(starts)} starts so far, {span(left)} left)"
    return Group(table, Text(one_line(now), no_wrap=True, overflow="ellipsis"))


@verb("bundle show", bundle="FILE :: What `assay doctor --bundle` wrote.")
def show(bundle: Path) -> Report:
    """Show the verdict, the findings and the files of a bundle. Exit code that of the doctor."""
    from assay.serving.bundle import show_bundle

    return show_bundle(bundle)


@verb("bundle verify", bundle="FILE :: What `assay doctor --bundle` wrote.")
def verify(bundle: Path) -> Report:
    """Hold the files of a bundle against its manifest and judge its starts again. Exit code 0 both hold, 1 not."""
    from assay.serving.bundle import verify_bundle

    return verify_bundle(bundle)
