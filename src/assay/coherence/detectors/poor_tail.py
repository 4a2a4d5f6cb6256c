"""Floods of few characters: the end of a text gets along with two or three of them, blanks and line
breaks between or not.

`? ? ?` on lines of their own, `. , . . ,`, `$$'$$''$`: no run is long and no period fits. The
entropy of the characters tells: prose has over 4 bits a character, code over 3.5. So does the
share of the commonest one, with anything between: of prose every eighth is an `e`. What is
drawn (rules, boxes) or counted (numbers, hex dumps, DNA) has few as well, and is left alone.
"""

from __future__ import annotations

import re
from collections import Counter
from math import log2

import numpy as np

from assay.coherence.detection import Detection, Family
from assay.coherence.detectors.repeated_units import family_of
from assay.coherence.text import Ending, TextView

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
        kind,
        onset,
        view.visible_end,
        {"chars": "".join(main), "bits": round(entropy, 2)},
        *family_of(kind),
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
    """One character that makes up half of the end, unless numbers or drawings do so by
    themselves.
    """
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
        Family.FLOOD,
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
