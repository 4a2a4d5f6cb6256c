"""Words that no writer puts so: numbers glued to them, names without end, other scripts, rows
without grammar.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

import assay.coherence.text as language
from assay.coherence.text import (
    FUNCTION_WORDS,
    Detection,
    Spans,
    TextView,
    distinct_in_windows,
    quote,
    running_count,
    true_stretches,
)

# Digit salad: numbers glued to the words of a sentence, or lone digits strewn over blank lines.

_GLUED = re.compile(
    r"\b(?:the|and|but|so|this|that|of|with|was|are|have|we|you|they|it|is|think|which)\d+",
    re.IGNORECASE,
)
_LETTER_DIGIT = re.compile(r"(?<=[A-Za-z])\d")
_GAP = re.compile(r"\n[ \t]*\n[ \t]*\n\s*")
MIN_GLUED = 3


def detect_digits(view: TextView) -> Detection | None:
    """The first of several numbers where no number belongs."""
    glued = list(_glued(view.text))
    # In code such names exist (`is1`, `this2`); there they repeat, and words do not stand around
    # them.
    if len({m.group().lower() for m in glued}) >= MIN_GLUED and len(glued) * 300 > len(view.text):
        return Detection(
            "digit_salad",
            glued[0].start(),
            glued[-1].end(),
            {"glued": [m.group() for m in glued[:5]]},
        )
    return _strewn(view)


def _glued(text: str) -> Iterator[re.Match[str]]:
    """Numbers glued to a common word. Digits that follow a letter are rare, so they are looked for
    first.
    """
    for digit in _LETTER_DIGIT.finditer(text):
        for length in range(2, 6):
            if match := _GLUED.match(text, max(0, digit.start() - length)):
                yield match
                break


def _strewn(view: TextView) -> Detection | None:
    """Three gaps of two blank lines and more, of different heights, with hardly a letter between
    them.
    """
    text = view.text[: view.visible_end]
    gaps = [m.span() for m in _GAP.finditer(text)]
    if len(gaps) < 3:
        return None
    between = "".join(text[a[1] : b[0]] for a, b in itertools.pairwise(gaps))
    heights = {text[a:b].count("\n") for a, b in gaps}
    if (
        len(heights) < 2
        or len(between) > 20 * len(gaps)
        or sum(c.isalpha() for c in between) > len(gaps)
    ):
        return None
    return Detection("digit_salad", gaps[0][0], len(text), {"gaps": len(gaps)})


# Identifier soup: one name that never ends, words glued with underscores, capitals or nothing at
# all.

MIN_PARTS = 20
MIN_GLUED_NAMES = 160
"""Lower-case letters in a row; the longest words of any language stay far below."""
MIN_NAME = 100
_NAME = re.compile(rf"[A-Za-z]\w{{{MIN_NAME},}}")
_HUMP = re.compile(r"[A-Z][a-z]{2,}")
_GLUED_NAME = re.compile(rf"[a-z]{{{MIN_GLUED_NAMES},}}")


def detect_identifiers(view: TextView) -> Detection | None:
    """The first endless name."""
    if all(len(piece) <= MIN_NAME for piece in view.text.split()):
        return None  # the cheap look: names hold no blanks
    for match in _NAME.finditer(view.text):
        name = match.group()
        digits = sum(c.isdigit() for c in name)
        parts = [p for p in name.split("_") if p.isalpha()]
        glued = _GLUED_NAME.search(name)
        soup = (
            (len(parts) >= MIN_PARTS and len(set(parts)) > 4)
            or (len(_HUMP.findall(name)) >= MIN_PARTS and digits < len(name) / 20)
            or (glued is not None and len(set(glued.group())) >= 12)
        )
        if soup:
            return Detection(
                "identifier_soup",
                match.start(),
                match.end(),
                {"length": len(name), "name": quote(name)},
            )
    return None


# Thesaurus drift: a long row of real words with no grammar between them, each a neighbour of the
# last.
#
# No word repeats and every word is real, so neither repetition nor spelling shows it. What is
# missing does: over forty words of English without a mark, a line break, a number and hardly a
# function word are no sentence.

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
        function = _in_windows([w in FUNCTION_WORDS for w in words], MIN_WORDS)
        familiar = _in_windows([known[w] and len(w) > 1 for w in words], MIN_WORDS)
        short = _in_windows([len(w) <= 2 for w in words], MIN_WORDS)  # symbols of the elements
        drift = np.flatnonzero(
            (function <= MAX_FUNCTION * MIN_WORDS)
            & (familiar >= MIN_KNOWN * MIN_WORDS)
            & (distinct >= MIN_DISTINCT * MIN_WORDS)
            & (short <= MIN_WORDS / 2)
        )
        if len(drift):
            onset = row.start() + spans[drift[0]][0]
            return Detection(
                "thesaurus_drift", onset, row.end(), {"words": len(words) - int(drift[0])}
            )
    return None


def _in_windows(flags: Sequence[bool] | NDArray[np.bool_], window: int) -> NDArray[np.int64]:
    """How many flags are true in each window of so many."""
    counts = running_count(np.asarray(flags, dtype=bool))
    return counts[window:] - counts[:-window]


# Strays: short pieces of other scripts in the middle of sentences, where no quotation and no gloss
# asks for them.

NEAR, FAR = 1000, 2000
"""Code points among which so many strays must stand: in one script, glued to other letters, or of
several scripts.
"""
MANY, SOME, FEW_GLUED = 8, 5, 3
BESIDE = 80
"""Code points beside strays of several scripts in which a text names their languages."""
MAX_STRAY = 8
"""Code points of a stray: longer pieces are passages of another language."""
BASE_SHARE, BILINGUAL = 0.7, 0.3
"""Share of the letters that one script has of a text, and that others have of a line which is of
two scripts by right.
"""
_OPENING = frozenset("([{（「『《“\"'«‘`/:=—–-|：＝·•*")
_CLOSING = frozenset(")]}）」』》”\"'»’`/:=—–|：＝*")
_OF_LANGUAGE = re.compile(
    r"languag|translat|\bwords?\b|character|script|letter|alphabet|pronounc|kanji|kana\b|pinyin|hanzi|particle|\bnoun|\bverb"
    r"|grammar|chinese|japanese|korean|russian|arabic|greek|hebrew|hindi|thai\b|cyrillic|\bmeans?\b|meaning|symbol|unicode"
    r"|emoji|idioma|palabra|\bmots?\b|langue|sprache|\bwort|übersetz|caract|zeichen",
    re.IGNORECASE,
)

_LANGUAGES = re.compile(
    r"chinese|mandarin|japanese|korean|russian|ukrainian|bulgarian|arabic|persian|farsi|urdu|greek|hebrew|hindi|marathi|bengali"
    r"|tamil|thai|lao\b|georgian|armenian|mongolian|nepali|serbian"
)


def detect_strays(view: TextView) -> Detection | None:
    """The first of several short pieces of other scripts that nothing accounts for."""
    if view.text.isascii():
        return None
    group = _script_of_class()[language.character_classes(view.codes)]
    lettered = group >= 0
    if not lettered.any():
        return None
    counts = np.bincount(group[lettered])
    base = int(counts.argmax())
    if counts[base] < BASE_SHARE * counts.sum() or counts[base] == counts.sum():
        return None
    strays = list(_strays(view, group, base))
    for size, reach, enough in ((SOME, NEAR, _several_scripts), (MANY, FAR, _unaccounted)):
        for first in range(len(strays) - size + 1):
            piece = strays[first : first + size]
            if piece[-1][0] - piece[0][0] <= reach and enough(view, piece, base):
                shown = [view.text[a:b] for a, b, _, _ in piece]
                return Detection(
                    "mixed_scripts",
                    piece[0][0],
                    strays[-1][1],
                    {"strays": shown, "count": len(strays)},
                )
    return None


def _several_scripts(
    view: TextView, piece: Sequence[tuple[int, int, int, bool]], base: int
) -> bool:
    scripts = len({script for _, _, script, _ in piece})
    glued = sum(glued for _, _, _, glued in piece)
    around = view.text[max(0, piece[0][0] - BESIDE) : piece[-1][1] + BESIDE].casefold()
    named = set(_LANGUAGES.findall(around))
    if glued < FEW_GLUED and len(named) >= len(piece) - 1:
        return False  # "猫 in Japanese, кошка in Russian"
    return scripts >= 3 or (scripts == 2 and glued >= FEW_GLUED)


def _unaccounted(view: TextView, piece: Sequence[tuple[int, int, int, bool]], base: int) -> bool:
    if sum(glued for _, _, _, glued in piece) >= FEW_GLUED:
        return True
    around = view.text[max(0, piece[0][0] - NEAR) : piece[-1][1] + NEAR]
    return base == LATIN and _OF_LANGUAGE.search(around) is None


def _strays(
    view: TextView, group: NDArray[np.int64], base: int
) -> Iterator[tuple[int, int, int, bool]]:
    """Start, end, script, and whether it is glued to another letter, of each short piece of another
    script.
    """
    text = view.text
    other = (group >= 0) & (group != base) & (group != LATIN)
    letters, others = running_count(group >= 0), running_count(other)
    spans: list[list[int]] = []
    for start, end in zip(*(edges.tolist() for edges in true_stretches(other)), strict=True):
        if spans and _one_phrase(
            text[spans[-1][1] : min(start, spans[-1][1] + MAX_STRAY)], start - spans[-1][1]
        ):
            spans[-1][1] = end
        else:
            spans.append([start, end])
    fences = Spans(view.fences)
    for start, end in spans:
        before, after = (
            text[max(0, start - 2) : start].rstrip()[-1:],
            text[end : end + 2].lstrip()[:1],
        )
        symbol = end - start <= 2 and int(group[start]) in (GREEK, OTHER)  # of a formula
        if (
            end - start > MAX_STRAY
            or symbol
            or before in _OPENING
            or after in _CLOSING
            or start in fences
        ):
            continue
        a, b = view.line_at(start)
        if "|" not in text[a : min(b, a + NEAR)] and others[b] - others[a] < BILINGUAL * (
            letters[b] - letters[a]
        ):
            glued = (start > 0 and group[start - 1] >= 0) or (end < len(text) and group[end] >= 0)
            yield start, end, int(group[start]), bool(glued)


def _one_phrase(between: str, gap: int) -> bool:
    return gap < MAX_STRAY and "\n" not in between and not any(map(str.isalnum, between))


LATIN, GREEK, OTHER = 0, 2, 9


@cache
def _script_of_class() -> NDArray[np.int64]:
    """The script of each character class: Latin 0, Cyrillic 1, Greek 2, Chinese and Japanese 3, and
    so on; −1 for no letter.
    """
    script = np.full(language.CLASSES, -1)
    script[[language.LOWER, language.UPPER, language.LOWER_LATIN, language.UPPER_LATIN]] = LATIN
    # cyrillic, greek, cjk, hiragana, katakana, hangul, thai, arabic, hebrew, devanagari, other
    first = language.FIRST_SCRIPT
    script[first : language.OTHER_LETTER + 1] = [1, GREEK, 3, 3, 3, 4, 5, 6, 7, 8, OTHER]
    return script


# Loose words: English words side by side that English never puts side by side, hardly a function
# word between them.

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
        _in_windows(flags, window - 1) for flags in (pairs, pairs & shared, either, shared)
    )
    words, functions, longs, known_longs, lines = (
        _in_windows(flags, window) for flags in (latin, function, long, long & known, breaks)
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
    return Detection("word_salad", int(starts[at]), int(ends[last]), evidence)
