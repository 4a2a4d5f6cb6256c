"""Thesaurus drift: a long row of real words with no grammar between them, each a neighbour of the
last.

No word repeats and every word is real, so neither repetition nor spelling shows it. What is
missing does: over forty words of English without a mark, a line break, a number and hardly a
function word are no sentence.
"""

from __future__ import annotations

import re

import numpy as np

import assay.coherence.language as language
from assay.coherence.arrays import count_in_windows, distinct_in_windows
from assay.coherence.detection import Detection, Family
from assay.coherence.language import FUNCTION_WORDS
from assay.coherence.text import TextView

MIN_WORDS = 40
MAX_FUNCTION = 0.05
MIN_KNOWN = 0.85
MIN_DISTINCT = 0.6
_ROW = re.compile("[a-zA-Z ]+")
MIN_ROW = 3 * MIN_WORDS
"""Code points of a row that is looked at; asked after the match, since the pattern would scan short
rows again and again.
"""

_WORD = re.compile("[a-zA-Z]+")


def detect_drift(view: TextView) -> Detection | None:
    """The first row of words without grammar."""
    bloom = language.tables().bloom
    for row in _ROW.finditer(view.text):
        if row.end() - row.start() < MIN_ROW:
            continue
        spans = [m.span() for m in _WORD.finditer(row.group())]
        words = [row.group()[a:b].lower() for a, b in spans]
        known = {w: language.is_known_word(w, bloom) for w in set(words)}
        distinct = distinct_in_windows(words, MIN_WORDS)
        function = count_in_windows([w in FUNCTION_WORDS for w in words], MIN_WORDS)
        familiar = count_in_windows([known[w] and len(w) > 1 for w in words], MIN_WORDS)
        short = count_in_windows([len(w) <= 2 for w in words], MIN_WORDS)  # symbols of the elements
        drift = np.flatnonzero(
            (function <= MAX_FUNCTION * MIN_WORDS)
            & (familiar >= MIN_KNOWN * MIN_WORDS)
            & (distinct >= MIN_DISTINCT * MIN_WORDS)
            & (short <= MIN_WORDS / 2)
        )
        if len(drift):
            onset = row.start() + spans[drift[0]][0]
            return Detection(
                "thesaurus_drift",
                onset,
                row.end(),
                {"words": len(words) - int(drift[0])},
                Family.SALAD,
            )
    return None
