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
COARSE, FINE = (64, 16), (24, 8)
SCALES = (COARSE, FINE)
"""Window and stride in tokens: the long window sees grammar, the short one a salad between good sentences."""
ROWS = 128
"""Windows that go through the trees together."""
STRETCHES = ((20, 1.2), (10, 2.2))
"""Fine windows in a row, and the mean log-odds above which they are a salad."""
SHORT, SHORT_LIMIT = 6, 2.5
"""A text of fewer fine windows needs more."""
FOREIGN_WORDS, FOREIGN_KNOWN, FOREIGN_MORE = 0.6, 0.5, 1.0
"""A text that is mostly of Latin words, and of which fewer are English than this, is of a language that the tables do not
know, and needs so much more."""
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
    import numpy as np

    with (
        resources.files("assay.coherence.data").joinpath(MODEL).open("rb") as file,
        np.load(file) as stored,
    ):
        names = ("roots", "feature", "threshold", "left", "right", "value")
        table = {name: stored[f"{name}_{window}"] for name in names}
        return Trees(
            **table,
            baseline=float(stored[f"baseline_{window}"]),
            depth=int(stored[f"depth_{window}"]),
        )


def scores(values: NDArray[np.float64], model: Trees) -> NDArray[np.float64]:
    """Log-odds of salad for every window: the sum of the leaves that its measures (windows, features) lead to."""
    import numpy as np

    # Flat arrays and few rows at a time: everything stays in the cache, which makes this several times faster.
    children = np.stack([model.left, model.right], axis=1).ravel()
    parts = []
    for first in range(0, len(values), ROWS):
        rows = np.ascontiguousarray(values[first : first + ROWS])
        flat, row = (
            rows.ravel(),
            (np.arange(len(rows), dtype=np.int32) * rows.shape[1])[:, None],
        )
        node = np.broadcast_to(model.roots, (len(rows), len(model.roots)))
        for _ in range(model.depth):
            goes_right = flat.take(row + model.feature.take(node)) > model.threshold.take(node)
            node = children.take(2 * node + goes_right)
        parts.append(model.baseline + model.value.take(node).sum(axis=1))
    return np.concatenate(parts) if parts else np.zeros(0)


def detect(view: TextView) -> Detection | None:
    """The first stretch of salad."""
    import numpy as np

    sums = windows.running_sums(view)
    if sums is None:
        return None
    fine = windows.measure(view, sums, *FINE)
    coarse = windows.measure(view, sums, *COARSE)
    # Every fine window is seen together with the coarse one that begins at or before it.
    around = np.searchsorted(coarse.first_token, fine.first_token, side="right") - 1
    score = (scores(fine.values, trees(FINE[0])) + scores(coarse.values, trees(COARSE[0]))[around]) / 2
    more = STEP * max(0.0, float(np.log2(len(score) / PATIENCE)))
    mean = dict(zip(windows.FEATURES, fine.values.mean(axis=0).tolist(), strict=True))
    if mean["latin"] > FOREIGN_WORDS and mean["known"] < FOREIGN_KNOWN:
        more += FOREIGN_MORE
    found = [s for length, limit in STRETCHES if (s := _stretch(score, length, limit + more))]
    return _detection(fine, score, *min(found)) if found else None


def _stretch(score: NDArray[np.float64], length: int, limit: float) -> tuple[int, int] | None:
    """First and end of the windows of the first stretches whose mean is above the limit; a shorter text is one."""
    import numpy as np

    length = min(length, len(score))
    sums = np.concatenate(([0.0], np.cumsum(score)))
    starts, ends = true_stretches((sums[length:] - sums[:-length]) / length > limit)
    return (int(starts[0]), int(ends[0]) + length - 1) if len(starts) else None


def _detection(fine: windows.Windows, score: NDArray[np.float64], first: int, end: int) -> Detection:
    """The salad in the windows [first, end), without the sane ones at its beginning."""
    import numpy as np

    # Where the sum of what follows is largest, salad became the likelier.
    before = np.concatenate(([0.0], np.cumsum(score[first:end])))[:-1]
    first += int(np.argmin(before))
    while first > 0 and score[first - 1] > 0:
        first -= 1
    worst = first + int(np.argmax(score[first:end]))
    measures = dict(zip(windows.FEATURES, fine.values[worst].round(3).tolist(), strict=True))
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
        "shape", "letters", "odd_words", "known", "known_pairs", "known_grams", "function", "syntax", "repeats",
    )  # fmt: skip
    return {name: measures[name] for name in names}
