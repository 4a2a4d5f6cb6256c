"""The labels and values on a page of text: tables of any drawing, bullets, `key: value`, prose."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from assay.speculation.pages.cells import read_cell
from assay.speculation.pages.words import is_training, meaning, names_drafting, statistic_of

MOST_ROWS = 20_000
"""Lines of a page that are looked at."""
_LONGEST = 4000


@dataclass(frozen=True)
class Entry:
    """One value with its label; entries of one `run` belong together."""

    run: str
    label: str
    value: str


_RULE = re.compile(r"[\s\-─━═=+┼╋|│┃║:┌┐└┘├┤┬┴╔╗╚╝╠╣╦╩╬┏┓┗┛┣┫┳┻┡┩╇╪╞╡╟╢]+")
_BARS = re.compile(r"\s*[|│┃║]\s*")


def _barred(row: str) -> list[str]:
    stripped = row.strip()
    if not re.search(r"[|│┃║]", stripped):
        return []
    return _BARS.split(re.sub(r"^[|│┃║]\s*|\s*[|│┃║]$", "", stripped))


def _commas(row: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([row]), [])] if "," in row else []
    except csv.Error:
        return []


_CUTS: tuple[Callable[[str], list[str]], ...] = (
    _barred,
    lambda row: [c.strip() for c in row.split("\t")] if "\t" in row.strip() else [],
    _commas,
    lambda row: [c.strip() for c in row.split(";")] if ";" in row else [],
    lambda row: re.split(r"\s{2,}", row.strip()) if "  " in row.strip() else [],
)


def entries(text: str) -> list[Entry]:
    """All labelled values whose label has to do with drafting, in order."""
    rows = [row[:_LONGEST] for row in text.splitlines()[:MOST_ROWS]]
    found: list[Entry] = []
    taken: set[int] = set()
    for cut in _CUTS:
        for start, table in _tables(rows, cut, taken):
            own = _of_table(table, f"table at line {start + 1}")
            if own:
                found += own
                taken |= set(range(start, start + len(table)))
    found += _pairs([(i, row) for i, row in enumerate(rows) if i not in taken])
    return found


def _tables(
    rows: Sequence[str], cut: Callable[[str], list[str]], taken: set[int]
) -> Iterator[tuple[int, list[list[str]]]]:
    """(first row, cells of all rows) of neighbouring rows with the same number of cells; rulers are
    rows without cells.
    """
    start, block = 0, list[list[str]]()
    for i, row in enumerate([*rows, ""]):
        cells = [] if i in taken else cut(row)
        width = next((len(c) for c in block if c), 0)
        ruler = bool(block) and bool(row.strip()) and _RULE.fullmatch(row) is not None
        if ruler or (len(cells) > 1 and width in (0, len(cells))):
            start = start if block else i
            block.append([] if ruler else cells)
            continue
        if sum(map(bool, block)) > 1:
            yield start, block
        start, block = i, [cells] if len(cells) > 1 else []


def _of_table(block: Sequence[Sequence[str]], where: str) -> list[Entry]:
    """The entries of a table whose header, or whose first cells, have to do with drafting."""
    rows = _unfolded([row for row in block if row])
    if is_training(" ".join(rows[0])):
        return []
    by_column = _by_column(rows[0], rows[1:], where)
    if any(meaning(e.label) for e in by_column):
        return by_column
    return _by_row(rows, where) or by_column


def _by_column(head: Sequence[str], body: Sequence[Sequence[str]], where: str) -> list[Entry]:
    """Entries labelled by the header; each row is a run."""
    if any(read_cell(cell) for cell in head):
        return []
    return [
        Entry(f"{where}, row {number + 1}", label, cell)
        for number, row in _data_rows(body)
        for label, cell in zip(head, row, strict=True)
        if (names_drafting(label) or meaning(label)) and read_cell(cell)
    ]


def _by_row(rows: Sequence[Sequence[str]], where: str) -> list[Entry]:
    """Entries labelled by the last cell before the figures; each column is a run, or a
    statistic.
    """
    kinds = [statistic_of(cell) for cell in rows[0]]
    found = []
    for row in rows:
        at = next((i for i, cell in enumerate(row) if i and read_cell(cell)), None)
        if at is None or not (names_drafting(row[at - 1]) or meaning(row[at - 1])):
            continue
        columns = [i for i in range(at, len(row)) if read_cell(row[i])]
        for kind in ("mean", "median"):
            if kind in kinds:
                columns = [i for i in columns if kinds[i] == kind]
                break
        found += [Entry(f"{where}, column {i + 1}", row[at - 1], row[i]) for i in columns]
    return found


def _unfolded(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Rows with a first cell that went on in the next row joined."""
    whole: list[list[str]] = []
    for row in rows:
        if len(whole) > 1 and row[0] and not any(row[1:]):
            whole[-1][0] += f" {row[0]}"
        else:
            whole.append(list(row))
    return whole


def _data_rows(body: Sequence[Sequence[str]]) -> list[tuple[int, Sequence[str]]]:
    """Rows of a table, each a run: where rows are statistics, the mean alone; totals are left out
    beside what they add up.
    """
    numbered = list(enumerate(body))
    kinds = {i: next((k for c in row if (k := statistic_of(c))), None) for i, row in numbered}
    plain = [(i, row) for i, row in numbered if kinds[i] is None]
    if len(plain) > 1 or not any(kinds.values()):
        return plain
    for kind in ("total", "mean", "median"):
        if own := [(i, row) for i, row in numbered if kinds[i] == kind]:
            return own
    return plain


_VALUE = r"[~≈]?\s*[*_`\"']*\.?\d(?:[\d.]|,(?=\d{3}))*[^,;|]{0,60}|\[[^\]]{0,2000}\]"
_PAIR = re.compile(
    r"([A-Za-zτ#%][\w #%()/.τ-]{0,70}?)[*_`\"']{0,4}\s*"
    rf"(?:[:=→≈]|\b(?:of|is|was|at|reads)\b)[*_`\"']{{0,4}}\s*({_VALUE})"
)
_BEGIN = re.compile(r"^[\s*•·>#–—-]+|\*\*|`")


def _pairs(rows: Sequence[tuple[int, str]]) -> Iterator[Entry]:
    """`label: value` in lines; a label that comes again begins another run."""
    run, seen, heading = 0, set[str](), ""
    for _, row in rows:
        if is_training(row):
            continue
        line = re.sub(r"\[(\w{1,12})\]", r"\1 ", _BEGIN.sub("", row))
        found = [(m[1].strip(), m[2]) for m in _PAIR.finditer(line)]
        if not found and line.strip():
            heading = line.strip(" -=:")[:80]
        for label, value in found:
            if statistic_of(label) in ("mean", "median") and names_drafting(heading):
                label = f"{heading} {label}"
            name = _known_end(label)
            if name is None:
                continue
            if name.lower() in seen:
                run, seen = run + 1, set()
            seen.add(name.lower())
            yield Entry(f"run {run + 1}", name, value)


_ARTICLE = re.compile(r"(?:the|an?|its|our|and|with|is|was|has|had|at|of|overall)", re.I)


def _known_end(label: str) -> str | None:
    """The longest end of a label that has to do with drafting: prose comes before it."""
    words = label.split()
    for first in range(max(0, len(words) - 7), len(words)):
        end = " ".join(words[first:])
        known = meaning(end)
        if known and (known.sure or first == 0 or _ARTICLE.fullmatch(words[first - 1])):
            return end
    return label if names_drafting(label) else None
