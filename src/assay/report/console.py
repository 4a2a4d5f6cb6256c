"""A report on a terminal: the verdict first, the figures, the evidence, and what to do last, next
to the prompt.

Piped, or with `TERM=dumb`, the same text comes without colours, boxes or cursor movements.
Everything that may hold model or server text goes through `text.visible` and into `rich.text.Text`,
never through rich's markup.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TextIO

from rich import box
from rich.box import Box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table as Grid
from rich.text import Text

from assay.progress import is_terminal
from assay.report.svg import listing
from assay.report.text import (
    SEVERITIES,
    VERDICTS,
    Piece,
    Tone,
    cut_middle,
    evidence_items,
    excerpt,
    is_command,
    one_line,
    plural,
    sentence,
    shorten,
    split_code,
    status_tone,
    subject_items,
)
from assay.verdict import Block, Chart, Finding, Metric, Quote, Report, Severity, Table, Verdict

# What the parts of the console output share: colours, and quiet lines.

TONES: dict[Tone, str] = {
    "good": "green",
    "bad": "red",
    "warn": "yellow",
    "error": "magenta",
    "info": "cyan",
    "": "",
}


def dim(text: str) -> Text:
    """A line that says something about another one."""
    return Text(text, style="dim")


# Tables, charts and quoted texts on a terminal.

HEAD = 200
AROUND = 100
MAX_QUOTES = 12
MAX_ROWS = 60

_PIECES = {"text": "", "after": "red", "onset": "bold white on red", "gap": "dim italic"}
_BLANK = re.compile(r"\n(?:[ \t]*\n){3,}")


def draw_block(blocks: Sequence[Block], console: Console) -> Iterator[RenderableType]:
    """The blocks in their order; of many texts those that went wrong."""
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
        yield dim(f"{plural(left_out, 'more text')} in the HTML report (--html FILE).")


def _worth_showing(quotes: Sequence[Quote]) -> Sequence[Quote]:
    """At most `MAX_QUOTES` of them, those that went wrong before those that did not."""
    return sorted(quotes, key=lambda q: status_tone(q.status) in ("good", ""))[:MAX_QUOTES]


def _block(block: Block, console: Console) -> Iterator[RenderableType]:
    if isinstance(block, Table):
        return _table(block, console)
    return _table(listing(block), console) if isinstance(block, Chart) else _quote(block, console)


def _table(table: Table, console: Console) -> Iterator[RenderableType]:
    yield Text(one_line(table.title), style="bold")
    grid = Grid(
        box=box.SIMPLE_HEAD if console.is_terminal else plain_box(), padding=(0, 1), show_edge=False
    )
    for i, column in enumerate(table.columns):
        grid.add_column(
            Text(one_line(column)),
            justify="right" if i in table.numeric else "left",
            overflow="fold",
        )
    for row in table.rows[:MAX_ROWS]:
        cells = [one_line(str(cell)) for cell in row][: len(table.columns)]
        grid.add_row(*(Text(cell, style=TONES[status_tone(cell)]) for cell in cells))
    yield grid
    if len(table.rows) > MAX_ROWS:
        yield dim(
            f"{plural(len(table.rows) - MAX_ROWS, 'more row')} in the HTML report (--html FILE)."
        )
    if table.note:
        yield dim(one_line(table.note))


def plain_box() -> Box:
    """A table frame without box-drawing characters: dashes under the headings, nothing else."""
    return Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def _quote(
    quote: Quote, console: Console, head: int = HEAD, around: int = AROUND
) -> Iterator[RenderableType]:
    tone = TONES[status_tone(quote.status)]
    status = (f"  {one_line(quote.status)}", f"bold {tone}") if quote.status else ""
    note = (f"  {one_line(quote.note)}", "dim") if quote.note else ""
    yield Text.assemble((one_line(quote.title), "bold"), status, note)
    yield Padding(quoted(excerpt(quote, head, around)), (0, 0, 0, 2))


def quoted(pieces: Sequence[Piece]) -> Text:
    """The pieces of a model's text, its onset marked."""
    text = Text(overflow="fold")
    for piece in pieces:
        note = piece.kind in ("onset", "gap")
        text.append(
            f"⟦{piece.text}⟧" if note else _BLANK.sub(_counted, piece.text),
            style=_PIECES[piece.kind],
        )
    return text if text.plain else Text("(no text)", style="dim italic")


def _counted(blank: re.Match[str]) -> str:
    """A flood of line breaks as its number, so that it does not scroll everything else away."""
    return f"\n⟦{blank.group().count(chr(10))} line breaks⟧\n"


# Findings on a terminal: the gravest last, next to the prompt; commands each on a line of their
# own.

MAX_ALIKE = 5

_ORDER = (Severity.INFO, Severity.WARNING, Severity.ERROR)


def draw_findings(findings: Sequence[Finding], console: Console) -> Iterator[RenderableType]:
    """The findings in full; of many with one id the first `MAX_ALIKE`."""
    findings = sorted(findings, key=lambda f: _ORDER.index(f.severity))
    alike = Counter(f.id for f in findings)
    seen: Counter[str] = Counter()
    for finding in findings:
        seen[finding.id] += 1
        if seen[finding.id] <= MAX_ALIKE:
            yield ""
            yield from _finding(finding, console)
        elif seen[finding.id] == alike[finding.id]:
            more = plural(alike[finding.id] - MAX_ALIKE, "more finding")
            yield ""
            yield dim(f"{more} [{finding.id}] in the HTML report (--html FILE) and in --json.")


def _finding(finding: Finding, console: Console) -> Iterator[RenderableType]:
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
    if finding.causes:
        yield dim(
            "  Likely causes, the likeliest first:"
            if len(finding.causes) > 1
            else "  Likely cause:"
        )
    for i, cause in enumerate(finding.causes, 1):
        number = f"{i}. " if len(finding.causes) > 1 else ""
        yield Padding(_prose(f"{number}{cause}"), (0, 0, 0, 4))


def _remedies(finding: Finding) -> Iterator[RenderableType]:
    if finding.remedies:
        yield dim("  What to do:")
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
    return Text.assemble(*((part, "bold") if coded else part for coded, part in split_code(text)))


MAX_WIDTH = 120
PLAIN_WIDTH = 100


def print_report(
    report: Report, file: TextIO | None = None, width: int | None = None, *, verbose: bool = False
) -> None:
    """Print `report` to `file` (standard output), as rich text on a terminal and as plain text
    elsewhere.

    By default what fits on one screen; with `verbose` every table, text, cause and piece of
    evidence.
    """
    stream = file or sys.stdout
    console = make_console(stream, width)
    parts = renderables(report, console) if verbose else first_screen(report, console)
    emit(console, parts, stream)


def emit(console: Console, parts: Iterable[RenderableType], stream: TextIO) -> None:
    """Print the parts to `stream`. What its encoding lacks becomes `?` instead of an error."""
    with console.capture() as captured:
        for part in parts:
            # A command stays one line at any width, so that it can be copied.
            console.print(part, soft_wrap=isinstance(part, Text) and part.no_wrap is True)
    text = captured.get()
    if not console.is_terminal:
        text = "".join(f"{line.rstrip(' ')}\n" for line in text.split("\n")[:-1])
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))


def make_console(stream: TextIO, width: int | None = None) -> Console:
    """A rich console for `stream`: no colour for `NO_COLOR`, nothing but text if it is no terminal
    or a dumb one.
    """
    plain = not is_terminal(stream)
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


def _plain_width() -> int:
    columns = os.environ.get("COLUMNS", "")
    return min(max(int(columns), 40), MAX_WIDTH) if columns.isdecimal() else PLAIN_WIDTH


def renderables(report: Report, console: Console) -> Iterator[RenderableType]:
    """The parts of a report in the order in which they are printed."""
    yield banner(report, console)
    if report.headline:
        yield ""
        yield headline(report.headline, console)
    yield from draw_block(report.blocks, console)
    yield from draw_findings(report.findings, console)
    if report.findings:
        # The last line above the prompt says again what the first one said, which may have scrolled
        # away.
        yield ""
        yield _verdict_line(report)


SCREEN_LINES = 40
MAX_FINDINGS = 5
_MAX_METRICS = 8
_MAX_REMEDIES = 2
_LEAST_ROWS = 3


def first_screen(report: Report, console: Console) -> list[RenderableType]:
    """The verdict, the figures, the first table, the gravest findings with what to do: at most
    `SCREEN_LINES` lines.

    The last line says what is left out, and how to see it.
    """
    top: list[RenderableType] = [banner(report, console)]
    if report.headline:
        top += ["", headline(report.headline[:_MAX_METRICS], console)]
    findings = sorted(report.findings, key=lambda f: -_ORDER.index(f.severity))
    tables = [b for b in report.blocks if isinstance(b, Table) and b.rows and not b.detail]
    telling = _telling(report) if report.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE) else None
    shown = [_short_finding(f, console) for f in findings[:MAX_FINDINGS]]
    free = SCREEN_LINES - _height(top, console) - 3
    least = _LEAST_ROWS + 4 if tables else 0
    while len(shown) > 1 and _height([p for part in shown for p in part], console) + least > free:
        shown.pop()
    bottom = [part for parts in shown for part in parts]
    if len(findings) == 1 and not (report.blocks or report.summary):
        bottom = bottom[2:]  # the banner has said it
    middle: list[RenderableType] = []
    free -= _height(bottom, console)
    if tables:
        table = _fitted(tables[0], console)
        rows = min(len(table.rows), max(free, 1))
        while rows > 1 and _height(_part_of(table, rows, console), console) > free:
            rows -= 1
        middle += _part_of(table, rows, console)
    if telling is not None:
        quote = ["", *_quote(replace(telling, note=""), console, _SHORT_HEAD, _SHORT_AROUND)]
        if _height([*middle, *quote], console) <= free:
            middle += quote
    more = _left_out(report, len(findings) - len(shown), len(tables), console)
    last: list[RenderableType] = ["", more] if more else []
    return [*top, *middle, *bottom, *last]


_SHORT_HEAD, _SHORT_AROUND = 120, 60


def _height(parts: Iterable[RenderableType], console: Console) -> int:
    """Lines that the parts take when they are printed."""
    with console.capture() as captured:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, Text) and part.no_wrap is True)
    return captured.get().count("\n")


def _part_of(table: Table, rows: int, console: Console) -> list[RenderableType]:
    """The first rows of a table, with how many there are more."""
    rest = len(table.rows) - rows
    note = f"{plural(rest, 'more row')} with -v. {table.note}" if rest else table.note
    return ["", *_table(replace(table, rows=table.rows[:rows], note=note), console)]


def _fitted(table: Table, console: Console) -> Table:
    """The table with paths cut in their middle and, where it is still too wide, without its last
    columns.
    """
    cells = [[cut_middle(one_line(str(cell)), _PATH_WIDTH) for cell in row] for row in table.rows]
    columns = [one_line(column) for column in table.columns]
    widths = [
        max(cell_len(row[i]) for row in [columns, *(r for r in cells if len(r) > i)]) + 2
        for i in range(len(columns))
    ]
    kept = len(columns)
    while kept > 2 and sum(widths[:kept]) > console.width:
        kept -= 1
    note = table.note
    if kept < len(columns):
        note = f"With -v also: {', '.join(columns[kept:])}. {note}".strip()
    return replace(table, columns=columns[:kept], rows=[row[:kept] for row in cells], note=note)


_PATH_WIDTH = 44


def _short_finding(finding: Finding, console: Console) -> list[RenderableType]:
    """A finding as its title and what to do."""
    look = SEVERITIES[finding.severity]
    mark = f"{look.glyph} {look.word}" if console.is_terminal else look.word.upper()
    parts: list[RenderableType] = [
        "",
        Text.assemble(
            (mark, f"bold {TONES[look.tone]}"),
            "  ",
            (shorten(one_line(finding.title), 240), "bold"),
        ),
    ]
    for remedy in finding.remedies[:_MAX_REMEDIES]:
        pieces = split_code(remedy)
        commands = [code for coded, code in pieces if coded and is_command(code)]
        prose = "".join(part for coded, part in pieces if not (coded and is_command(part))).strip()
        if prose:
            parts.append(
                Padding(_prose(f"→ {prose}" if _unicode(console) else f"- {prose}"), (0, 0, 0, 2))
            )
        parts += [
            Text.assemble("    ", (command, "bold"), no_wrap=True) for command in commands[:1]
        ]
    return parts


def _unicode(console: Console) -> bool:
    return console.encoding.startswith("utf")


def _left_out(report: Report, findings: int, tables: int, console: Console) -> Text:
    """How to see the rest."""
    rest = []
    if findings:
        rest.append(plural(findings, "more finding"))
    hidden = len(report.blocks) - min(tables, 1)
    if any(f.evidence or f.causes for f in report.findings):
        rest.append("evidence and causes")
    if hidden > 0:
        rest.append(
            f"{hidden} more tables, charts and texts" if hidden > 1 else "one more table or text"
        )
    if not rest and not report.results:
        return dim("")
    return dim(
        f"-v shows {', '.join(rest) or 'all details'}; --html FILE draws the charts; --json has"
        " every number."
    )


def _command(report: Report) -> str:
    """`assay check`; `assay` alone where the command line named no verb."""
    return "assay" if report.command == "assay" else f"assay {one_line(report.command)}"


def banner(report: Report, console: Console) -> RenderableType:
    """The verdict, its one sentence and the subject."""
    look = VERDICTS[report.verdict]
    subject = ", ".join(f"{key} {value}" for key, value in subject_items(report.subject, 120))
    command = _command(report)
    if not console.is_terminal:
        lines = [
            f"{look.word}  {command}: {sentence(report)}",
            *([f"Subject: {subject}"] if subject else []),
        ]
        return Text("\n".join(lines))
    word = Text(f" {look.glyph} {look.word} ", style=f"bold reverse {TONES[look.tone]}")
    body = [Text.assemble(word, "  ", (sentence(report), "bold"))]
    if subject:
        body.append(Text(subject, style="dim"))
    return Panel(
        Group(*body),
        title=Text(command),
        title_align="left",
        border_style=TONES[look.tone],
        padding=(0, 1),
    )


def _verdict_line(report: Report) -> Text:
    look = VERDICTS[report.verdict]
    counts = [
        plural(sum(f.severity is severity for f in report.findings), SEVERITIES[severity].word)
        for severity in Severity
        if severity is not Severity.INFO and any(f.severity is severity for f in report.findings)
    ]
    tail = f" ({', '.join(counts)})" if counts else ""
    return Text.assemble(f"{_command(report)}: ", (look.word, f"bold {TONES[look.tone]}"), tail)


def headline(metrics: Sequence[Metric], console: Console) -> RenderableType:
    """The headline figures, a line each; an invalid one is struck out and says why."""
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
    text = one_line(metric.text)
    if metric.valid:
        return Text(text, style="bold")
    return Text(text, style="strike red") if console.is_terminal else Text(f"~~{text}~~")


def _note(metric: Metric) -> str:
    note = one_line(metric.note)
    return note if metric.valid else f"invalid: {note}" if note else "invalid"


def _note_style(metric: Metric) -> str:
    return "dim" if metric.valid else "red"


# Several reports side by side: what the demo shows of a healthy and a broken server.

COLUMN_HEAD = 160
COLUMN_AROUND = 60
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
    """One table with a column for each report, or one table for each report where there
    is no room.
    """
    if console.width < 16 + MIN_COLUMN * len(reports):
        return [_grid([pair], console) for pair in reports]
    return [_grid(reports, console)]


def _grid(reports: Titled, console: Console) -> RenderableType:
    terminal = console.is_terminal
    grid = Grid(
        box=box.ROUNDED if terminal else plain_box(),
        show_edge=terminal,
        show_lines=terminal,
        width=console.width,
    )
    grid.add_column("", no_wrap=False, max_width=20, style="dim")
    for title, _ in reports:
        grid.add_column(Text(one_line(title), style="bold"), ratio=1, overflow="fold")
    for label, cells in _lines(reports, console):
        grid.add_row(Text(label), *cells)
    return grid


def _lines(reports: Titled, console: Console) -> list[tuple[str, list[Text]]]:
    lines = [("verdict", [_verdict(report) for _, report in reports])]
    for name in dict.fromkeys(m.name for _, report in reports for m in report.headline):
        lines.append((one_line(name), [_figure(report, name, console) for _, report in reports]))
    lines.append(("findings", [_findings(report) for _, report in reports]))
    quotes = [_telling(report) for _, report in reports]
    if any(quotes):
        lines.append(("what it wrote", [_text(q) if q else Text("") for q in quotes]))
    return lines


def _verdict(report: Report) -> Text:
    look = VERDICTS[report.verdict]
    return Text.assemble(
        (f"{look.glyph} {look.word}", f"bold {TONES[look.tone]}"), f"\n{sentence(report)}"
    )


def _figure(report: Report, name: str, console: Console) -> Text:
    metric = next((m for m in report.headline if m.name == name), None)
    if metric is None:
        return Text("not measured", style="dim")
    if metric.valid:
        return metric_text(metric, console)
    note = one_line(metric.note)
    return Text.assemble(
        metric_text(metric, console), (f"\ninvalid: {note}" if note else "\ninvalid", "red")
    )


def _findings(report: Report) -> Text:
    grave = [f for f in report.findings if f.severity is not Severity.INFO]
    grave.sort(key=lambda f: f.severity is not Severity.ERROR)
    text = Text("\n".join(f"- {one_line(f.title)}" for f in grave[:3]) or "none")
    return text.append(f"\nand {len(grave) - 3} more", style="dim") if len(grave) > 3 else text


def _telling(report: Report) -> Quote | None:
    """The text that shows best what the verdict means: the first that went wrong, else
    the first.
    """
    quotes = [b for b in report.blocks if isinstance(b, Quote)]
    return min(quotes, key=lambda q: status_tone(q.status) not in ("bad", "warn"), default=None)


def _text(quote: Quote) -> Text:
    return Text.assemble(
        (f"{one_line(quote.title)}\n", "dim"), quoted(excerpt(quote, COLUMN_HEAD, COLUMN_AROUND))
    )
