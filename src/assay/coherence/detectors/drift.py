"""Thesaurus drift: a long row of real words with no grammar between them, each a neighbour of the last.

No word repeats and every word is real, so neither repetition nor spelling shows it. What is missing does: over forty
words of English without a mark, a line break, a number and hardly a function word are no sentence.
"""

from __future__ import annotations

import re

from assay.coherence import language
from assay.coherence.detectors.base import Detection
from assay.coherence.detectors.units import FUNCTION_WORDS
from assay.coherence.textview import TextView

MIN_WORDS = 40
MAX_FUNCTION = 0.05
MIN_KNOWN = 0.85
MIN_DISTINCT = 0.6
_ROW = re.compile("[a-zA-Z ]+")
MIN_ROW = 3 * MIN_WORDS
"""Code points of a row that is looked at; asked after the match, since the pattern would scan short rows again and again."""

_WORD = re.compile("[a-zA-Z]+")


def detect(view: TextView) -> Detection | None:
    """The first row of words without grammar."""
    for row in _ROW.finditer(view.text):
        if row.end() - row.start() < MIN_ROW:
            continue
        spans = [m.span() for m in _WORD.finditer(row.group())]
        words = [row.group()[a:b].lower() for a, b in spans]
        start = _drift_start(words)
        if start is not None:
            onset = row.start() + spans[start][0]
            return Detection("thesaurus_drift", onset, row.end(), {"words": len(words) - start})
    return None


def _drift_start(words: list[str]) -> int | None:
    """Index of the first stretch of `MIN_WORDS` words that is drift; running sums keep it linear."""
    bloom = language.tables().bloom
    known = {w: language.is_known_word(w, bloom) for w in set(words)}
    function = familiar = 0
    counts: dict[str, int] = {}
    for index, word in enumerate(words):
        function += word in FUNCTION_WORDS
        familiar += known[word]
        counts[word] = counts.get(word, 0) + 1
        if index >= MIN_WORDS:
            old = words[index - MIN_WORDS]
            function -= old in FUNCTION_WORDS
            familiar -= known[old]
            counts[old] -= 1
            if not counts[old]:
                del counts[old]
        if (
            index >= MIN_WORDS - 1
            and function <= MAX_FUNCTION * MIN_WORDS
            and familiar >= MIN_KNOWN * MIN_WORDS
            and len(counts) >= MIN_DISTINCT * MIN_WORDS
        ):
            return index - MIN_WORDS + 1
    return None
