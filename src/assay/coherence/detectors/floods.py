"""Floods: one character, few characters or bare brackets over and over.

How long a run may be depends on the character: rules, banners and progress bars are drawn with `-`,
`=`, `*`, `#`; base64 of zeros is full of `A`; people do not write sixty `!`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from assay.coherence.arrays import has_stretch, running_count, true_stretches
from assay.coherence.detection import Detection, Family
from assay.coherence.detectors.repeated_units import family_of
from assay.coherence.text import Ending, TextView

MIN_RUN = 8
_NEWLINES = re.compile(r"\n\s{7,}")
_BLANKS = re.compile(r"[^\S\n]{32,}")
_BLOCK_LINE = re.compile(r"[A-Za-z0-9+/_=*.,:-]{32,}")

_RULES = set("-=*#_~.+/\\|:·•…‐‑–—―¯^,;")
NEWLINE_LIMIT = 16
BLANK_LIMIT = 256
CUT_BLANKS = 32
"""Blanks that may stand at the end of a text that the server cut: code is rarely indented so far.
"""
CUT_LOOK, CUT_VISIBLE = 240, 0.25
"""Code points at the end of a text that the server cut, and the share of them that one must see."""
CUT_LETTERS = 32
"""Equal letters that may stand there; zeros in base64 are `A`."""
DOMINATED, DOMINANCE = 100, 0.75
"""Characters of a window, and the share of it that one letter may not reach."""
CUT_WINDOW = 80
"""Characters at the end of a text that the server cut."""
NEAR = 120
"""Code points looked at on either side of a run; a longer line is not a line of a drawing."""


def detect_flood(view: TextView) -> Detection | None:
    """The first flood of the text."""
    floods = (
        _character_flood(view),
        _dominated(view),
        _cut_flood(view),
        _newline_flood(view),
        _blank_flood(view),
    )
    found = [d for d in floods if d]
    return min(found, key=lambda d: d.onset_char, default=None)


def run_limit(char: str) -> int:
    """How many times `char` may stand in a row."""
    if char in _RULES or "\u2500" <= char <= "\u259f":
        return 160
    if char.isdigit():
        return 120
    if char.isascii() and char.isalpha():
        return 60
    return 32


def _character_flood(view: TextView) -> Detection | None:
    text = view.text
    short = len(text.strip())
    for start, end in _runs(view):
        char = text[start]
        if char == "\ufffd" or char.isspace():
            continue  # `tokens` knows the one, blanks have limits of their own
        length = end - start
        limit = run_limit(char)
        if end == len(text) and view.ending is Ending.CUT and char.isalpha() and char != "A":
            limit = min(limit, CUT_LETTERS)
        least = 24 if char in _RULES else 16 if char.isalpha() else 8
        whole = length >= 0.9 * short and length >= least and not char.isdigit()
        if (length >= limit and not _drawn(view, start, end, limit)) or whole:
            kind = "asterisk_attractor" if char == "*" else "single_char_flood"
            return Detection(
                kind,
                start,
                end,
                {"char": char, "code_point": f"U+{ord(char):04X}", "count": length},
                *family_of(kind),
            )
    return None


def _runs(view: TextView) -> Iterator[tuple[int, int]]:
    """Spans of `MIN_RUN` and more equal characters."""
    same = view.codes[1:] == view.codes[:-1]
    if has_stretch(same, MIN_RUN - 1):
        for start, end in zip(*true_stretches(same), strict=True):
            if end + 1 - start >= MIN_RUN:
                yield int(start), int(end) + 1


def _drawn(view: TextView, start: int, end: int, limit: int) -> bool:
    """Whether the run belongs to a drawing: a wide table, the line under a title, or a block of
    encoded data in lines of one width.
    """
    line_start, line_end = view.line_at(start)
    title = view.line_at(max(line_start - 1, 0))
    if (
        (view.text[start] in _RULES or view.text[start] in "\"'`")
        and (start, end) == (line_start, line_end)
        and 0 <= end - start - (title[1] - title[0]) <= 2
    ):
        return end - start < 8 * limit and len(set(view.text[slice(*title)])) > 4
    around = (
        view.text[max(line_start, start - NEAR) : start]
        + view.text[end : min(line_end, end + NEAR)]
    )
    if view.text[start] in _RULES and ("|" in around or "+" in around):
        return end - start < 8 * limit
    line = view.text[line_start : min(line_end, line_start + NEAR)]
    if not _BLOCK_LINE.fullmatch(line.strip()):
        return False
    if view.text[start] == "A" and end - start == line_end - line_start <= 76:  # zeros in base64
        after = view.text[line_end + 1 : 2 * line_end - line_start + 1].rstrip()
        return view.text[line_start - end + start - 1 : line_start - 1] == line or set(after) == {
            "A"
        }
    neighbours = {
        view.line_at(max(line_start - 1, 0)),
        view.line_at(min(line_end + 1, len(view.text))),
    } - {(line_start, line_end)}
    own = view.text[max(line_start, start - NEAR) : min(line_end, end + NEAR)]
    if _BLOCK_LINE.fullmatch(own.strip()) and len(set(own)) > 4:
        return True  # one long line of data
    # A flood that a line break cuts into equal lines has nothing else in its neighbours either.
    return any(
        b - a == line_end - line_start and len(set(view.text[a:b])) > 4 for a, b in neighbours
    )


def _dominated(view: TextView) -> Detection | None:
    """A stretch in which one letter crowds out the others, as in `MMMMmMMmMMMM`."""
    codes = view.codes
    if len(codes) < DOMINATED:
        return None
    known, counts = np.unique(codes, return_counts=True)
    for code in known[np.argsort(-counts)][:6].tolist():
        char = chr(code)
        if not char.isalpha() or char == "A" or counts[known == code][0] < DOMINATED * DOMINANCE:
            continue
        sums = np.concatenate(([0], np.cumsum(codes == code)))
        places = np.flatnonzero(sums[DOMINATED:] - sums[:-DOMINATED] >= DOMINANCE * DOMINATED)
        if len(places):
            onset = int(places[0]) + int(np.argmax(codes[places[0] :] == code))
            return Detection(
                "single_char_flood",
                onset,
                int(places[-1]) + DOMINATED,
                {"char": char, "in_window": DOMINATED},
                Family.FLOOD,
            )
    return None


def _cut_flood(view: TextView) -> Detection | None:
    """One character that fills the end of a text that the server cut: rules and banners come to an
    end.
    """
    if view.ending is not Ending.CUT or len(view.codes) < CUT_WINDOW:
        return None
    tail = view.codes[-CUT_WINDOW:]
    known, counts = np.unique(tail, return_counts=True)
    code = int(known[np.argmax(counts)])
    char = chr(code)
    # Zeros in base64 are full of A, and many texts are indented.
    if counts.max() < DOMINANCE * CUT_WINDOW or char in "A \t\n":
        return None
    # Words stand beside a dotted line or a blank to fill in, and drawings have short lines.
    end = view.text[-CUT_WINDOW:]
    if char in _RULES and (sum(map(str.isalnum, end)) > 2 or any(map(str.isspace, end))):
        return None
    # It begins where the character first takes over, looking back from the end.
    same = running_count(view.codes == code)
    share = (same[-1] - same[:-1]) / np.arange(len(view.codes), 0, -1)
    onset = int(np.argmax((share >= DOMINANCE) & (view.codes == code)))
    kind = (
        "blank_flood"
        if char.isspace()
        else "asterisk_attractor"
        if char == "*"
        else "single_char_flood"
    )
    count = int(same[-1] - same[onset])
    evidence = {"char": char, "code_point": f"U+{code:04X}", "count": count}
    return Detection(kind, onset, len(view.codes), evidence, *family_of(kind))


def _newline_flood(view: TextView) -> Detection | None:
    for match in _NEWLINES.finditer(view.text):
        count = match.group().count("\n")
        if count >= NEWLINE_LIMIT:
            evidence = {"newlines": count}
            return Detection("newline_loop", *match.span(), evidence, *family_of("newline_loop"))
    return None


def _blank_flood(view: TextView) -> Detection | None:
    for match in _BLANKS.finditer(view.text):
        trailing = match.end() == len(view.text)
        limit = BLANK_LIMIT // 2 if trailing else BLANK_LIMIT
        if trailing and view.ending is Ending.CUT:
            limit = CUT_BLANKS
        if match.end() - match.start() >= limit and not _pads_a_cell(view, *match.span()):
            evidence = {"blanks": match.end() - match.start()}
            return Detection("blank_flood", *match.span(), evidence, *family_of("blank_flood"))
    return _mostly_blank(view)


def _pads_a_cell(view: TextView, start: int, end: int) -> bool:
    """Whether the blanks fill up a cell of a table, whose other rows are as wide."""
    line_start, line_end = view.line_at(start)
    if (
        view.text[line_start] != "|"
        or view.text[end : end + 1] != "|"
        or end - start >= 8 * BLANK_LIMIT
    ):
        return False
    beside = {view.line_at(max(line_start - 1, 0)), view.line_at(min(line_end + 1, len(view.text)))}
    return any(b - a == line_end - line_start for a, b in beside - {(line_start, line_end)})


def _mostly_blank(view: TextView) -> Detection | None:
    """Blanks and line breaks with hardly a word between them, up to the cut."""
    end = view.text[-CUT_LOOK:]
    visible = sum(not c.isspace() for c in end)
    if (
        view.ending is not Ending.CUT
        or 2 * len(end) < CUT_LOOK
        or not 0 < visible < CUT_VISIBLE * len(end)
    ):
        return None
    first = next(i for i, c in enumerate(end) if c.isspace())
    onset = len(view.text) - len(end) + first
    return Detection(
        "blank_flood",
        onset,
        len(view.text),
        {"blanks": len(end) - visible},
        *family_of("blank_flood"),
    )
