"""What is measured of every token: bits, counts and flags, from the tables of `language`.

Encoded data weigh nothing, and so does notation where it is given: they look like nothing and mean
no harm.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

import assay.coherence.language as language
from assay.coherence.arrays import running_sum
from assay.coherence.detectors.notation import encoded_spans
from assay.coherence.language import FUNCTION_WORDS
from assay.coherence.text import TextView

BRACKETS = (("(", ")"), ("[", "]"), ("{", "}"))
ODD_SHAPE_BITS, BAD_PAIR_BITS = 7.0, -2.0
"""Bits from which a character is odd after the two before it, and below which two classes of words
avoid each other.
"""


def token_measures(
    view: TextView, notation: Iterable[tuple[int, int]] = ()
) -> dict[str, NDArray[np.float64]]:
    """Per token: bits, counts and flags. Tokens of encoded data, and in the spans of notation,
    weigh nothing.
    """
    tables = language.tables()
    starts, ends = view.tokens.starts, view.tokens.ends
    classes = language.character_classes(view.codes)
    letters = language.letter_codes(view.codes)
    shape_bits = _shape_bits(classes, tables.shapes)
    shape = running_sum(shape_bits)
    letter = running_sum(_letter_bits(letters, tables.letters))
    is_latin = running_sum((letters < language.EDGE).astype(float))
    prose = _outside(view, notation)
    weight = prose * _outside(view, encoded_spans(view.text))

    # A token owns the blanks before it.
    owned = np.concatenate(([0], ends[:-1]))
    letter_count = (is_latin[ends] - is_latin[starts]) * weight
    bits = (letter[ends] - letter[starts]) * weight
    distinct, which = view.distinct_words
    listed = np.array(
        [language.is_known_word(w.lower(), tables.bloom) for w in distinct], dtype=bool
    )
    known = listed[which].astype(float)
    function = np.array([w.lower() in FUNCTION_WORDS for w in distinct], dtype=float)[which]
    first_class = classes[starts]
    before = classes[np.maximum(starts - 1, 0)]
    glued = (starts > 0) & (starts == owned)
    latin_word = ((letter_count == ends - starts) & (letter_count > 0)).astype(float) * weight
    is_word = view.is_word * weight
    syntax_class = language.word_classes(distinct, listed.tolist())[which]
    pair = np.concatenate(([0.0], tables.syntax[syntax_class[:-1], syntax_class[1:]]))
    breaks = running_sum((view.codes == ord("\n")).astype(float))[starts]
    no_break = np.concatenate(([0.0], (breaks[1:] == breaks[:-1]) * prose[:-1]))
    mixed = _neighbours(view, latin_word > 0, which, before, no_break)
    odd_shape = running_sum((shape_bits > ODD_SHAPE_BITS).astype(float))
    known_gram, all_grams = _known_grams(view.codes, tables.grams)
    mark = first_class >= language.FIRST_MARK
    unmarked = syntax_class != language.MARK_CLASS
    no_break *= np.concatenate(([0.0], (unmarked[1:] & unmarked[:-1]).astype(float)))
    spaced = (before == language.SPACE) & (
        np.append(classes, language.SPACE)[np.minimum(ends, len(classes))] == language.SPACE
    )
    return {
        "prose": prose,
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
        "case_jump": _inner_jumps(classes, starts, ends, language.LOWER, language.UPPER) * weight,
        "digit_jump": (glued & _digit_jumps(first_class, before)) * weight,
        "known_gram": (known_gram[ends] - known_gram[owned]) * weight,
        "grams": (all_grams[ends] - all_grams[owned]) * weight,
        "odd_shape": (odd_shape[ends] - odd_shape[owned]) * weight,
        "bad_pair": (pair < BAD_PAIR_BITS) * no_break * weight,
        "stub": ((ends - starts <= 2) & (latin_word > 0) & (function == 0)) * weight,
        **{f"open_{o}": _opened(first_class, o, c) * weight for o, c in BRACKETS},
        **{name: values * weight for name, values in mixed.items()},
        "loose_mark": (mark & spaced) * weight,
        "seen_before": _seen_before(view.tokens.ids) * weight,
        "breaks": np.diff(breaks, prepend=0).clip(0, 3) * weight,
    }


def _digit_jumps(first: NDArray[np.int64], before: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Where a digit meets a letter: the classes of a token's first character and of the one before
    it.
    """
    meet = (first == language.DIGIT) != (before == language.DIGIT)
    found: NDArray[np.bool_] = meet & _alnum(first) & _alnum(before)
    return found


def _neighbours(
    view: TextView,
    latin: NDArray[np.bool_],
    which: NDArray[np.int64],
    before: NDArray[np.int64],
    same_line: NDArray[np.float64],
) -> dict[str, NDArray[np.float64]]:
    """How every token goes with the one before it on its line: known pairs, sentence starts,
    capitals inside.
    """
    distinct = view.distinct_words[0]
    keys = language.word_keys(distinct)[which]
    known = _after(language.is_in(language.pair_numbers(keys), language.tables().pairs))
    both = _after(latin[1:] & latin[:-1]) * same_line
    joint = _after(view.is_word[1:] != view.is_word[:-1]) * same_line
    classes = language.character_classes(view.codes)[view.tokens.starts]
    upper, lower = classes == language.UPPER, classes == language.LOWER
    is_stop = np.array([w in ".!?" for w in distinct], dtype=bool)[which]
    starts = (_after(is_stop[:-1]) > 0) & (before == language.SPACE)
    return {
        "known_pair": known * both,
        "word_pairs": both,
        "known_joint": known * joint,
        "joints": joint,
        "low_start": (starts & lower).astype(float),
        "starts": (starts & (lower | upper)).astype(float),
        "inner_capital": upper * _after(lower[:-1] & latin[:-1]) * both,
    }


def _after(flags: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Flags of all tokens but the first, as one number for each token."""
    return np.concatenate(([0.0], flags.astype(float)))


def _opened(first_class: NDArray[np.int64], opening: str, closing: str) -> NDArray[np.float64]:
    """1 for every opening bracket, −1 for every closing one."""
    opened = (first_class == language.mark_class(opening)).astype(float)
    difference: NDArray[np.float64] = opened - (first_class == language.mark_class(closing))
    return difference


def _known_grams(
    codes: NDArray[np.uint32], filter_: NDArray[np.uint8]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Running sums over the code points: known runs of five characters that end there, and all of
    them.
    """
    numbers, places = language.gram_numbers(codes)
    known, all_ = np.zeros(len(codes)), np.zeros(len(codes))
    known[places], all_[places] = language.is_in(numbers, filter_), 1.0
    return running_sum(known), running_sum(all_)


def _outside(view: TextView, spans: Iterable[tuple[int, int]]) -> NDArray[np.float64]:
    """1 for every token outside the spans, 0 for those inside."""
    outside = np.ones(len(view.words))
    for span in spans:
        first, end = np.searchsorted(view.tokens.starts, span)
        outside[first:end] = 0.0
    return outside


def _shape_bits(classes: NDArray[np.int64], table: NDArray[np.float32]) -> NDArray[np.float64]:
    padded = np.concatenate(([language.BREAK, language.BREAK], classes))
    return table[padded[:-2], padded[1:-1], padded[2:]].astype(float)


def _letter_bits(letters: NDArray[np.int64], table: NDArray[np.float32]) -> NDArray[np.float64]:
    """Bits of every letter given the letters before it in its word; 0 for what is no
    Latin letter.
    """
    padded = np.concatenate(([language.EDGE] * 3, letters))
    third, second, first, own = (padded[:-3].copy(), padded[1:-2].copy(), padded[2:-1], padded[3:])
    third[(second == language.EDGE) | (first == language.EDGE)] = language.EDGE
    second[first == language.EDGE] = language.EDGE
    return np.where(own < language.EDGE, table[third, second, first, own], 0.0)


def _inner_jumps(
    classes: NDArray[np.int64],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    left: int,
    right: int,
) -> NDArray[np.float64]:
    """How often in each token a character of class `left` stands before one of class `right`."""
    jumps = running_sum(
        np.concatenate(([0], (classes[:-1] == left) & (classes[1:] == right))).astype(float)
    )
    return jumps[ends] - jumps[np.minimum(starts + 1, ends)]


def _script_jumps(
    classes: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Whether a token is of another script than the word before it (0.5), or mixes scripts itself
    (1).
    """
    script = np.full(language.CLASSES, -1)
    script[[language.LOWER, language.UPPER, language.LOWER_LATIN, language.UPPER_LATIN]] = 0
    script[language.FIRST_SCRIPT : language.OTHER_LETTER + 1] = np.arange(
        1, language.OTHER_LETTER - language.FIRST_SCRIPT + 2
    )
    # Japanese writes three scripts at once.
    script[language.FIRST_SCRIPT + 3 : language.FIRST_SCRIPT + 5] = script[
        language.FIRST_SCRIPT + 2
    ]
    own = script[classes]
    inside = np.concatenate(([0], (own[:-1] != own[1:]) & (own[:-1] >= 0) & (own[1:] >= 0))).astype(
        float
    )
    inner = running_sum(inside)
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
    order = np.argsort(ids, kind="stable")
    gap = np.full(len(ids), span + 1)
    same = ids[order[1:]] == ids[order[:-1]]
    gap[order[1:][same]] = (order[1:] - order[:-1])[same]
    return (gap <= span).astype(float)


def _alnum(classes: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.isin(classes, [language.DIGIT, language.LOWER, language.UPPER])
