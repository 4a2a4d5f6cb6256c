"""Tables, charts and quoted texts on a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from assay.report import charts_text
from assay.report.console_style import TONES, dim
from assay.report.scale import caption, drawable
from assay.report.text import Piece, excerpt, one_line
from assay.report.tone import plural, status_tone
from assay.verdict import Block, Chart, Quote, Table

if TYPE_CHECKING:
    from rich.box import Box
    from rich.console import Console, RenderableType
    from rich.text import Text

HEAD = 200
AROUND = 100
MAX_QUOTES = 12
MAX_ROWS = 60

_ROLES = {
    "s0": "blue", "s1": "yellow", "s2": "cyan", "s3": "magenta", "s4": "red", "s5": "white",
    "band": "green", "dim": "dim", "label": "", "": "",
}  # fmt: skip
_PIECES = {"text": "", "after": "red", "onset": "bold white on red", "gap": "dim italic"}
_BLANK = re.compile(r"\n(?:[ \t]*\n){3,}")


def draw(blocks: Sequence[Block], console: Console) -> Iterator[RenderableType]:
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
        yield dim(f"{plural(len(table.rows) - MAX_ROWS, 'more row')} in the HTML report (--html FILE).")
    if table.note:
        yield dim(one_line(table.note))


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
        yield dim(one_line(note))


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
        text.append(
            f"⟦{piece.text}⟧" if note else _BLANK.sub(_counted, piece.text), style=_PIECES[piece.kind]
        )
    return text if text.plain else Text("(no text)", style="dim italic")


def _counted(blank: re.Match[str]) -> str:
    """A flood of line breaks as its number, so that it does not scroll everything else away."""
    return f"\n⟦{blank.group().count(chr(10))} line breaks⟧\n"
