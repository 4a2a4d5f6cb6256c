"""Measure a text in overlapping windows of tokens: how strange are its characters, letters, words
and their order?

Every measure is an average over the tokens or characters of a window of what `token_measures`
says of each token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from assay.coherence.arrays import running_sum
from assay.coherence.detectors.token_measures import BRACKETS, token_measures
from assay.coherence.text import TextView

MIN_CHARS, MIN_WORDS, MIN_TOKENS = 100, 8, 16
"""A text with fewer characters, words or tokens (marks counted) is too short to say anything."""

FEATURES = (
    "shape",
    "letters",
    "odd_words",
    "known",
    "function",
    "syntax",
    "script_jumps",
    "case_jumps",
    "digit_jumps",
    "loose_marks",
    "marks",
    "repeats",
    "lines",
    "word_length",
    "singles",
    "known_pairs",
    "known_joints",
    "odd_shapes",
    "bad_syntax",
    "unmatched",
    "low_starts",
    "inner_capitals",
    "stubs",
    "latin",
    "known_grams",
)


@dataclass(frozen=True)
class Windows:
    """Measures of all windows, shape (windows, len(FEATURES)), with their spans in tokens and code
    points.
    """

    values: NDArray[np.float64]
    first_token: NDArray[np.int64]
    end_token: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]


def running_sums(
    view: TextView, notation: Iterable[tuple[int, int]] = ()
) -> Mapping[str, NDArray[np.float64]] | None:
    """Running sums of all measures over the tokens, or None if there are too few to say
    anything.
    """
    if (
        len(view.text) < MIN_CHARS
        or len(view.is_word) < MIN_TOKENS
        or int(view.is_word.sum()) < MIN_WORDS
    ):
        return None
    sums = {name: running_sum(values) for name, values in token_measures(view, notation).items()}
    return sums if sums["prose"][-1] >= MIN_TOKENS else None


def measure(
    view: TextView, sums: Mapping[str, NDArray[np.float64]], window: int, stride: int
) -> Windows:
    """All windows of `window` tokens, one every `stride`; a shorter text is one window."""
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
        "known_pairs": mean("known_pair", "word_pairs"),
        "known_joints": mean("known_joint", "joints"),
        "odd_shapes": mean("odd_shape", "chars"),
        "bad_syntax": mean("bad_pair", "pairs"),
        "unmatched": _unmatched(sums, first, end) / np.maximum(tokens, 1e-9),
        "low_starts": mean("low_start", "starts"),
        "inner_capitals": mean("inner_capital", "word_pairs"),
        "stubs": mean("stub", "latin_word"),
        "latin": mean("latin_word", "one"),
        "known_grams": mean("known_gram", "grams"),
    }
    values = np.stack([columns[name] for name in FEATURES], axis=1)
    return Windows(values, first, end, start_char, end_char)


def _unmatched(
    sums: Mapping[str, NDArray[np.float64]], first: NDArray[np.int64], end: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Brackets of each window that have no partner in it, counted by kind and not by order."""
    kinds = [
        np.abs(sums[f"open_{mark}"][end] - sums[f"open_{mark}"][first]) for mark, _ in BRACKETS
    ]
    total: NDArray[np.float64] = np.sum(kinds, axis=0)
    return total
