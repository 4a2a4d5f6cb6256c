"""The figure in a cell: a number with its unit, or accepted of drafted."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBER = r"\d[\d,]{0,20}(?:\.\d{1,12})?|\.\d{1,12}"
_OF = re.compile(
    r"(?<![\d.,/])(\d[\d,]{0,20})\s*(?:/|out of|of)\s*(\d[\d,]{0,20})(?![\d.,/]*\d|\s*%)"
)
_LEADING = re.compile(
    rf"^[~≈<>=\s]*(?:avg\.?|mean)?\s*({_NUMBER})\s*(%|‰|x\b|×|[a-zA-Z][\w/.%-]*)?"
)
_MARKS = re.compile(r"[*_`\"'$\\]|</?\w+>|&nbsp;")


@dataclass(frozen=True)
class Figure:
    """A number, its unit ("" without one), and (accepted, drafted) where the cell counts both."""

    value: float
    unit: str
    of: tuple[int, int] | None = None


def read_cell(text: str) -> Figure | None:
    """The figure that a cell or value begins with; None where it begins with none.

    >>> read_cell("**`67.23%`** (`1307/1944`)")
    Figure(value=67.23, unit='%', of=(1307, 1944))
    >>> read_cell("3.02 tokens / step").value, read_cell("none"), read_cell("2026-11-20")
    (3.02, None, None)
    """
    plain = _MARKS.sub("", text[:200]).strip()
    counted = _OF.search(plain)
    of = None
    if counted and counted.start() < 60:
        accepted, drafted = (int(n.replace(",", "")) for n in counted.groups())
        of = (accepted, drafted) if accepted <= drafted < 10**15 else None
    found = _LEADING.match(plain)
    if found is None:
        return None
    rest = plain[found.end(1) :]
    if re.match(r"[-:.]\d", rest) or (rest.startswith("/") and of is None):
        return None  # a date, a time, a version
    value = float(found[1].replace(",", ""))
    return Figure(value, (found[2] or "").lower(), of) if value < 1e15 else None


def numbers_in(text: str) -> list[Figure] | None:
    """The figures of a list such as `[0.81, 0.60]` or `0.81 / 0.60 / 0.42`; None for anything else.

    >>> [f.value for f in numbers_in("81% / 60%")]
    [81.0, 60.0]
    """
    parts = re.split(r"\s*[,;/|→]\s*|\s+", _MARKS.sub("", text).strip(" ()[]{}"))
    found = [read_cell(part) for part in parts if part]
    return [f for f in found if f] if len(found) > 1 and None not in found else None
