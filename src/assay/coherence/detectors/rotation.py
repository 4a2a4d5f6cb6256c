"""Rotation: a few words or sentences that take turns without end and without a fixed order.

Exact periods miss it ("SMS in the SMS SMS in the English and SMS"), as they miss a train of
thought that puts the same dozen terms into one template for pages.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter

import numpy as np

from assay.coherence.arrays import distinct_in_windows
from assay.coherence.detection import Detection, Family
from assay.coherence.text import TextView

WINDOW, MAX_DISTINCT = 60, 12
"""Words of a passage on one line, and how many different ones it may get along with."""
LINE_MARKS, LINE_LETTERS, LEAST_LINE = 0.15, 0.55, 200
LONG, LONG_DISTINCT = 300, 56
"""The same for prose over any number of lines that breaks off; sane prose has 75 and more different
words among so many.
"""
CLOSE = 12
"""Words between two new ones by which sane text is told from an exception."""
MIN_SENTENCES, MAX_DIGITS, MAX_LONG_MARKS = 1 / 40, 0.05, 0.3
"""Sentence ends a word, and shares of numbers and of marks among the tokens, by which prose is told
from data.
"""


_LINE = re.compile(r"[^\n]+")
_ANY_WORD = re.compile(r"[^\W\d_]+")
_PIECE = re.compile(r"\S+")


def detect_few_words(view: TextView) -> Detection | None:
    """The first passage on one line of `WINDOW` words with at most `MAX_DISTINCT`
    different ones.
    """
    for line in _LINE.finditer(view.text):
        if line.end() - line.start() < LEAST_LINE:
            continue
        matches = list(_ANY_WORD.finditer(line.group()))
        words = [m.group().lower() for m in matches]
        index = next(
            iter(np.flatnonzero(distinct_in_windows(words, WINDOW) <= MAX_DISTINCT).tolist()), None
        )
        if index is None:
            continue
        start, end = matches[index].start(), matches[index + WINDOW - 1].end()
        passage = line.group()[start:end]
        marks = sum(not c.isalnum() and not c.isspace() for c in passage)
        if marks > LINE_MARKS * len(passage) or sum(map(str.isalpha, passage)) < LINE_LETTERS * len(
            passage
        ):
            continue  # code, a table, a list of numbers
        window = Counter(words[index : index + WINDOW])
        used = [word for word, _ in window.most_common(6)]
        evidence = {"words": used, "distinct": len(window)}
        return Detection(
            "few_words", line.start() + start, line.start() + end, evidence, family=Family.LOOP
        )
    return None


def detect_rotation(view: TextView) -> Detection | None:
    """Prose that breaks off and in which, up to the end, the same few words take turns."""
    if not view.cut or len(view.words) < LONG:
        return None
    tokens = view.tokens
    numbers = sum(w.isdecimal() for w in view.words)
    if numbers > MAX_DIGITS * len(tokens) or 1 - view.is_word.mean() > MAX_LONG_MARKS:
        return None
    pieces = list(_PIECE.finditer(view.text))
    words = [m.group().strip(".,;:!?\"'()[]*_`").lower() for m in pieces]
    if len(words) < LONG:
        return None
    ends = (set(words[-max(LONG, len(words) // part) :]) for part in (2, len(words)))
    used = next((end for end in ends if len(end) <= LONG_DISTINCT), None)
    if used is None:
        return None
    # It begins where words last came close together that the end does without.
    new = [index for index, word in enumerate(words) if word not in used]
    first = max((b + 1 for a, b in itertools.pairwise(new) if b - a <= CLOSE), default=0)
    passage = view.text[pieces[first].start() :]
    sentences = sum(passage.count(mark) for mark in (". ", ".\n", "? ", "?\n", "! ", "!\n", "。"))
    if (
        len(words) - first < LONG
        or sentences < MIN_SENTENCES * (len(words) - first)
        or sum(map(str.isalpha, passage)) < 0.6 * len(passage)
    ):
        return None
    evidence = {"words": len(words) - first, "distinct": len(used)}
    return Detection(
        "few_words", pieces[first].start(), view.visible_end, evidence, family=Family.LOOP
    )
