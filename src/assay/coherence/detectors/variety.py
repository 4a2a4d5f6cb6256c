"""Few words: a passage on one line that gets along with a handful of words in no fixed order.

Exact periods miss it ("SMS in the SMS SMS in the English and SMS"), as they miss the near-copies that a repetition
penalty makes of a loop.
"""

from __future__ import annotations

import re
from collections import Counter

from assay.coherence.detectors.base import Detection
from assay.coherence.textview import TextView

WINDOW = 60
MAX_DISTINCT = 12
MAX_MARKS = 0.15
_LINE = re.compile(r"[^\n]+")
MIN_LINE = 200
_WORD = re.compile(r"[^\W\d_]+")


def detect(view: TextView) -> Detection | None:
    """The first passage of `WINDOW` words with at most `MAX_DISTINCT` different ones."""
    for line in _LINE.finditer(view.text):
        if line.end() - line.start() < MIN_LINE:
            continue
        matches = list(_WORD.finditer(line.group()))
        if len(matches) < WINDOW:
            continue
        words = [m.group().lower() for m in matches]
        index = _first_poor_window(words)
        if index is None:
            continue
        start, end = matches[index].start(), matches[index + WINDOW - 1].end()
        passage = line.group()[start:end]
        marks = sum(not c.isalnum() and not c.isspace() for c in passage)
        if marks > MAX_MARKS * len(passage) or sum(c.isalpha() for c in passage) < 0.55 * len(passage):
            continue  # code, a table, a list of numbers
        window = Counter(words[index : index + WINDOW])
        used = [word for word, _ in window.most_common(6)]
        return Detection(
            "few_words", line.start() + start, line.start() + end, {"words": used, "distinct": len(window)}
        )
    return None


def _first_poor_window(words: list[str]) -> int | None:
    counts: dict[str, int] = {}
    for index, word in enumerate(words):
        counts[word] = counts.get(word, 0) + 1
        if index >= WINDOW:
            old = words[index - WINDOW]
            counts[old] -= 1
            if not counts[old]:
                del counts[old]
        if index >= WINDOW - 1 and len(counts) <= MAX_DISTINCT:
            return index - WINDOW + 1
    return None
