"""Salads: text whose characters, words or word order no language would produce.

Each window of tokens gets a score, the log-odds of boosted trees on its measures. They were fitted
by `benchmarks/grade/fit_salad.py` on legitimate text (prose, code, data, 300 languages) against
outputs of broken models and synthetic salads, never on what the benchmark reports
(docs/methods/degeneration.md). A measure that can only speak for salad, such as strange letters,
can only raise the score (monotone constraints), so that a text stranger than any seen is not
acquitted.

One window may be a strange list; a salad goes on. So windows of two lengths are averaged over a
stretch, and the longer the stretch (or if it is the whole of a short text), the lower the mean
score that makes it a salad.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from assay.coherence.arrays import true_stretches
from assay.coherence.detection import CAUSES, TOKENIZER, Detection, Family
from assay.coherence.detectors.notation import notation_spans
from assay.coherence.detectors.token_measures import BRACKETS
from assay.coherence.detectors.trees import scores, trees
from assay.coherence.detectors.windows import FEATURES, Windows, measure, running_sums
from assay.coherence.text import TextView

COARSE, FINE = (64, 16), (24, 8)
SCALES = (COARSE, FINE)
"""Window and stride in tokens: the long window sees grammar, the short one a salad between good
sentences.
"""


STRETCHES = ((20, 1.2), (10, 2.2))
"""Fine windows in a row, and the mean log-odds above which they are a salad."""
FEW, FEW_MORE = 6, 1.3
"""Where notation leaves fewer windows than this, they need so much more."""
FOREIGN_WORDS, FOREIGN_KNOWN, FOREIGN_MORE = 0.6, 0.5, 1.0
"""A text that is mostly of Latin words, and of which fewer are English than this, is of a language
that the tables do not know, and needs so much more."""
LEAST_WEIGHT = 0.5
"""Share of the tokens of a window that are no notation."""
NESTED_PAIRS, NESTED_CHARS, NESTED_LIMIT = 3, 80, 6.5
"""Brackets that close in their order, so many of them, one for so many code points, are code below
this mean.
"""
_CLOSING = {closing: opening for opening, closing in BRACKETS}
PATIENCE, STEP = 64, 0.25
"""The more windows, the more strange ones by chance: every doubling past so many asks for so much
more.
"""


def detect_salad(view: TextView) -> Detection | None:
    """The first stretch of salad. What looks like one is looked at again without its notation."""
    found = _detect(view, running_sums(view))
    found = found and _detect(view, running_sums(view, notation_spans(view.text)))
    if (
        found
        and found.evidence["mean_log_odds"] < NESTED_LIMIT
        and _nested(view.text[found.onset_char : found.end])
    ):
        return None
    return found


def _nested(text: str) -> bool:
    """Whether brackets stand close and each closes in its order, as in dense code: salads open and
    close them at random.
    """
    opened: list[str] = []
    pairs = 0
    for mark in text:
        if mark in _CLOSING:
            if not opened or opened.pop() != _CLOSING[mark]:
                return False
            pairs += 1
        elif mark in _CLOSING.values():
            opened.append(mark)
    return not opened and pairs >= NESTED_PAIRS and len(text) <= NESTED_CHARS * pairs


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
    score = (
        scores(fine.values, trees(FINE[0])) + scores(coarse.values, trees(COARSE[0]))[around]
    ) / 2
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
    """First and end of the windows of the first stretches whose mean is above the limit; a shorter
    text is one.
    """
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
    # The first windows overlap what came before: the salad begins about where the first one is half
    # full.
    onset = int(fine.start[0]) if first == 0 else int(fine.start[first] + fine.end[first]) // 2
    kind = kind_of(measures)
    causes = (*CAUSES[Family.SALAD], TOKENIZER) if kind in ("mixed_scripts", "token_soup") else ()
    family = Family.LOOP if kind == "few_words" else Family.SALAD
    evidence |= _telling(measures)
    return Detection(kind, onset, int(fine.end[end - 1]), evidence, family, causes)


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
        "shape",
        "letters",
        "odd_words",
        "known",
        "known_pairs",
        "known_grams",
        "function",
        "syntax",
        "repeats",
    )
    return {name: measures[name] for name in names}
