"""A report on a terminal: the verdict first, the figures, the evidence, and what to do last, next to the prompt.

Piped, or with `TERM=dumb`, the same text comes without colours, boxes or cursor movements. Everything that may hold
model or server text goes through `text.visible` and into `rich.text.Text`, never through rich's markup.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from assay.report import console_blocks, console_findings
from assay.report.console_style import TONES
from assay.report.text import one_line, subject_items
from assay.report.tone import SEVERITIES, VERDICTS, plural, sentence
from assay.verdict import Metric, Report, Severity

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

MAX_WIDTH = 120
PLAIN_WIDTH = 100


def print_report(report: Report, file: TextIO | None = None, width: int | None = None) -> None:
    """Print `report` to `file` (standard output), as rich text on a terminal and as plain text elsewhere."""
    stream = file or sys.stdout
    console = make_console(stream, width)
    emit(console, renderables(report, console), stream)


def emit(console: Console, parts: Iterable[RenderableType], stream: TextIO) -> None:
    """Print the parts to `stream`. What its encoding lacks becomes `?` instead of an error."""
    from rich.text import Text

    with console.capture() as captured:
        for part in parts:
            # A command stays one line, whatever the width, so that it can be copied.
            console.print(part, soft_wrap=isinstance(part, Text) and part.no_wrap is True)
    text = captured.get()
    if not console.is_terminal:
        text = "".join(f"{line.rstrip(' ')}\n" for line in text.split("\n")[:-1])
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))


def make_console(stream: TextIO, width: int | None = None) -> Console:
    """A rich console for `stream`: no colour for `NO_COLOR`, nothing but text if it is no terminal or a dumb one."""
    from rich.console import Console

    plain = not _is_terminal(stream)
    console = Console(
        file=stream,
        force_terminal=not plain,
        no_color=plain or bool(os.environ.get("NO_COLOR")),
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
        width=width or (_plain_width() if plain else None),
        color_system=None if plain else "auto",
    )
    if width is None and not plain:
        console.width = min(console.width, MAX_WIDTH)
    return console


def _is_terminal(stream: TextIO) -> bool:
    isatty = getattr(stream, "isatty", None)
    return bool(isatty and isatty()) and os.environ.get("TERM", "") not in ("dumb", "unknown")


def _plain_width() -> int:
    columns = os.environ.get("COLUMNS", "")
    return min(max(int(columns), 40), MAX_WIDTH) if columns.isdecimal() else PLAIN_WIDTH


def renderables(report: Report, console: Console) -> Iterator[RenderableType]:
    """The parts of a report in the order in which they are printed."""
    yield banner(report, console)
    if report.headline:
        yield ""
        yield headline(report.headline, console)
    yield from console_blocks.draw(report.blocks, console)
    yield from console_findings.draw(report.findings, console)
    if report.findings:
        # The last line above the prompt says again what the first one said, which may have scrolled away.
        yield ""
        yield _verdict_line(report)


def banner(report: Report, console: Console) -> RenderableType:
    """The verdict, its one sentence and the subject."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    look = VERDICTS[report.verdict]
    subject = ", ".join(f"{key} {value}" for key, value in subject_items(report.subject, 120))
    command = f"assay {one_line(report.command)}"
    if not console.is_terminal:
        lines = [f"{look.word}  {command}: {sentence(report)}", *([f"Subject: {subject}"] if subject else [])]
        return Text("\n".join(lines))
    word = Text(f" {look.glyph} {look.word} ", style=f"bold reverse {TONES[look.tone]}")
    body = [Text.assemble(word, "  ", (sentence(report), "bold"))]
    if subject:
        body.append(Text(subject, style="dim"))
    return Panel(
        Group(*body), title=Text(command), title_align="left", border_style=TONES[look.tone], padding=(0, 1)
    )


def _verdict_line(report: Report) -> Text:
    from rich.text import Text

    look = VERDICTS[report.verdict]
    counts = [
        plural(sum(f.severity is severity for f in report.findings), SEVERITIES[severity].word)
        for severity in Severity
        if severity is not Severity.INFO and any(f.severity is severity for f in report.findings)
    ]
    tail = f" ({', '.join(counts)})" if counts else ""
    return Text.assemble(f"assay {one_line(report.command)}: ", (look.word, f"bold {TONES[look.tone]}"), tail)


def headline(metrics: Sequence[Metric], console: Console) -> RenderableType:
    """The headline figures, a line each; an invalid one is struck out and says why."""
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid.grid(padding=(0, 3, 0, 0))
    for metric in metrics:
        grid.add_row(
            Text(one_line(metric.name)),
            metric_text(metric, console),
            Text(_note(metric), style=_note_style(metric)),
        )
    return grid


def metric_text(metric: Metric, console: Console) -> Text:
    """The figure itself; an invalid one is struck out, by tildes where text has no attributes."""
    from rich.text import Text

    text = one_line(metric.text)
    if metric.valid:
        return Text(text, style="bold")
    return Text(text, style="strike red") if console.is_terminal else Text(f"~~{text}~~")


def _note(metric: Metric) -> str:
    note = one_line(metric.note)
    return note if metric.valid else f"invalid: {note}" if note else "invalid"


def _note_style(metric: Metric) -> str:
    return "dim" if metric.valid else "red"
