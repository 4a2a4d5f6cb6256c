"""Bare brackets over and over: `{}{}{}{}`, `[] [] []`, `}{][}{`, as a broken model writes them in
place of a call or of JSON.

Code has brackets in rows too, by rules of its own: they hold something, close in their order,
stand in a format string or are the arguments of a macro. JSON lines keep one object a line. All
of these are left alone.
"""

from __future__ import annotations

import re

from assay.coherence.detection import Detection, Family
from assay.coherence.text import Ending, TextView

_EMPTY = re.compile(r"(?:(?:\{ ?\}|\[\]|\(\)) ?){3,}")
_PAIR = re.compile(r"[\[{(] ?[\]})]")
_AROUND = re.compile(r"```\w*|~~~\w*|</?(?:tool_call|tool_response|function|json|answer)>|\s+")
_ONLY_BRACKETS = re.compile(r"[\[\](){}][\[\](){}\s]{46,}[\[\](){}]")
ALONE, AT_END, WITHIN = 3, 8, 16
"""Empty pairs in a row of which nothing else but the text consists, that end it, and that stand
before other text.
"""
ASKED = 16
"""Round pairs in a row: balanced parentheses are a usual exercise."""
QUOTED = 40
"""Empty pairs in a format string, as the arguments of a macro, or behind a name."""
CROSSED = 40
"""Brackets in a row of which some close in the wrong order."""
_OPENS = {")": "(", "]": "[", "}": "{"}


def detect_brackets(view: TextView) -> Detection | None:
    """The first row of bare brackets that people do not write."""
    for row in _EMPTY.finditer(view.text):
        count = len(_PAIR.findall(row.group()))
        if count >= _limit(view, row):
            evidence = {"unit": _PAIR.findall(row.group())[0], "repeats": count}
            return Detection("bracket_loop", row.start(), row.end(), evidence, family=Family.LOOP)
    for row in _ONLY_BRACKETS.finditer(view.text):
        brackets = "".join(row.group().split())
        if len(brackets) >= CROSSED and _crossed(brackets):
            return Detection(
                "bracket_loop",
                row.start(),
                row.end(),
                {"brackets": len(brackets)},
                family=Family.LOOP,
            )
    return None


def _limit(view: TextView, row: re.Match[str]) -> int:
    """How many empty pairs may stand in this row."""
    before, after = view.text[: row.start()], view.text[row.end() :]
    if before[-1:] and (before[-1].isalnum() or before[-1] in "\"'`_\\.>"):
        return QUOTED
    if "(" in row.group():
        return ASKED
    if view.ending is Ending.OPEN:
        return WITHIN
    if not _AROUND.sub("", before) and not _AROUND.sub("", after):
        return ALONE
    return WITHIN if _AROUND.sub("", after) else AT_END


def _crossed(brackets: str) -> bool:
    """Whether some bracket closes another than was opened; what was opened before or closes later
    does not count.
    """
    opened: list[str] = []
    for mark in brackets:
        if mark not in _OPENS:
            opened.append(mark)
        elif opened and opened.pop() != _OPENS[mark]:
            return True
    return False
