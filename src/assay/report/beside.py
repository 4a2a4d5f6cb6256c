"""Several reports side by side: what the demo shows of a healthy and a broken server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from assay.report.console import emit, make_console, metric_text
from assay.report.console_blocks import plain_box, quoted
from assay.report.console_style import TONES
from assay.report.text import excerpt, one_line
from assay.report.tone import VERDICTS, sentence, status_tone
from assay.verdict import Quote, Report, Severity

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

HEAD = 160
AROUND = 60
MIN_COLUMN = 32

Titled = Sequence[tuple[str, Report]]


def side_by_side(reports: Titled, file: TextIO | None = None, width: int | None = None) -> None:
    """Print the verdicts, figures, gravest findings and a text of each report next to each other.

    Where the terminal is too narrow for columns they follow one another.
    """
    stream = file or sys.stdout
    console = make_console(stream, width)
    emit(console, comparison(reports, console), stream)


def comparison(reports: Titled, console: Console) -> list[RenderableType]:
    """One table with a column for each report, or one table for each report where there is no room."""
    if console.width < 16 + MIN_COLUMN * len(reports):
        return [_grid([pair], console) for pair in reports]
    return [_grid(reports, console)]


def _grid(reports: Titled, console: Console) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    terminal = console.is_terminal
    grid = Table(
        box=box.ROUNDED if terminal else plain_box(),
        show_edge=terminal,
        show_lines=terminal,
        width=console.width,
    )
    grid.add_column("", no_wrap=False, max_width=18, style="dim")
    for title, _ in reports:
        grid.add_column(Text(one_line(title), style="bold"), ratio=1, overflow="fold")
    for label, cells in _lines(reports, console):
        grid.add_row(Text(label), *cells)
    return grid


def _lines(reports: Titled, console: Console) -> list[tuple[str, list[Text]]]:
    from rich.text import Text

    lines = [("verdict", [_verdict(report) for _, report in reports])]
    for name in dict.fromkeys(m.name for _, report in reports for m in report.headline):
        lines.append((one_line(name), [_figure(report, name, console) for _, report in reports]))
    lines.append(("findings", [_findings(report) for _, report in reports]))
    quotes = [_telling(report) for _, report in reports]
    if any(quotes):
        lines.append(("what it wrote", [_text(q) if q else Text("") for q in quotes]))
    return lines


def _verdict(report: Report) -> Text:
    from rich.text import Text

    look = VERDICTS[report.verdict]
    return Text.assemble((f"{look.glyph} {look.word}", f"bold {TONES[look.tone]}"), f"\n{sentence(report)}")


def _figure(report: Report, name: str, console: Console) -> Text:
    from rich.text import Text

    metric = next((m for m in report.headline if m.name == name), None)
    if metric is None:
        return Text("not measured", style="dim")
    if metric.valid:
        return metric_text(metric, console)
    note = one_line(metric.note)
    return Text.assemble(metric_text(metric, console), (f"\ninvalid: {note}" if note else "\ninvalid", "red"))


def _findings(report: Report) -> Text:
    from rich.text import Text

    grave = [f for f in report.findings if f.severity is not Severity.INFO]
    grave.sort(key=lambda f: f.severity is not Severity.ERROR)
    text = Text("\n".join(f"- {one_line(f.title)}" for f in grave[:3]) or "none")
    return text.append(f"\nand {len(grave) - 3} more", style="dim") if len(grave) > 3 else text


def _telling(report: Report) -> Quote | None:
    """The text that shows best what the verdict means: the first that went wrong, else the first."""
    quotes = [b for b in report.blocks if isinstance(b, Quote)]
    return min(quotes, key=lambda q: status_tone(q.status) not in ("bad", "warn"), default=None)


def _text(quote: Quote) -> Text:
    from rich.text import Text

    return Text.assemble((f"{one_line(quote.title)}\n", "dim"), quoted(excerpt(quote, HEAD, AROUND)))
