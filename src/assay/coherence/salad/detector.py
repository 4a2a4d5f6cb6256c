"""Salads: text whose characters, words or word order no language would produce.

Each window gets a score, the log-odds of boosted trees on the measures of `windows.py`. They were fitted by
`benchmarks/fit_salad.py` on legitimate text (prose, code, data, 300 languages) against outputs of broken models and
synthetic salads, never on what the benchmark reports (docs/methods/degeneration.md). A measure that can only speak
for salad, such as strange letters, can only raise the score (monotone constraints), so that a text stranger than any
seen is not acquitted.

One window may be a strange list; a salad goes on. So windows of two lengths are averaged over a stretch, and the longer
the stretch (or if it is the whole of a short text), the lower the mean score that makes it a salad.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from assay.coherence.salad.measures import BRACKETS, notation_spans, running_sum, token_measures
from assay.coherence.text import Detection, TextView, true_stretches

# -----------------------------------------------------------------------------
# Measure a text in overlapping windows of tokens: how strange are its characters, letters, words and their order?
#
# Every measure is an average over the tokens or characters of a window of what `token_measures.py` says of each token.

MIN_CHARS, MIN_WORDS, MIN_TOKENS = 100, 8, 16
"""A text with fewer characters, words or tokens (marks counted) is too short to say anything."""

FEATURES = (
    "shape", "letters", "odd_words", "known", "function", "syntax", "script_jumps", "case_jumps", "digit_jumps",
    "loose_marks", "marks", "repeats", "lines", "word_length", "singles",
    "known_pairs", "known_joints", "odd_shapes", "bad_syntax", "unmatched", "low_starts", "inner_capitals", "stubs",
    "latin", "known_grams"
)  # fmt: skip


@dataclass(frozen=True)
class Windows:
    """Measures of all windows, shape (windows, len(FEATURES)), with their spans in tokens and code points."""

    values: NDArray[np.float64]
    first_token: NDArray[np.int64]
    end_token: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]


def running_sums(
    view: TextView, notation: Iterable[tuple[int, int]] = ()
) -> Mapping[str, NDArray[np.float64]] | None:
    """Running sums of all measures over the tokens, or None if there are too few to say anything."""
    if len(view.text) < MIN_CHARS or len(view.is_word) < MIN_TOKENS or int(view.is_word.sum()) < MIN_WORDS:
        return None
    sums = {name: running_sum(values) for name, values in token_measures(view, notation).items()}
    return sums if sums["prose"][-1] >= MIN_TOKENS else None


def measure(view: TextView, sums: Mapping[str, NDArray[np.float64]], window: int, stride: int) -> Windows:
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
    kinds = [np.abs(sums[f"open_{mark}"][end] - sums[f"open_{mark}"][first]) for mark, _ in BRACKETS]
    total: NDArray[np.float64] = np.sum(kinds, axis=0)
    return total


# -----------------------------------------------------------------------------

MODEL = "salad_trees.npz"
COARSE, FINE = (64, 16), (24, 8)
SCALES = (COARSE, FINE)
"""Window and stride in tokens: the long window sees grammar, the short one a salad between good sentences."""
ROWS = 128
"""Windows that go through the trees together."""
STRETCHES = ((20, 1.2), (10, 2.2))
"""Fine windows in a row, and the mean log-odds above which they are a salad."""
FEW, FEW_MORE = 6, 1.3
"""Where notation leaves fewer windows than this, they need so much more."""
FOREIGN_WORDS, FOREIGN_KNOWN, FOREIGN_MORE = 0.6, 0.5, 1.0
"""A text that is mostly of Latin words, and of which fewer are English than this, is of a language that the tables do not
know, and needs so much more."""
LEAST_WEIGHT = 0.5
"""Share of the tokens of a window that are no notation."""
PATIENCE, STEP = 64, 0.25
"""The more windows, the more strange ones by chance: every doubling past so many asks for so much more."""


@dataclass(frozen=True)
class Trees:
    """Boosted regression trees, nodes of all trees in one table; a leaf is its own child."""

    roots: NDArray[np.int64]
    feature: NDArray[np.int64]
    threshold: NDArray[np.float64]
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    value: NDArray[np.float64]
    baseline: float
    depth: int


@cache
def trees(window: int) -> Trees:
    """The shipped trees for windows of so many tokens."""
    with resources.files("assay.coherence.salad").joinpath(MODEL).open("rb") as file, np.load(file) as stored:
        names = ("roots", "feature", "threshold", "left", "right", "value")
        table = {name: stored[f"{name}_{window}"] for name in names}
        return Trees(
            **table, baseline=float(stored[f"baseline_{window}"]), depth=int(stored[f"depth_{window}"])
        )


def scores(values: NDArray[np.float64], model: Trees) -> NDArray[np.float64]:
    """Log-odds of salad for every window: the sum of the leaves that its measures (windows, features) lead to."""
    # Flat arrays and few rows at a time: everything stays in the cache, which makes this several times faster.
    children = np.stack([model.left, model.right], axis=1).ravel()
    parts = []
    for first in range(0, len(values), ROWS):
        rows = np.ascontiguousarray(values[first : first + ROWS])
        flat, row = (rows.ravel(), (np.arange(len(rows), dtype=np.int32) * rows.shape[1])[:, None])
        node = np.broadcast_to(model.roots, (len(rows), len(model.roots)))
        for _ in range(model.depth):
            goes_right = flat.take(row + model.feature.take(node)) > model.threshold.take(node)
            node = children.take(2 * node + goes_right)
        parts.append(model.baseline + model.value.take(node).sum(axis=1))
    return np.concatenate(parts) if parts else np.zeros(0)


def detect(view: TextView) -> Detection | None:
    """The first stretch of salad. What looks like one is looked at again without its notation."""
    found = _detect(view, running_sums(view))
    return found and _detect(view, running_sums(view, notation_spans(view.text)))


def _detect(view: TextView, sums: Mapping[str, NDArray[np.float64]] | None) -> Detection | None:
    if sums is None:
        return None
    every = measure(view, sums, *FINE)
    fine = _weighty(every, sums["prose"])
    if not len(fine.start):
        return None
    coarse = measure(view, sums, *COARSE)
    # Every fine window is seen together with the coarse one that begins at or before it.
    around = np.searchsorted(coarse.first_token, fine.first_token, side="right") - 1
    score = (scores(fine.values, trees(FINE[0])) + scores(coarse.values, trees(COARSE[0]))[around]) / 2
    more = STEP * max(0.0, float(np.log2(len(score) / PATIENCE)))
    if len(fine.start) < min(FEW, len(every.start)):
        more += FEW_MORE
    mean = dict(zip(FEATURES, fine.values.mean(axis=0).tolist(), strict=True))
    if mean["latin"] > FOREIGN_WORDS and mean["known"] < FOREIGN_KNOWN:
        more += FOREIGN_MORE
    found = [s for length, limit in STRETCHES if (s := _stretch(score, length, limit + more))]
    return _detection(fine, score, *min(found)) if found else None


def _weighty(windows: Windows, weight: NDArray[np.float64]) -> Windows:
    """The windows that are not mostly notation."""
    tokens = windows.end_token - windows.first_token
    kept = weight[windows.end_token] - weight[windows.first_token] >= LEAST_WEIGHT * tokens
    return Windows(*(values[kept] for values in vars(windows).values()))


def _stretch(score: NDArray[np.float64], length: int, limit: float) -> tuple[int, int] | None:
    """First and end of the windows of the first stretches whose mean is above the limit; a shorter text is one."""
    length = min(length, len(score))
    sums = np.concatenate(([0.0], np.cumsum(score)))
    starts, ends = true_stretches((sums[length:] - sums[:-length]) / length > limit)
    return (int(starts[0]), int(ends[0]) + length - 1) if len(starts) else None


def _detection(fine: Windows, score: NDArray[np.float64], first: int, end: int) -> Detection:
    """The salad in the windows [first, end), without the sane ones at its beginning."""
    # Where the sum of what follows is largest, salad became the likelier.
    before = np.concatenate(([0.0], np.cumsum(score[first:end])))[:-1]
    first += int(np.argmin(before))
    while first > 0 and score[first - 1] > 0:
        first -= 1
    worst = first + int(np.argmax(score[first:end]))
    measures = dict(zip(FEATURES, fine.values[worst].round(3).tolist(), strict=True))
    evidence = {
        "log_odds": round(float(score[worst]), 2),
        "mean_log_odds": round(float(score[first:end].mean()), 2),
        "windows": end - first,
    }
    # The first windows overlap what came before: the salad begins about where the first one is half full.
    onset = int(fine.start[0]) if first == 0 else int(fine.start[first] + fine.end[first]) // 2
    return Detection(kind_of(measures), onset, int(fine.end[end - 1]), evidence | _telling(measures))


def kind_of(measures: dict[str, float]) -> str:
    """The name of a salad, from what stands out in its worst window."""
    if measures["script_jumps"] > 0.08:
        return "mixed_scripts"
    if measures["digit_jumps"] > 0.08:
        return "digit_salad"
    if measures["function"] > 0.45 and measures["syntax"] < 0.2:
        return "function_word_salad"
    if measures["odd_words"] > 0.25 or measures["case_jumps"] > 0.04:
        return "subword_salad"
    if measures["repeats"] > 0.75:
        return "few_words"
    return "token_soup" if measures["marks"] > 0.3 else "word_salad"


def _telling(measures: dict[str, float]) -> dict[str, float]:
    names = (
        "shape", "letters", "odd_words", "known", "known_pairs", "known_grams", "function", "syntax", "repeats"
    )  # fmt: skip
    return {name: measures[name] for name in names}
