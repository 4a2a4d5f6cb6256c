"""Digit salad: numbers glued to the words of a sentence, or lone digits strewn over blank lines."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator

from assay.coherence.detectors.loops import FUNCTION_WORDS
from assay.coherence.salad import language
from assay.coherence.text import Detection, TextView, quote

_GLUED = re.compile(
    r"\b(?:the|and|but|so|this|that|of|with|was|are|have|we|you|they|it|is|think|which)\d+", re.IGNORECASE
)
_LETTER_DIGIT = re.compile(r"(?<=[A-Za-z])\d")
_GAP = re.compile(r"\n[ \t]*\n[ \t]*\n\s*")
MIN_GLUED = 3


def detect_digits(view: TextView) -> Detection | None:
    """The first of several numbers where no number belongs."""
    glued = list(_glued(view.text))
    # In code such names exist (`is1`, `this2`); there they repeat, and words do not stand around them.
    if len({m.group().lower() for m in glued}) >= MIN_GLUED and len(glued) * 300 > len(view.text):
        return Detection(
            "digit_salad", glued[0].start(), glued[-1].end(), {"glued": [m.group() for m in glued[:5]]}
        )
    return _strewn(view)


def _glued(text: str) -> Iterator[re.Match[str]]:
    """Numbers glued to a common word. Digits that follow a letter are rare, so they are looked for first."""
    for digit in _LETTER_DIGIT.finditer(text):
        for length in range(2, 6):
            if match := _GLUED.match(text, max(0, digit.start() - length)):
                yield match
                break


def _strewn(view: TextView) -> Detection | None:
    """Three gaps of two blank lines and more, of different heights, with hardly a letter between them."""
    text = view.text[: view.visible_end]
    gaps = [m.span() for m in _GAP.finditer(text)]
    if len(gaps) < 3:
        return None
    between = "".join(text[a[1] : b[0]] for a, b in itertools.pairwise(gaps))
    heights = {text[a:b].count("\n") for a, b in gaps}
    if len(heights) < 2 or len(between) > 20 * len(gaps) or sum(c.isalpha() for c in between) > len(gaps):
        return None
    return Detection("digit_salad", gaps[0][0], len(text), {"gaps": len(gaps)})


# -----------------------------------------------------------------------------
# Identifier soup: one name that never ends, words glued with underscores, capitals or nothing at all.

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
                "identifier_soup", match.start(), match.end(), {"length": len(name), "name": quote(name)}
            )
    return None


# -----------------------------------------------------------------------------
# Thesaurus drift: a long row of real words with no grammar between them, each a neighbour of the last.
#
# No word repeats and every word is real, so neither repetition nor spelling shows it. What is missing does: over forty
# words of English without a mark, a line break, a number and hardly a function word are no sentence.

MIN_WORDS = 40
MAX_FUNCTION = 0.05
MIN_KNOWN = 0.85
MIN_DISTINCT = 0.6
_ROW = re.compile("[a-zA-Z ]+")
MIN_ROW = 3 * MIN_WORDS
"""Code points of a row that is looked at; asked after the match, since the pattern would scan short rows again and again."""

_WORD = re.compile("[a-zA-Z]+")


def detect_drift(view: TextView) -> Detection | None:
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


# -----------------------------------------------------------------------------
# Stutter: words said twice or three times in a row, all over the text, as a cache with too few bits makes them.

_TWICE = re.compile(r"(?<![\w'-])([a-z]{3,})(?: \1)+(?![\w'-])")
# English (and C) says these twice.
_ALLOWED = frozenset(
    [
        "again",
        "and",
        "beep",
        "bit",
        "blah",
        "boo",
        "bye",
        "cha",
        "choo",
        "chop",
        "day",
        "ding",
        "dong",
        "down",
        "duck",
        "dum",
        "false",
        "far",
        "goose",
        "had",
        "half",
        "hear",
        "hush",
        "knock",
        "left",
        "long",
        "many",
        "more",
        "much",
        "nan",
        "never",
        "night",
        "none",
        "now",
        "null",
        "one",
        "ooh",
        "over",
        "please",
        "pom",
        "really",
        "right",
        "round",
        "row",
        "rozenset",
        "run",
        "step",
        "stop",
        "tap",
        "that",
        "there",
        "tick",
        "tom",
        "true",
        "tut",
        "two",
        "up",
        "very",
        "void",
        "wah",
        "wait",
        "well",
        "who",
        "yes",
        "you",
        "yum",
    ]
)
MIN_STUTTER_WORDS = 2
"""Distinct words that stutter."""
MAX_GAP = 120
"""Code points per stutter, at most."""


def detect_stutter(view: TextView) -> Detection | None:
    """The first of several stutters that stand close together."""
    doubled = [m for m in _TWICE.finditer(view.text) if m.group(1) not in _ALLOWED]
    if len(doubled) < MIN_STUTTER_WORDS:
        return None
    bloom = language.tables().bloom  # other languages double words as a matter of grammar
    found = [m for m in doubled if language.is_known_word(m.group(1), bloom)]
    for index in range(len(found) - MIN_STUTTER_WORDS + 1):
        group = found[index : index + MIN_STUTTER_WORDS]
        if len({m.group(1) for m in group}) == MIN_STUTTER_WORDS and group[-1].end() - group[
            0
        ].start() <= MAX_GAP * (MIN_STUTTER_WORDS - 1):
            onset = group[0].start() + len(group[0].group(1))
            return Detection(
                "stutter",
                onset,
                found[-1].end(),
                {"words": [m.group(1) for m in found[:5]], "count": len(found)},
            )
    return None


# -----------------------------------------------------------------------------
# Few words: a passage on one line that gets along with a handful of words in no fixed order.
#
# Exact periods miss it ("SMS in the SMS SMS in the English and SMS"), as they miss the near-copies that a repetition
# penalty makes of a loop.

WINDOW = 60
MAX_DISTINCT = 12
MAX_MARKS = 0.15
_LINE = re.compile(r"[^\n]+")
MIN_LINE = 200
_ANY_WORD = re.compile(r"[^\W\d_]+")


def detect_variety(view: TextView) -> Detection | None:
    """The first passage of `WINDOW` words with at most `MAX_DISTINCT` different ones."""
    for line in _LINE.finditer(view.text):
        if line.end() - line.start() < MIN_LINE:
            continue
        matches = list(_ANY_WORD.finditer(line.group()))
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
