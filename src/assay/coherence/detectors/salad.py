"""Salads: text whose characters, words or word order no language would produce.

Each window of about 64 tokens gets a score, the log-odds of a logistic regression on the measures of `windows.py`
and their products. The weights were fitted on legitimate text (prose, code, data, 300 languages) against outputs
of broken models and synthetic salads, never on what the benchmark reports (docs/methods/degeneration.md).
One bad window may be a strange list; a salad is a stretch of them, or a whole short text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from assay.coherence import windows
from assay.coherence.detectors.base import Detection
from assay.coherence.detectors.periodic import true_stretches
from assay.coherence.textview import TextView

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WEIGHTS = "salad_weights.json"
SCALES = ((64, 16), (24, 8))
"""Window and stride in tokens: the long window sees grammar, the short one a salad between good sentences."""
LIMITS = {64: (1.5, 2, 2.5), 24: (3.5, 3, 6.0)}
"""For each scale: the log-odds from which a window counts, how many such windows in a row make a salad, and the
log-odds that one window needs in a text that holds no more of them."""


@dataclass(frozen=True)
class Weights:
    """Clipping range, mean and scale of every measure; coefficients of measures and products; intercept."""

    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    mean: NDArray[np.float64]
    scale: NDArray[np.float64]
    beta: NDArray[np.float64]
    intercept: float

    def to_json(self) -> dict[str, Any]:
        """The weights as they are stored, rounded."""
        rounded = {
            k: [round(float(v), 5) for v in getattr(self, k)]
            for k in ("lower", "upper", "mean", "scale", "beta")
        }
        return {**rounded, "intercept": round(self.intercept, 5)}


@cache
def weights(window: int) -> Weights:
    """The shipped weights for windows of so many tokens."""
    import numpy as np

    stored = json.loads(resources.files("assay.coherence.data").joinpath(WEIGHTS).read_text(encoding="utf-8"))
    scale = stored["scales"][str(window)]
    arrays = {key: np.array(scale[key]) for key in ("lower", "upper", "mean", "scale", "beta")}
    return Weights(**arrays, intercept=float(scale["intercept"]))


def expand(values: NDArray[np.float64], shape: Weights) -> NDArray[np.float64]:
    """Standardised measures, their squares and products: shape (windows, f + f(f+1)/2)."""
    import numpy as np

    # Clipped, so that a text stranger than any seen gets the score of the strangest seen and not more.
    z = (np.clip(values, shape.lower, shape.upper) - shape.mean) / shape.scale
    a, b = np.triu_indices(z.shape[1])
    return np.concatenate([z, z[:, a] * z[:, b]], axis=1)


def scores(values: NDArray[np.float64], fitted: Weights) -> NDArray[np.float64]:
    """Log-odds of salad for every window."""
    return expand(values, fitted) @ fitted.beta + fitted.intercept


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

    score = scores(measured.values, weights(window))
    limit, stretch, lone_limit = LIMITS[window]
    lone = len(score) < stretch
    starts, ends = true_stretches(score > (lone_limit if lone else limit))
    for first, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if end - first >= (1 if lone else stretch):
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
