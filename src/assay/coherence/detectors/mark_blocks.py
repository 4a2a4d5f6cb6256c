"""Floods in blocks: one line of marks over and over, with another line after each block."""

from __future__ import annotations

import re
from collections import Counter

from assay.coherence.detection import Detection, Family
from assay.coherence.text import TextView

LEAST_LINES, LEAST_BLOCK = 60, 8
"""Equal lines in all, and in a row in each of two blocks at least."""
SHARE = 0.75
"""Share of the lines that the flood makes up."""
_LINE = re.compile(r"[^\n]+")
_MARKS = re.compile(r"[^\w\s]{1,6}")
_FRAMES = frozenset(("|", "||", "*", "-", "//", ">", ">>", "}", "{", "};", ");", "…", "..."))
"""Lines that code, quotations and drawings have in rows."""


def detect_mark_blocks(view: TextView) -> Detection | None:
    """Find lines of the same marks that fill the text in two blocks and more."""
    if view.text.count("\n") < LEAST_LINES:
        return None
    lines = [m for m in _LINE.finditer(view.text) if m.group().strip()]
    if len(lines) < LEAST_LINES:
        return None
    words = [m.group().strip() for m in lines]
    line, count = Counter(words).most_common(1)[0]
    if count < max(LEAST_LINES, SHARE * len(words)) or line in _FRAMES:
        return None
    if not _MARKS.fullmatch(line):
        return None
    blocks, run, first = 0, 0, None
    for at, word in enumerate([*words, ""]):
        if word == line:
            run += 1
            continue
        if run >= LEAST_BLOCK:
            blocks += 1
            first = at - run if first is None else first
        run = 0
    if blocks < 2 or first is None:
        return None
    evidence = {"line": line, "lines": count, "blocks": blocks}
    return Detection("mark_blocks", lines[first].start(), lines[-1].end(), evidence, Family.MARKS)
