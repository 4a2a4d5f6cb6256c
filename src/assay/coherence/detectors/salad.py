"""Salads: text whose characters, words or word order no language would produce.

Each window gets a score, the log-odds of boosted trees on the measures of `windows.py`. They were fitted by
`benchmarks/fit_salad.py` on legitimate text (prose, code, data, 300 languages) against outputs of broken models and
synthetic salads, never on what the benchmark reports (docs/methods/degeneration.md). A measure that can only speak
for salad, such as strange letters, can only raise the score (monotone constraints), so that a text stranger than any
seen is not acquitted.
One bad window may be a strange list; a salad is a stretch of them, or a whole short text.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from assay.coherence import windows
from assay.coherence.detectors.base import Detection
from assay.coherence.detectors.periodic import true_stretches
from assay.coherence.textview import TextView

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MODEL = "salad_trees.npz"
SCALES = ((64, 16), (24, 8))
"""Window and stride in tokens: the long window sees grammar, the short one a salad between good sentences."""
ROWS = 128
"""Windows that go through the trees together."""
LIMITS = {64: (2.9, 2, 4.0), 24: (3.5, 3, 5.5)}
"""For each scale: the log-odds from which a window counts, how many such windows in a row make a salad, and the
log-odds that one window needs in a text that holds no more of them."""


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
    import numpy as np

    with resources.files("assay.coherence.data").joinpath(MODEL).open("rb") as file, np.load(file) as stored:
        names = ("roots", "feature", "threshold", "left", "right", "value")
        table = {name: stored[f"{name}_{window}"] for name in names}
        return Trees(
            **table, baseline=float(stored[f"baseline_{window}"]), depth=int(stored[f"depth_{window}"])
        )


def scores(values: NDArray[np.float64], model: Trees) -> NDArray[np.float64]:
    """Log-odds of salad for every window: the sum of the leaves that its measures (windows, features) lead to."""
    import numpy as np

    # Flat arrays and few rows at a time: everything stays in the cache, which makes this several times faster.
    children = np.stack([model.left, model.right], axis=1).ravel()
    parts = []
    for first in range(0, len(values), ROWS):
        rows = np.ascontiguousarray(values[first : first + ROWS])
        flat, row = rows.ravel(), (np.arange(len(rows), dtype=np.int32) * rows.shape[1])[:, None]
        node = np.broadcast_to(model.roots, (len(rows), len(model.roots)))
        for _ in range(model.depth):
            goes_right = flat.take(row + model.feature.take(node)) > model.threshold.take(node)
            node = children.take(2 * node + goes_right)
        parts.append(model.baseline + model.value.take(node).sum(axis=1))
    return np.concatenate(parts) if parts else np.zeros(0)


def detect(view: TextView) -> Detection | None:
    """The first stretch of salad, at either scale."""
    sums = windows.running_sums(view)
    if sums is None:
        return None
    found = [
        d
        for window, stride in SCALES
        if (d := _in_windows(windows.measure(view, sums, window, stride), window))
    ]
    return min(found, key=lambda d: d.onset, default=None)


def _in_windows(measured: windows.Windows, window: int) -> Detection | None:
    import numpy as np

    score = scores(measured.values, trees(window))
    limit, stretch, lone_limit = LIMITS[window]
    # The more windows, the more strange ones by chance: every doubling past 64 asks for one more in a row.
    stretch += max(0, (len(score) // 64).bit_length() - 1) if len(score) >= 128 else 0
    lone = len(score) < stretch
    starts, ends = true_stretches(score > (lone_limit if lone else limit))
    for first, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if end - first >= (1 if lone else stretch):
            while first > 0 and score[first - 1] > 0:  # it began where salad became the likelier
                first -= 1
            worst = first + int(np.argmax(score[first:end]))
            measures = dict(zip(windows.FEATURES, measured.values[worst].round(3).tolist(), strict=True))
            evidence = {
                "log_odds": round(float(score[worst]), 2),
                "window_tokens": window,
                "windows": end - first,
            }
            # The first windows overlap what came before: the salad begins about where the first one is half full.
            onset = (
                int(measured.start[first])
                if first == 0
                else int(measured.start[first] + measured.end[first]) // 2
            )
            return Detection(
                kind_of(measures), onset, int(measured.end[end - 1]), evidence | _telling(measures)
            )
    return None


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
    names = ("shape", "letters", "odd_words", "known", "function", "syntax", "repeats")
    return {name: measures[name] for name in names}
