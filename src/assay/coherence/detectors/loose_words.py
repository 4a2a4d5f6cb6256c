"""Loose words: English words side by side that English never puts side by side, hardly a function
word between them.
"""

from __future__ import annotations

import re

import numpy as np

import assay.coherence.language as language
from assay.coherence.arrays import count_in_windows
from assay.coherence.detection import Detection, Family
from assay.coherence.language import FUNCTION_WORDS
from assay.coherence.text import TextView

LOOSE_WINDOW, LOOSE_PAIRS, KNOWN_PAIRS = 64, 14, 0.07
"""Tokens of a window, pairs of known lower-case words in it, and the share of these that a salad
may share with English.
"""
LOOSE_FUNCTION, LOOSE_KNOWN, LOOSE_BREAKS = 0.2, 0.80, 0.15
"""At most so many function words, at least so many known ones among the long words, and at most so
many line breaks.
"""
MIXED_PAIRS, MIXED_LOWER, MIXED_KNOWN = 18, 5, 0.07
"""The same where names and capitals stand between: pairs of known words, lower-case ones of them,
and the shared ones.
"""
LONG_WORD = 5
_LIST_ITEM = re.compile(r"^[ \t]*(?:[•|]|(?:[-*+]|\d+[.):]?)(?=\s)).*$", re.MULTILINE)


def detect_loose_words(view: TextView) -> Detection | None:
    """The first window of words without grammar, marks and capitals between them or not."""
    total = len(view.words)
    if total < LOOSE_PAIRS * 2:
        return None
    distinct, which = view.distinct_words
    latin = np.array([w.isascii() and w.isalpha() for w in distinct])[which]
    if int(latin.sum()) < LOOSE_PAIRS + 1:
        return None
    bloom = language.tables().bloom
    known = np.array([language.is_known_word(w.lower(), bloom) for w in distinct])[which] & latin
    lower = np.array([w.islower() for w in distinct])[which] & known
    function = np.array([w.lower() in FUNCTION_WORDS for w in distinct])[which]
    long = np.array([len(w) >= LONG_WORD for w in distinct])[which] & latin
    starts, ends = view.tokens.starts, view.tokens.ends
    adjacent = (starts[1:] == ends[:-1] + 1) & (view.codes[ends[:-1]] == ord(" "))
    keys = language.pair_numbers(language.word_keys(distinct)[which])
    either = adjacent & known[1:] & known[:-1]
    first_seen = np.zeros(len(keys), dtype=bool)
    first_seen[np.unique(keys, return_index=True)[1]] = True
    either &= first_seen
    for item in _LIST_ITEM.finditer(view.text):  # a list names things, and needs no grammar
        first, end = np.searchsorted(starts, item.span())
        either[first : max(first, end - 1)] = False
    pairs = either & lower[1:] & lower[:-1]
    shared = either & language.is_in(keys, language.tables().pairs)
    breaks = np.append(view.codes[ends[:-1]] == ord("\n"), False)
    window = min(LOOSE_WINDOW, total)
    n, k, m, j = (
        count_in_windows(flags, window - 1) for flags in (pairs, pairs & shared, either, shared)
    )
    words, functions, longs, known_longs, lines = (
        count_in_windows(flags, window) for flags in (latin, function, long, long & known, breaks)
    )
    loose = (
        (
            ((n >= LOOSE_PAIRS) & (k <= KNOWN_PAIRS * n))
            | ((m >= MIXED_PAIRS) & (n >= MIXED_LOWER) & (j <= MIXED_KNOWN * m))
        )
        & (functions <= LOOSE_FUNCTION * words)
        & (known_longs >= LOOSE_KNOWN * longs)
        & (lines <= LOOSE_BREAKS * window)
    )
    if not loose.any():
        return None
    first = int(np.argmax(loose))
    last = min(int(np.flatnonzero(loose)[-1]) + window, total) - 1
    at = first + int(np.argmax(either[first:]))
    evidence = {"pairs": int(m[first]), "usual_pairs": int(j[first])}
    return Detection("word_salad", int(starts[at]), int(ends[last]), evidence, Family.SALAD)
