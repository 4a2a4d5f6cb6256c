"""One text, seen as code points, tokens and segments: what the detectors share.

Every view is computed once, on first use, in time linear in the length of the text.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, cached_property
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

# A token is a run of letters, a run of digits, one character of a script written without spaces, or
# one mark. The scripts: kana, Chinese characters, Thai, Lao, Khmer, Myanmar.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
)
_SINGLE = re.compile(rf"[{_UNSPACED}]|[^\w\s]|_")
_DIGITS = re.compile(r"\d+")

# A segment ends at a line break or after a sentence's end mark.
_SEGMENT_END = re.compile(r"\n+|(?<=[.!?;])[ \t]+|(?<=[。！？])")
_FENCE = re.compile(r"^[ \t]{0,3}(```|~~~)", re.MULTILINE)
_SENTENCE_END = ".!?。！？…\"'”’»)]}`>|*"

_FUNCTION_WORDS = """
the a an and or but if of to in on at by for from with as is are was were be been being it its this that
these those i you he she we they them his her their our your my not so than then there here which who
what when where how all any some no do does did has have had will would can could should may might must
about into over after before between through during under up out more most such only also other very
just
"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())
"""English words that carry grammar and no content."""


class Ending(StrEnum):
    """How a text came to its end, as far as is known."""

    STOPPED = "stop"
    CUT = "length"
    OPEN = "open"
    """Still being written: nothing can be concluded from where it ends."""
    UNKNOWN = "unknown"


def ending_of(finish_reason: str | None) -> Ending:
    """The ending that a server's `finish_reason` reports."""
    if finish_reason in {"stop", "tool_calls", "function_call", "eos", "end_turn", "stop_sequence"}:
        return Ending.STOPPED
    return Ending.CUT if finish_reason in {"length", "max_tokens"} else Ending.UNKNOWN


@dataclass(frozen=True)
class Units:
    """A text as a sequence of units: `ids` names equal units alike, `starts` and `ends` are code
    points.
    """

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class TextView:
    """A text with its views. `in_fence` says that it begins inside a fenced code block (a stream's
    tail).
    """

    text: str
    ending: Ending = Ending.UNKNOWN
    in_fence: bool = field(default=False)

    @cached_property
    def codes(self) -> NDArray[np.uint32]:
        """Code points, shape (len(text),)."""
        return np.frombuffer(self.text.encode("utf-32-le", "surrogatepass"), dtype="<u4")

    @cached_property
    def words(self) -> Sequence[str]:
        """The tokens as they stand in the text."""
        starts, ends = self._bounds
        return [self.text[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]

    @cached_property
    def is_word(self) -> NDArray[np.bool_]:
        """For every token whether it is made of letters or digits, and no mark."""
        alnum: NDArray[np.bool_] = mapped(self.codes, str.isalnum).astype(bool)[self._bounds[0]]
        return alnum

    @cached_property
    def tokens(self) -> Units:
        """Tokens, equal when they differ in case only."""
        distinct, which = self.distinct_words
        return self._units(_number([w.lower() for w in distinct])[which])

    @cached_property
    def distinct_words(self) -> tuple[Sequence[str], NDArray[np.int64]]:
        """The different tokens, case and all, and for every token which of them it is."""
        return list(dict.fromkeys(self.words)), _number(self.words)

    @cached_property
    def masked_tokens(self) -> Units:
        """Tokens, all numbers alike: a loop with a counter repeats exactly here."""
        distinct, which = self.distinct_words
        return self._units(_number([_DIGITS.sub("0", w.lower()) for w in distinct])[which])

    @cached_property
    def segments(self) -> Units:
        """Sentences and lines, stripped, in order; blank ones are left out."""
        keys: list[str] = []
        spans: list[tuple[int, int]] = []
        at = 0
        for start, end in [
            *((m.start(), m.end()) for m in _SEGMENT_END.finditer(self.text)),
            (len(self.text),) * 2,
        ]:
            piece = self.text[at:start].strip()
            if piece:
                keys.append(piece.lower())
                spans.append((at, start))
            at = end
        bounds = np.array(spans, dtype=np.int64).reshape(-1, 2)
        return Units(_number(keys), bounds[:, 0], bounds[:, 1])

    @cached_property
    def visible_end(self) -> int:
        """Where the text ends but for trailing blanks."""
        return len(self.text.rstrip())

    @cached_property
    def cut(self) -> bool:
        """Whether the text breaks off: reported by the server, or it ends without an end mark."""
        if self.ending is not Ending.UNKNOWN:
            return self.ending is Ending.CUT
        return self.visible_end > 0 and self.text[self.visible_end - 1] not in _SENTENCE_END

    @cached_property
    def fences(self) -> Sequence[tuple[int, int]]:
        """Spans of fenced code blocks; the last may run to the end of the text."""
        marks = [m.start() for m in _FENCE.finditer(self.text)]
        if self.in_fence:
            marks.insert(0, 0)
        if len(marks) % 2:
            marks.append(len(self.text))
        return list(zip(marks[::2], marks[1::2], strict=True))

    def line_at(self, position: int) -> tuple[int, int]:
        """Start and end of the line that holds `position`, in logarithmic time (a text may be one
        huge line).
        """
        index = bisect_left(self._breaks, position)
        start = self._breaks[index - 1] + 1 if index else 0
        return start, self._breaks[index] if index < len(self._breaks) else len(self.text)

    @cached_property
    def _breaks(self) -> list[int]:
        return [m.start() for m in re.finditer("\n", self.text)]

    def _units(self, ids: NDArray[np.int64]) -> Units:
        return Units(ids, *self._bounds)

    @cached_property
    def _bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Starts and ends of all tokens: where the kind of character changes, and around every
        single.
        """
        kinds = mapped(self.codes, _kind)
        changes = np.flatnonzero((kinds[1:] != kinds[:-1]) | (kinds[1:] == _KIND_SINGLE)) + 1
        edges = (
            np.concatenate(([0], changes, [len(kinds)]))
            if len(kinds)
            else np.zeros(1, dtype=np.int64)
        )
        starts, ends = edges[:-1], edges[1:]
        solid = kinds[starts] != _KIND_BLANK
        return starts[solid], ends[solid]


_KIND_BLANK, _KIND_LETTER, _KIND_DIGIT, _KIND_SINGLE = range(4)


def _kind(char: str) -> int:
    if char.isspace():
        return _KIND_BLANK
    if _SINGLE.fullmatch(char):
        return _KIND_SINGLE
    return _KIND_DIGIT if char.isdecimal() else _KIND_LETTER


def _number(keys: Sequence[str]) -> NDArray[np.int64]:
    known: dict[str, int] = {}
    return np.array([known.setdefault(k, len(known)) for k in keys], dtype=np.int64)


class Spans:
    """Membership in a union of spans, by bisection."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        self._edges: list[int] = []
        for start, end in sorted(spans):
            if self._edges and start < self._edges[-1]:
                self._edges[-1] = max(self._edges[-1], end)
            else:
                self._edges += (start, end)

    def __contains__(self, position: int) -> bool:
        return bisect_right(self._edges, position) % 2 == 1


def mapped(codes: NDArray[np.uint32], function: Callable[[str], int]) -> NDArray[Any]:
    """`function` of the character at every code point of `codes`, shape (len(codes),).

    A long text looks its characters up in a table over all code points up to its highest; sorting
    would cost more.
    """
    if len(codes) == 0:
        return np.zeros(0, dtype=np.int64)
    if int(codes.max()) > len(codes):
        known, inverse = np.unique(codes, return_inverse=True)
        return np.array([function(chr(c)) for c in known.tolist()], dtype=np.int64)[inverse]
    present = np.flatnonzero(np.bincount(codes))
    table = np.zeros(int(present[-1]) + 1, dtype=np.int64)
    table[present] = [function(chr(c)) for c in present.tolist()]
    return table[codes]


def has_stretch(flags: NDArray[np.bool_], length: int) -> bool:
    """Whether the largest power of two ≤ `length` flags in a row are true: a cheap test by
    doubling.
    """
    width = 1
    while 2 * width <= length and len(flags) > width and flags.any():
        flags = flags[:-width] & flags[width:]
        width *= 2
    return bool(flags.any())


def true_stretches(flags: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Starts and ends of the stretches where `flags` is true."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return edges[::2].astype(np.int64), edges[1::2].astype(np.int64)


def running_count(flags: NDArray[Any]) -> NDArray[np.int64]:
    """How many flags are true before each position, shape (len(flags) + 1,)."""
    counts = np.zeros(len(flags) + 1, dtype=np.int64)
    np.cumsum(flags, out=counts[1:])
    return counts


def distinct_in_windows(words: Sequence[str], window: int) -> NDArray[np.int64]:
    """How many different words each window of so many holds, shape (max(0, len(words) − window +
    1),).
    """
    counts: dict[str, int] = {}
    found = []
    for index, word in enumerate(words):
        counts[word] = counts.get(word, 0) + 1
        if index >= window:
            old = words[index - window]
            counts[old] -= 1
            if not counts[old]:
                del counts[old]
        if index >= window - 1:
            found.append(len(counts))
    return np.array(found, dtype=np.int64)


@dataclass(frozen=True)
class Detection:
    """A degenerate passage: its kind (a stable snake_case name) and where it begins, in code
    points.

    `end` is where the passage ends, as far as the detector followed it.
    """

    kind: str
    onset_char: int
    end: int
    evidence: Mapping[str, Any] = field(default_factory=dict)


Detector = Callable[[TextView], Detection | None]


def quote(text: str, limit: int = 60) -> str:
    """A short piece of `text` for evidence, cut in the middle."""
    return text if len(text) <= limit else f"{text[: limit - 20]}…{text[-19:]}"


# A small statistical picture of well-formed text: which characters, letters and words follow one
# another.
#
# Three tables and three sets, built once from free text by `benchmarks/build_language_tables.py`
# and shipped compressed:
#
# - `shapes`: −log2 P(class of a character | the classes of the two before it), over every kind of text (prose,
#   code, data, many scripts). Letters count by script and case only, so that no language is strange.
# - `letters`: −log2 P(letter | the three before it in the word), Latin letters without their accents.
# - `syntax`: log2 P(b | a) / P(b) for classes of neighbouring English words: above 0 if b likes to follow a.
# - Bloom filters of English words, of `pairs` of neighbouring words and marks, and of runs of five characters (`grams`)
#   that well-formed English, code or data hold.
#
# Everything is an array lookup, linear in the text.


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
