"""Boosted trees that turn the measures of a window into log-odds of salad."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

MODEL = "salad_trees.npz"


ROWS = 128
"""Windows that go through the trees together."""


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
    with (
        resources.files("assay.coherence.detectors").joinpath(MODEL).open("rb") as file,
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
    """Log-odds of salad for every window: the sum of the leaves that its measures (windows,
    features) lead to.
    """
    # Flat arrays and few rows at a time: everything stays in the cache, which makes this several
    # times faster.
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
