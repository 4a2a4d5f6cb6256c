"""A small statistical picture of well-formed text: which characters, letters and words follow one
another.

Three tables and three sets, built once from free text by
`benchmarks/grade/build_language_tables.py` and shipped compressed:

- `shapes`: −log2 P(class of a character | the classes of the two before it), over every kind of
  text (prose, code, data, many scripts). Letters count by script and case only, so that no language
  is strange.
- `letters`: −log2 P(letter | the three before it in the word), Latin letters without their accents.
- `syntax`: log2 P(b | a) / P(b) for classes of neighbouring English words: above 0 if b likes to
  follow a.
- Bloom filters of English words, of `pairs` of neighbouring words and marks, and of runs of five
  characters (`grams`) that well-formed English, code or data hold.

Everything is an array lookup, linear in the text.
"""

from __future__ import annotations

import unicodedata
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.coherence.arrays import mapped

_FUNCTION_WORDS = """
the a an and or but if of to in on at by for from with as is are was were be been being it its this that
these those i you he she we they them his her their our your my not so than then there here which who
what when where how all any some no do does did has have had will would can could should may might must
about into over after before between through during under up out more most such only also other very
just
"""  # noqa: E501
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())
"""English words that carry grammar and no content."""


TABLES = "language_tables.npz"
BITS_STEP = 16.0
"""Bits are stored as bytes in steps of 1/16."""

# Character classes: blanks, digits, letters by script and case, and each ASCII mark by itself.
_MARKS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_SCRIPTS = (
    "CYRILLIC",
    "GREEK",
    "CJK",
    "HIRAGANA",
    "KATAKANA",
    "HANGUL",
    "THAI",
    "ARABIC",
    "HEBREW",
    "DEVANAGARI",
)
SPACE, BREAK, DIGIT, LOWER, UPPER, LOWER_LATIN, UPPER_LATIN = range(7)
FIRST_SCRIPT = 7
OTHER_LETTER = FIRST_SCRIPT + len(_SCRIPTS)
COMBINING, OTHER_MARK, SYMBOL, CONTROL = range(OTHER_LETTER + 1, OTHER_LETTER + 5)
FIRST_MARK = CONTROL + 1
CLASSES = FIRST_MARK + len(_MARKS)

LETTERS = 28
"""a to z, the edge of a word, any other letter."""
EDGE, FOREIGN = 26, 27
BLOOM_BITS = 2**19
BLOOM_HASHES = 4
FILTER_BITS = 2**22
FILTER_HASHES = 3
"""Size and hashes of the filters of pairs and of grams."""
GRAM = 5
_ODD, _ODD_2, _ODD_3 = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xBF58476D1CE4E5B9
"""Odd numbers without a pattern, for hashing."""

_SUFFIXES = (
    "ly",
    "ing",
    "ed",
    "tion",
    "ment",
    "ness",
    "ity",
    "able",
    "ive",
    "ous",
    "ful",
    "al",
    "er",
    "or",
    "est",
    "s",
)
_PUNCTUATION = ".,;:?!()\"'-"
WORD_CLASSES = [
    *sorted(FUNCTION_WORDS),
    *(f"-{s}" for s in _SUFFIXES),
    *_PUNCTUATION,
    "NUMBER",
    "CAPITAL",
    "SHORT",
    "WORD",
    "UNKNOWN",
    "MARK",
]
MARK_CLASS = len(WORD_CLASSES) - 1
_CLASS_OF = {name: index for index, name in enumerate(WORD_CLASSES)}


@dataclass(frozen=True)
class Tables:
    """The shipped tables as arrays of bits."""

    shapes: NDArray[np.float32]
    """(CLASSES, CLASSES, CLASSES)"""
    letters: NDArray[np.float32]
    """(LETTERS, LETTERS, LETTERS, LETTERS)"""
    syntax: NDArray[np.float32]
    """(word classes, word classes)"""
    bloom: NDArray[np.uint8]
    pairs: NDArray[np.uint8]
    grams: NDArray[np.uint8]


def mark_class(mark: str) -> int:
    """The character class of an ASCII mark."""
    return FIRST_MARK + _MARKS.index(mark)


@cache
def tables() -> Tables:
    """The tables, read once."""
    with (
        resources.files("assay.coherence.detectors").joinpath(TABLES).open("rb") as file,
        np.load(file) as stored,
    ):
        return Tables(
            shapes=stored["shapes"].astype(np.float32) / BITS_STEP,
            letters=stored["letters"].astype(np.float32) / BITS_STEP,
            syntax=stored["syntax"].astype(np.float32) / BITS_STEP,
            bloom=stored["bloom"],
            pairs=stored["pairs"],
            grams=stored["grams"],
        )


def character_classes(codes: NDArray[np.uint32]) -> NDArray[np.int64]:
    """The class of every code point."""
    return mapped(codes, _character_class)


def letter_codes(codes: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Every code point as one of the `LETTERS`: accents off, case off, what is no letter is an
    edge.
    """
    return mapped(codes, _letter)


def is_known_word(word: str, bloom: NDArray[np.uint8]) -> bool:
    """Whether a lower-case word is in the list of English words (some 3 % of all other strings pass
    too).
    """
    return all(bloom[bit >> 3] >> (bit & 7) & 1 for bit in bloom_bits(word))


def bloom_bits(word: str) -> list[int]:
    """The bits of a word in the Bloom filter (double hashing of two checksums)."""
    data = word.encode("utf-8", "replace")
    first, second = zlib.crc32(data), zlib.adler32(data[::-1] + b"#") * 0x9E3779B1 | 1
    return [(first + i * second) % BLOOM_BITS for i in range(BLOOM_HASHES)]


def word_keys(words: Sequence[str]) -> NDArray[np.uint64]:
    """A number for every token, alike for a word in any case, and for all numbers."""
    plain = ("0" if w[0].isdigit() else w.lower() for w in words)
    return np.array([zlib.crc32(w.encode("utf-8", "replace")) for w in plain], dtype=np.uint64)


def pair_numbers(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A number for every pair of neighbours, shape (len(keys) − 1,)."""
    numbers: NDArray[np.uint64] = keys[:-1] * np.uint64(_ODD) + keys[1:] * np.uint64(_ODD_2)
    return numbers


def gram_numbers(codes: NDArray[np.uint32]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """A number for every run of `GRAM` characters, and the place of its last one; rows of equal
    blanks count as one.

    Letters are alike in any case and with any accent, those of other scripts and digits by class.
    """
    symbols = mapped(codes, _symbol).astype(np.uint64)
    kept = np.concatenate(([True], (symbols[1:] != symbols[:-1]) | (symbols[1:] > BREAK)))[
        : len(symbols)
    ]
    symbols, places = symbols[kept], np.flatnonzero(kept)
    count = max(0, len(symbols) - GRAM + 1)
    numbers = np.zeros(count, dtype=np.uint64)
    for k in range(GRAM):
        numbers = numbers * np.uint64(256) + symbols[k : count + k]
    return numbers * np.uint64(_ODD), places[GRAM - 1 :]


def filter_bits(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The bits of every number in a filter, shape (len(numbers), FILTER_HASHES)."""
    mixed = numbers ^ (numbers >> np.uint64(29))
    mixed *= np.uint64(_ODD_3)
    step = (mixed >> np.uint64(32)) | np.uint64(1)
    nth = np.arange(FILTER_HASHES, dtype=np.uint64)
    bits: NDArray[np.uint64] = (mixed[:, None] + nth * step[:, None]) % np.uint64(FILTER_BITS)
    return bits


def is_in(numbers: NDArray[np.uint64], filter_: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """For every number whether it is in a filter (some 2 % of all others pass too)."""
    bits = filter_bits(numbers)
    set_ = (
        filter_[(bits >> np.uint64(3)).astype(np.int64)] >> (bits & np.uint64(7)).astype(np.uint8)
        & 1
    )
    return np.asarray(set_.all(axis=1), dtype=bool)


def word_class(word: str, known: bool) -> int:
    """The syntactic class of a token: function words stand for themselves, others by ending."""
    lower = word.lower()
    if lower in FUNCTION_WORDS or lower in _PUNCTUATION:
        return _CLASS_OF[lower]
    if lower.isdigit():
        return _CLASS_OF["NUMBER"]
    if not lower[0].isalpha():
        return _CLASS_OF["MARK"]
    if word[0].isupper():
        return _CLASS_OF["CAPITAL"]
    if not known:
        return _CLASS_OF["UNKNOWN"]
    if len(lower) <= 3:
        return _CLASS_OF["SHORT"]
    return _CLASS_OF[next((f"-{s}" for s in _SUFFIXES if lower.endswith(s)), "WORD")]


def word_classes(words: Sequence[str], known: Iterable[bool]) -> NDArray[Any]:
    """Classes of a sequence of tokens."""
    return np.array([word_class(w, k) for w, k in zip(words, known, strict=True)], dtype=np.int64)


@cache
def _character_class(char: str) -> int:
    if char == "\n":
        return BREAK
    if char.isspace():
        return SPACE
    if char in _MARKS:
        return FIRST_MARK + _MARKS.index(char)
    if char.isascii() and char.isalnum():
        return DIGIT if char.isdigit() else LOWER if char.islower() else UPPER
    category = unicodedata.category(char)
    if category[0] == "M":
        return COMBINING
    if category[0] == "L":
        script = unicodedata.name(char, "?").partition(" ")[0]
        if script == "LATIN":
            return UPPER_LATIN if category == "Lu" else LOWER_LATIN
        return FIRST_SCRIPT + _SCRIPTS.index(script) if script in _SCRIPTS else OTHER_LETTER
    if category[0] == "N":
        return DIGIT
    return {"P": OTHER_MARK, "S": SYMBOL}.get(category[0], CONTROL)


@cache
def _letter(char: str) -> int:
    base = unicodedata.normalize("NFD", char)[0].lower() if not char.isascii() else char.lower()
    if "a" <= base <= "z":
        return ord(base) - ord("a")
    return FOREIGN if char.isalpha() else EDGE


@cache
def _symbol(char: str) -> int:
    """A character as a byte: Latin letters by name, everything else by class."""
    kind = _character_class(char)
    if kind not in (LOWER, UPPER, LOWER_LATIN, UPPER_LATIN):
        return kind
    letter = _letter(char)
    return 128 + (ord("a") + letter if letter < EDGE else 127)
