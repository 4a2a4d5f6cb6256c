"""A report on a terminal: the verdict first, the figures, the evidence, and what to do last, next to the prompt.

Piped, or with `TERM=dumb`, the same text comes without colours, boxes or cursor movements. Everything that may hold
model or server text goes through `text.visible` and into `rich.text.Text`, never through rich's markup.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from assay.report import charts_text
from assay.report.scale import caption, drawable
from assay.report.text import (
    Piece,
    evidence_items,
    excerpt,
    is_command,
    one_line,
    split_code,
)
from assay.report.tone import SEVERITIES, VERDICTS, Tone, plural, sentence, status_tone
from assay.verdict import Block, Chart, Finding, Metric, Quote, Report, Severity, Table

if TYPE_CHECKING:
    from rich.box import Box
    from rich.console import Console, RenderableType
    from rich.text import Text

HEAD = 200
AROUND = 100
MAX_QUOTES = 12
MAX_ROWS = 60
MAX_WIDTH = 120
PLAIN_WIDTH = 100

TONES: dict[Tone, str] = {
    "good": "green", "bad": "red", "warn": "yellow", "error": "magenta", "info": "cyan", "": "",
}  # fmt: skip
_ROLES = {
    "s0": "blue", "s1": "yellow", "s2": "cyan", "s3": "magenta", "s4": "red", "s5": "white",
    "band": "green", "dim": "dim", "label": "", "": "",
}  # fmt: skip
_PIECES = {"text": "", "after": "red", "onset": "bold white on red", "gap": "dim italic"}
_ORDER = (Severity.INFO, Severity.WARNING, Severity.ERROR)


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
    yield from _blocks(report.blocks, console)
    findings = sorted(report.findings, key=lambda f: _ORDER.index(f.severity))
    for finding in findings:
        yield ""
        yield from _finding(finding, console)
    if findings:
        # The last line above the prompt says again what the first one said, which may have scrolled away.
        yield ""
        yield _verdict_line(report)


def banner(report: Report, console: Console) -> RenderableType:
    """The verdict, its one sentence and the subject."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    look = VERDICTS[report.verdict]
    subject = ", ".join(f"{key} {value}" for key, value in evidence_items(report.subject, 120))
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


def _blocks(blocks: Sequence[Block], console: Console) -> Iterator[RenderableType]:
    left_out = 0
    shown = {id(q) for q in _worth_showing([b for b in blocks if isinstance(b, Quote)])}
    for block in blocks:
        if isinstance(block, Quote) and id(block) not in shown:
            left_out += 1
            continue
        yield ""
        yield from _block(block, console)
    if left_out:
        yield ""
        yield _dim(f"{plural(left_out, 'more text')} in the HTML report (--html FILE).")


def _worth_showing(quotes: Sequence[Quote]) -> Sequence[Quote]:
    """At most `MAX_QUOTES` of them, those that went wrong before those that did not."""
    return sorted(quotes, key=lambda q: status_tone(q.status) in ("good", ""))[:MAX_QUOTES]


def _block(block: Block, console: Console) -> Iterator[RenderableType]:
    if isinstance(block, Table):
        return _table(block, console)
    return _chart(block, console) if isinstance(block, Chart) else _quote(block, console)


def _table(table: Table, console: Console) -> Iterator[RenderableType]:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    yield Text(one_line(table.title), style="bold")
    grid = RichTable(
        box=box.SIMPLE_HEAD if console.is_terminal else plain_box(), padding=(0, 1), show_edge=False
    )
    for i, column in enumerate(table.columns):
        grid.add_column(
            Text(one_line(column)), justify="right" if i in table.numeric else "left", overflow="fold"
        )
    for row in table.rows[:MAX_ROWS]:
        cells = [one_line(str(cell)) for cell in row][: len(table.columns)]
        grid.add_row(*(Text(cell, style=TONES[status_tone(cell)]) for cell in cells))
    yield grid
    if len(table.rows) > MAX_ROWS:
        yield _dim(f"{plural(len(table.rows) - MAX_ROWS, 'more row')} in the HTML report (--html FILE).")
    if table.note:
        yield _dim(one_line(table.note))


def plain_box() -> Box:
    """A table frame without box-drawing characters: dashes under the headings, nothing else."""
    from rich.box import Box

    return Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def _chart(chart: Chart, console: Console) -> Iterator[RenderableType]:
    from rich.text import Text

    yield Text(one_line(chart.title), style="bold")
    unicode = console.encoding.startswith("utf")
    drawn = charts_text.draw(chart, min(console.width, 100)) if unicode else charts_text.listing(chart)
    for line in drawn:
        yield Text.assemble(*((part, _ROLES[role]) for part, role in line), no_wrap=True)
    note = caption(chart, drawable(chart)[1])
    if note:
        yield _dim(one_line(note))


def _quote(quote: Quote, console: Console) -> Iterator[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    tone = TONES[status_tone(quote.status)]
    status = (f"  {one_line(quote.status)}", f"bold {tone}") if quote.status else ""
    note = (f"  {one_line(quote.note)}", "dim") if quote.note else ""
    yield Text.assemble((one_line(quote.title), "bold"), status, note)
    yield Padding(quoted(excerpt(quote, HEAD, AROUND)), (0, 0, 0, 2))


def quoted(pieces: Sequence[Piece]) -> Text:
    """The pieces of a model's text, its onset marked."""
    from rich.text import Text

    text = Text(overflow="fold")
    for piece in pieces:
        note = piece.kind in ("onset", "gap")
        text.append(f"⟦{piece.text}⟧" if note else piece.text, style=_PIECES[piece.kind])
    return text if text.plain else Text("(no text)", style="dim italic")


def _finding(finding: Finding, console: Console) -> Iterator[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    look = SEVERITIES[finding.severity]
    mark = f"{look.glyph} {look.word}" if console.is_terminal else look.word.upper()
    yield Text.assemble(
        (mark, f"bold {TONES[look.tone]}"),
        "  ",
        (one_line(finding.title), "bold"),
        (f"  [{finding.id}]", "dim"),
    )
    if finding.detail:
        yield Padding(_prose(finding.detail), (0, 0, 0, 2))
    evidence = [f"{key} {value}" for key, value in evidence_items(finding.evidence)]
    if evidence:
        yield Padding(Text.assemble(("Evidence: ", "dim"), "; ".join(evidence)), (0, 0, 0, 2))
    yield from _causes(finding)
    yield from _remedies(finding)
    for reference in finding.references:
        yield Text.assemble(("  See ", "dim"), one_line(reference), no_wrap=True)


def _causes(finding: Finding) -> Iterator[RenderableType]:
    from rich.padding import Padding

    if finding.causes:
        yield _dim("  Likely causes, the likeliest first:" if len(finding.causes) > 1 else "  Likely cause:")
    for i, cause in enumerate(finding.causes, 1):
        number = f"{i}. " if len(finding.causes) > 1 else ""
        yield Padding(_prose(f"{number}{cause}"), (0, 0, 0, 4))


def _remedies(finding: Finding) -> Iterator[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    if finding.remedies:
        yield _dim("  What to do:")
    for remedy in finding.remedies:
        parts = split_code(remedy)
        commands = [code for coded, code in parts if coded and is_command(code)]
        prose = "".join(part for coded, part in parts if not (coded and is_command(part))).strip()
        if prose:
            yield Padding(_prose(prose), (0, 0, 0, 4))
        for command in commands:
            # No prompt sign and no wrapping: the line is there to be copied.
            yield Text.assemble("      ", (command, "bold"), no_wrap=True)


def _prose(text: str) -> Text:
    from rich.text import Text

    return Text.assemble(*((part, "bold") if coded else part for coded, part in split_code(text)))


def _dim(text: str) -> Text:
    from rich.text import Text

    return Text(text, style="dim")
