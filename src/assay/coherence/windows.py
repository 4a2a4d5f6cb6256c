"""Measure a text in overlapping windows of tokens: how strange are its characters, letters, words and their order?

Every measure is an average over the tokens or characters of a window, from the tables of `language.py`. Blocks of
encoded data (base64, hex digests) are left out: they look like nothing and mean no harm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assay.coherence import language as lang
from assay.coherence.detectors.units import FUNCTION_WORDS
from assay.coherence.textview import TextView

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MIN_WORDS, MIN_TOKENS = 12, 40
"""A text with fewer words or tokens (marks counted) is too short to say anything."""

FEATURES = (
    "shape", "letters", "odd_words", "known", "function", "syntax", "script_jumps", "case_jumps", "digit_jumps",
    "loose_marks", "marks", "repeats", "lines", "word_length", "singles",
)  # fmt: skip
_ENCODED = re.compile(r"(?<![^\s\"'=:,(])[A-Za-z0-9+/_=-]{24,}(?![^\s\"',.;:)])")


@dataclass(frozen=True)
class Windows:
    """Measures of all windows, shape (windows, len(FEATURES)), with their spans in tokens and code points."""

    values: NDArray[np.float64]
    first_token: NDArray[np.int64]
    end_token: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]


def running_sums(view: TextView) -> Mapping[str, NDArray[np.float64]] | None:
    """Running sums of all measures over the tokens, or None if there are too few to say anything."""
    if len(view.is_word) < MIN_TOKENS or int(view.is_word.sum()) < MIN_WORDS:
        return None
    return {name: _sums(values) for name, values in _token_measures(view).items()}


def measure(view: TextView, sums: Mapping[str, NDArray[np.float64]], window: int, stride: int) -> Windows:
    """All windows of `window` tokens, one every `stride`; a shorter text is one window."""
    import numpy as np

    total = len(view.words)
    first = np.arange(0, max(total - window, 0) + stride, stride, dtype=np.int64)
    first = np.unique(np.minimum(first, max(total - window, 0)))
    end = np.minimum(first + window, total)
    start_char, end_char = view.tokens.starts[first], view.tokens.ends[end - 1]

    def mean(name: str, weight: str) -> NDArray[np.float64]:
        top = sums[name][end] - sums[name][first]
        bottom = sums[weight][end] - sums[weight][first]
        return np.where(bottom >= 0.5, top / np.maximum(bottom, 0.5), 0.0)

    words = sums["is_word"][end] - sums["is_word"][first]
    tokens = sums["one"][end] - sums["one"][first]
    columns = {
        "shape": mean("shape_bits", "chars"),
        "letters": mean("letter_bits", "letters"),
        "odd_words": mean("odd", "latin_word"),
        "known": mean("known", "latin_word"),
        "function": mean("function", "latin_word"),
        "syntax": mean("pair_bits", "pairs"),
        "script_jumps": mean("script_jump", "one"),
        "case_jumps": mean("case_jump", "one"),
        "digit_jumps": mean("digit_jump", "one"),
        "loose_marks": mean("loose_mark", "one"),
        "marks": 1 - words / np.maximum(tokens, 1e-9),
        "repeats": mean("seen_before", "one"),
        "lines": mean("breaks", "one"),
        "word_length": mean("letters", "latin_word"),
        "singles": mean("single", "one"),
    }
    values = np.stack([columns[name] for name in FEATURES], axis=1)
    return Windows(values, first, end, start_char, end_char)


def _token_measures(view: TextView) -> dict[str, NDArray[np.float64]]:
    """Per token: bits, counts and flags. Tokens of encoded data weigh nothing."""
    import numpy as np

    tables = lang.tables()
    starts, ends = view.tokens.starts, view.tokens.ends
    classes = lang.character_classes(view.codes)
    letters = lang.letter_codes(view.codes)
    shape = _sums(_shape_bits(classes, tables.shapes))
    letter = _sums(_letter_bits(letters, tables.letters))
    is_latin = _sums((letters < lang.EDGE).astype(float))
    weight = _weights(view)

    # A token owns the blanks before it.
    owned = np.concatenate(([0], ends[:-1]))
    letter_count = (is_latin[ends] - is_latin[starts]) * weight
    bits = (letter[ends] - letter[starts]) * weight
    distinct, which = view.distinct_words
    listed = np.array([lang.is_known_word(w.lower(), tables.bloom) for w in distinct], dtype=bool)
    known = listed[which].astype(float)
    function = np.array([w.lower() in FUNCTION_WORDS for w in distinct], dtype=float)[which]
    first_class = classes[starts]
    before = classes[np.maximum(starts - 1, 0)]
    glued = (starts > 0) & (starts == owned)
    latin_word = ((letter_count == ends - starts) & (letter_count > 0)).astype(float) * weight
    is_word = view.is_word * weight
    syntax_class = lang.word_classes(distinct, listed.tolist())[which]
    pair = np.concatenate(([0.0], tables.syntax[syntax_class[:-1], syntax_class[1:]]))
    breaks = _sums((view.codes == ord("\n")).astype(float))[starts]
    no_break = np.concatenate(([0.0], (breaks[1:] == breaks[:-1]).astype(float)))
    mark = first_class >= lang.FIRST_MARK
    unmarked = syntax_class != lang.MARK_CLASS
    no_break *= np.concatenate(([0.0], (unmarked[1:] & unmarked[:-1]).astype(float)))
    spaced = (before == lang.SPACE) & (
        np.append(classes, lang.SPACE)[np.minimum(ends, len(classes))] == lang.SPACE
    )
    return {
        "one": weight,
        "chars": (ends - owned) * weight,
        "shape_bits": (shape[ends] - shape[owned]) * weight,
        "letter_bits": bits,
        "letters": letter_count,
        "latin_word": latin_word,
        "odd": (bits > 4.2 * letter_count) * latin_word,
        "known": known * latin_word,
        "function": function * latin_word,
        "is_word": is_word,
        "single": (ends - starts == 1) * latin_word,
        "pairs": no_break * weight,
        "pair_bits": pair * no_break * weight,
        "script_jump": _script_jumps(classes, starts, ends) * weight,
        "case_jump": _inner_jumps(classes, starts, ends, lang.LOWER, lang.UPPER) * weight,
        "digit_jump": (
            glued
            & ((first_class == lang.DIGIT) != (before == lang.DIGIT))
            & _alnum(first_class)
            & _alnum(before)
        )
        * weight,
        "loose_mark": (mark & spaced) * weight,
        "seen_before": _seen_before(view.tokens.ids) * weight,
        "breaks": np.diff(breaks, prepend=0).clip(0, 3) * weight,
    }


def _weights(view: TextView) -> NDArray[np.float64]:
    import numpy as np

    weights = np.ones(len(view.words))
    for match in _ENCODED.finditer(view.text):
        block = match.group()
        if any(c.isdigit() for c in block) or "/" in block or "+" in block:
            a, b = np.searchsorted(view.tokens.starts, match.span())
            weights[a:b] = 0.0
    return weights


def _shape_bits(classes: NDArray[np.int64], table: NDArray[np.float32]) -> NDArray[np.float64]:
    import numpy as np

    padded = np.concatenate(([lang.BREAK, lang.BREAK], classes))
    return table[padded[:-2], padded[1:-1], padded[2:]].astype(float)


def _letter_bits(letters: NDArray[np.int64], table: NDArray[np.float32]) -> NDArray[np.float64]:
    """Bits of every letter given the letters before it in its word; 0 for what is no Latin letter."""
    import numpy as np

    padded = np.concatenate(([lang.EDGE] * 3, letters))
    third, second, first, own = padded[:-3].copy(), padded[1:-2].copy(), padded[2:-1], padded[3:]
    third[(second == lang.EDGE) | (first == lang.EDGE)] = lang.EDGE
    second[first == lang.EDGE] = lang.EDGE
    return np.where(own < lang.EDGE, table[third, second, first, own], 0.0)


def _inner_jumps(
    classes: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64], left: int, right: int
) -> NDArray[np.float64]:
    """How often in each token a character of class `left` stands before one of class `right`."""
    import numpy as np

    jumps = _sums(np.concatenate(([0], (classes[:-1] == left) & (classes[1:] == right))).astype(float))
    return jumps[ends] - jumps[np.minimum(starts + 1, ends)]


def _script_jumps(
    classes: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Whether a token is of another script than the word before it (0.5), or mixes scripts itself (1)."""
    import numpy as np

    script = np.full(lang.CLASSES, -1)
    script[[lang.LOWER, lang.UPPER, lang.LOWER_LATIN, lang.UPPER_LATIN]] = 0
    script[lang.FIRST_SCRIPT : lang.OTHER_LETTER + 1] = np.arange(
        1, lang.OTHER_LETTER - lang.FIRST_SCRIPT + 2
    )
    # Japanese writes three scripts at once.
    script[lang.FIRST_SCRIPT + 3 : lang.FIRST_SCRIPT + 5] = script[lang.FIRST_SCRIPT + 2]
    own = script[classes]
    inside = np.concatenate(([0], (own[:-1] != own[1:]) & (own[:-1] >= 0) & (own[1:] >= 0))).astype(float)
    inner = _sums(inside)
    mixed = (inner[ends] - inner[np.minimum(starts + 1, ends)] > 0).astype(float)
    first = own[starts]
    lettered = np.flatnonzero(first >= 0)
    jump = np.zeros(len(starts))
    if len(lettered) > 1:
        jump[lettered[1:]] = 0.5 * (first[lettered[1:]] != first[lettered[:-1]])
    either: NDArray[np.float64] = np.maximum(jump, mixed)
    return either


def _seen_before(ids: NDArray[np.int64], span: int = 64) -> NDArray[np.float64]:
    """Whether a token stood among the `span` tokens before it."""
    import numpy as np

    order = np.argsort(ids, kind="stable")
    gap = np.full(len(ids), span + 1)
    same = ids[order[1:]] == ids[order[:-1]]
    gap[order[1:][same]] = (order[1:] - order[:-1])[same]
    return (gap <= span).astype(float)


def _alnum(classes: NDArray[np.int64]) -> NDArray[np.bool_]:
    import numpy as np

    return np.isin(classes, [lang.DIGIT, lang.LOWER, lang.UPPER])


def _sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Running sums with a leading 0: the sum over [a, b) is sums[b] − sums[a]."""
    import numpy as np

    return np.concatenate(([0.0], np.cumsum(values, dtype=float)))
