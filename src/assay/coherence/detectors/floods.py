"""Floods: one character, few characters or bare brackets over and over.

How long a run may be depends on the character: rules, banners and progress bars are drawn with `-`,
`=`, `*`, `#`; base64 of zeros is full of `A`; nobody writes sixty `!`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from math import log2

import numpy as np

from assay.coherence.text import (
    Detection,
    Ending,
    TextView,
    has_stretch,
    running_count,
    true_stretches,
)

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
    neighbours = (
        view.line_at(max(line_start - 1, 0)),
        view.line_at(min(line_end + 1, len(view.text))),
    )
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
    return Detection(kind, onset, len(view.codes), evidence)


def _newline_flood(view: TextView) -> Detection | None:
    for match in _NEWLINES.finditer(view.text):
        count = match.group().count("\n")
        if count >= NEWLINE_LIMIT:
            return Detection("newline_loop", match.start(), match.end(), {"newlines": count})
    return None


def _blank_flood(view: TextView) -> Detection | None:
    for match in _BLANKS.finditer(view.text):
        trailing = match.end() == len(view.text)
        limit = BLANK_LIMIT // 2 if trailing else BLANK_LIMIT
        if trailing and view.ending is Ending.CUT:
            limit = CUT_BLANKS
        if match.end() - match.start() >= limit and not _pads_a_cell(view, *match.span()):
            return Detection(
                "blank_flood", match.start(), match.end(), {"blanks": match.end() - match.start()}
            )
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
    return Detection("blank_flood", onset, len(view.text), {"blanks": len(end) - visible})


# Floods of few characters: the end of a text gets along with two or three of them, blanks and line
# breaks between or not.
#
# `? ? ?` on lines of their own, `. , . . ,`, `$$'$$''$`: no run is long and no period fits. The
# entropy of the characters tells: prose has over 4 bits a character, code over 3.5. So does the
# share of the commonest one, whatever stands between: of prose every eighth is an `e`. What is
# drawn (rules, boxes) or counted (numbers, hex dumps, DNA) has few as well, and is left alone.

CUT = ((80, 2.0), (48, 1.5))
"""Visible characters at the end of a text that the server cut, and the bits for each that a sane
end has.
"""
WHOLE = ((160, 1.7),)
"""The same where it ended or nothing is known."""
CROWD, CROWDED, CUT_CROWDED = 200, 48, 24
"""Visible characters at the end, and how many of them there must be, of which one may make up no
more than
"""
CUT_SHARE, WHOLE_SHARE = 0.4, 0.5
"""so much."""
LEAST = 24
"""A cut text with fewer visible characters says nothing."""
MAIN_SHARE = 0.85
"""The main characters are the commonest ones that together make up so much of the end."""
DRAWN_SHARE = 0.6
"""An end of which so much is drawn is a drawing."""
_DRAWN = frozenset(".-=#_~+/\\|*·•‐‑–—―¯^<>[]")
_COUNTED = frozenset(",:;")
ONE_LINE = 80
"""Code points of a line that is longer than those of matrices and dumps."""
DRAWN_RUN, RUNS_LOOK = 6.0, 600
"""A character of drawings is no drawing in rows shorter than this on average, over so many code
points.
"""
COUNTED_SHARE, BASES_SHARE, LEAST_BASE = 0.3, 0.9, 0.03
"""Shares of digits in lists of numbers, of all bases in DNA, and of each of three bases at least.
"""
ROW, ROW_WORDS, ROW_BITS, ROW_OTHERS = 120, 0.05, 2.0, 0.08
"""So many code points with hardly a letter or digit, of fewer bits, are no drawing if so much is
never drawn with.
"""
_BASES = frozenset("acgtun")
REACH = 4000


def detect_poor_tail(view: TextView) -> Detection | None:
    """An end of few characters."""
    if view.ending is Ending.OPEN:
        return None
    visible = "".join(view.text[-REACH:].split()).casefold()
    if view.ending is not Ending.CUT:
        looks = [look for look in WHOLE if len(visible) >= look[0]]
    else:
        looks = list(CUT) if len(visible) >= LEAST else []
    found = (_poor(view, visible[-size:], limit) for size, limit in looks)
    return next((d for d in found if d), None) or _crowded(view, visible[-CROWD:])


def _poor(view: TextView, end: str, limit: float) -> Detection | None:
    counts = Counter(end).most_common()
    entropy = -sum(n / len(end) * log2(n / len(end)) for _, n in counts)
    main = _main(counts, len(end))
    drawn = sum(n for c, n in counts if c in _DRAWN or "\u2500" <= c <= "\u259f")
    if entropy > limit or (drawn >= DRAWN_SHARE * len(end) and not _is_row(view, entropy, end)):
        return None
    if _is_data(main) or _is_code_of_letters(end):
        return None
    onset = _onset(view, main)
    kind = "single_char_flood" if counts[0][1] > len(end) / 2 else "few_characters"
    return Detection(
        kind, onset, view.visible_end, {"chars": "".join(main), "bits": round(entropy, 2)}
    )


def _is_row(view: TextView, entropy: float, end: str) -> bool:
    """Whether the end is marks alone, some of which no drawing is made of, up to the cut."""
    words = sum(map(str.isalnum, view.text[-ROW:]))
    others = sum(
        not (c.isalnum() or c in _DRAWN or c == "`") for c in end
    )  # a fence stands around drawings
    return (
        view.ending is Ending.CUT
        and words <= ROW_WORDS * ROW
        and "|" not in end
        and "+" not in end
        and entropy <= ROW_BITS
        and others >= ROW_OTHERS * len(end)
    )


def _crowded(view: TextView, end: str) -> Detection | None:
    """One character that makes up half of the end, unless numbers or drawings do so by themselves."""
    cut = view.ending is Ending.CUT
    if len(end) < (CUT_CROWDED if cut else CROWDED):
        return None
    char, count = Counter(end).most_common(1)[0]
    if count < (CUT_SHARE if cut else WHOLE_SHARE) * len(end):
        return None
    numbers = sum(map(str.isdigit, end)) >= COUNTED_SHARE * len(end)
    if char.isdigit():
        flood = cut and count > len(end) / 2 and _digits_on_one_line(view)
    elif char == "|":
        flood = cut and count > len(end) / 2
    elif char in _DRAWN or "\u2500" <= char <= "\u259f":
        flood = (
            cut
            and count > len(end) / 2
            and char != "*"
            and set(end) != set("#.")
            and _mean_run(view, char) < DRAWN_RUN
        )
    else:
        flood = not _is_code_of_letters(end) and not (numbers and char in _COUNTED)
    if not flood:
        return None
    onset = _onset(view, [char], CUT_SHARE)
    return Detection(
        "single_char_flood",
        onset,
        view.visible_end,
        {"char": char, "share": round(count / len(end), 2)},
    )


def _is_code_of_letters(end: str) -> bool:
    """Whether the end is DNA, of three bases and more, or zeros in base64."""
    bases = Counter(c for c in end if c in _BASES)
    common = sum(count >= LEAST_BASE * len(end) for count in bases.values())
    return (common >= 3 and bases.total() >= BASES_SHARE * len(end)) or set(end) <= set("a=")


def _digits_on_one_line(view: TextView) -> bool:
    """Whether the last line is a long row of digits, and no list: matrices and dumps have short
    lines.
    """
    line = view.text[view.line_at(view.visible_end - 1)[0] : view.visible_end][-REACH:]
    visible = "".join(line.split())
    return (
        len(visible) >= CUT_CROWDED
        and len(line) >= ONE_LINE
        and "|" not in visible
        and visible.count(",") < len(visible) / 10
    )


def _mean_run(view: TextView, char: str) -> float:
    """How many of `char` stand in a row at the end, on average: rules, leaders and forms have long
    rows of them.
    """
    runs = [len(run) for run in re.findall(f"{re.escape(char)}+", view.text[-RUNS_LOOK:])]
    return sum(runs) / len(runs) if runs else 0.0


def _main(counts: list[tuple[str, int]], total: int) -> list[str]:
    """The commonest characters that make up `MAIN_SHARE` of the whole."""
    main: list[str] = []
    covered = 0
    for char, count in counts:
        if covered >= MAIN_SHARE * total:
            break
        main.append(char)
        covered += count
    return main


def _is_data(main: list[str]) -> bool:
    """Whether numbers use these characters by themselves."""
    return any(map(str.isdigit, main)) and all(
        c.isdigit() or c in _DRAWN or c in _COUNTED for c in main
    )


def _onset(view: TextView, main: list[str], least: float = MAIN_SHARE) -> int:
    """Where the main characters take over, looking back from the end."""
    text = view.text[: view.visible_end].casefold()
    if len(text) != view.visible_end:  # some letters fold into two
        text = view.text[: view.visible_end]
    visible = [i for i, c in enumerate(text) if not c.isspace()]
    is_main = np.array([text[i] in main for i in visible])
    share = np.cumsum(is_main[::-1]) / np.arange(1, len(is_main) + 1)
    first = len(is_main) - 1 - int(np.flatnonzero((share >= least) & is_main[::-1])[-1])
    return visible[first]


# Bare brackets over and over: `{}{}{}{}`, `[] [] []`, `}{][}{`, as a broken model writes them in
# place of a call or of JSON.
#
# Code has brackets in rows too, by rules of its own: they hold something, close in their order,
# stand in a format string or are the arguments of a macro. JSON lines keep one object a line. All
# of these are left alone.


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
    """The first row of bare brackets that nobody would write."""
    for row in _EMPTY.finditer(view.text):
        count = len(_PAIR.findall(row.group()))
        if count >= _limit(view, row):
            evidence = {"unit": _PAIR.findall(row.group())[0], "repeats": count}
            return Detection("bracket_loop", row.start(), row.end(), evidence)
    for row in _ONLY_BRACKETS.finditer(view.text):
        brackets = "".join(row.group().split())
        if len(brackets) >= CROSSED and _crossed(brackets):
            return Detection("bracket_loop", row.start(), row.end(), {"brackets": len(brackets)})
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
