"""Strays: short pieces of other scripts in the middle of sentences, where no quotation and no gloss
asks for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

import assay.coherence.language as language
from assay.coherence.arrays import Spans, running_count, true_stretches
from assay.coherence.detection import CAUSES, TOKENIZER, Detection, Family
from assay.coherence.text import TextView

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
                    Family.SALAD,
                    (*CAUSES[Family.SALAD], TOKENIZER),
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
