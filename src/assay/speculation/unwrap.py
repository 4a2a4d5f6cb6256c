"""Join the lines that a terminal broke at its width or between words."""

from __future__ import annotations

import re
from collections.abc import Sequence


def unwrapped(text: str) -> list[str]:
    """Other readings of `text`: lines joined that a terminal broke at its width or between words,
    and rows of tables named.
    """
    rows = text.splitlines()
    width = max(map(len, rows), default=0)
    full = sum(len(row) == width for row in rows)
    joined = []
    if 40 <= width <= 400 and full >= 1 and len(rows) > 1:
        joined.append("".join(row if len(row) == width else row + "\n" for row in rows))
    if 40 <= width <= 400 and len(rows) > 1:
        starts = re.compile(
            r"\s*(?:\(\w+"
            r" pid=|INFO|WARNING|ERROR|\[?\d{4}-\d\d|\d+\.\d\d\.\d{3}|[\w.-]+\s+\||slot |$)"
        )
        joined.append("".join(("\n" if starts.match(row) else " ") + row.strip() for row in rows))
    if named := _named_rows(rows):
        joined.append("\n".join(named))
    return joined


_CELLS = (
    re.compile(r"\s*[|│]\s*"),
    re.compile(r"\s*\t\s*"),
    re.compile(r"\s*[,;]\s*"),
    re.compile(r"\s{2,}"),
)


def _named_rows(rows: Sequence[str]) -> list[str]:
    """The rows of tables with a column of what was accepted, each as `column=figure` of all its
    columns.
    """
    found: list[str] = []
    head: list[str] = []
    cut = _CELLS[0]
    for row in rows:
        low = row.lower()
        if "acc" in low and ("draft" in low or "propos" in low) and not re.search(r"\d", row):
            cut = next((c for c in _CELLS if len(c.split(row.strip(" |│"))) > 2), _CELLS[0])
            head = [re.sub(r"\W+", "_", cell).strip("_") for cell in cut.split(row.strip(" |│"))]
            continue
        cells = cut.split(row.strip(" |│")) if head else []
        if len(cells) == len(head) > 2 and any(re.match(r"\d", cell) for cell in cells):
            found.append(
                " ".join(
                    f"{name}={cell}"
                    for name, cell in zip(head, cells, strict=True)
                    if re.match(r"\d", cell)
                )
            )
    return found
