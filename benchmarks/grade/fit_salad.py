"""Fit the trees of the salad detector on the measures of windows of text.

    pip install scikit-learn && python benchmarks/grade/fit_salad.py

Reads tune halves only: legitimate chunks, synthetic salads, and outputs of broken models labelled
as salads. Legitimate sources on which the language tables were counted are left out: on these the
tables are surer than on any other text.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier

from assay.coherence.detectors import salad, trees, windows
from assay.coherence.text import TextView
from broken_outputs import broken
from legit_texts import (
    Legit,
    generated,
    legitimate,
    repetitive,
    stdlib,
    topics,
    translations,
    udhr,
    wikitext,
)
from split import is_table, is_tune
from synthetic_salads import salads

OUT = Path(trees.__file__).parent / trees.MODEL

DENSE, DENSER = 4, 10
"""Chunks of each source for one of the benchmark: false alarms need more text to be told apart than
salads, those of other languages and of what programs print most."""
MOST_WINDOWS = 8
"""Windows of one text, drawn at random: more of them say little new."""

# +1: more of it can only speak for salad; -1: only against it.
DIRECTION = {
    "shape": 1,
    "letters": 1,
    "odd_words": 1,
    "syntax": -1,
    "script_jumps": 1,
    "case_jumps": 1,
    "digit_jumps": 1,
    "loose_marks": 1,
    "lines": -1,
    "singles": 1,
    "known_pairs": -1,
    "known_joints": -1,
    "odd_shapes": 1,
    "bad_syntax": 1,
    "unmatched": 1,
    "low_starts": 1,
    "stubs": 1,
    "known_grams": -1,
}


def main() -> None:
    legit = [item for item in legitimate() if is_tune(item.source)]
    outputs = [o for o in broken() if is_tune(o.source)]
    good = [(item.text, 1.0) for item in fit_texts()]
    good += [(o.text, 4.0) for o in outputs if o.label == "ok"]
    bad = [(text, 1.0) for _, text in salads(legit, count=1800)]
    bad += [
        (o.text, 20.0) for o in outputs if o.label == "salad"
    ]  # real ones are fewer, and what it is about
    tables = {}
    for window, stride in salad.SCALES:
        print(f"windows of {window} tokens")
        tables |= {
            f"{name}_{window}": value
            for name, value in fit_scale(good, bad, window, stride).items()
        }
    np.savez_compressed(OUT, **tables)
    print(f"{OUT.stat().st_size:,} bytes")


def fit_texts() -> list[Legit]:
    """Legitimate chunks of the tune half, none of a source on which the tables were counted."""
    counted = [*topics(DENSE), *stdlib(DENSE), *generated(DENSER), *udhr(DENSER)]
    others = [*wikitext(DENSE), *translations(DENSER), *repetitive()]
    kept = [i for i in counted if is_tune(i.source) and not is_table(i.source)]
    kept += [i for i in others if is_tune(i.source)]
    return list({item.text: item for item in kept}.values())


def fit_scale(
    good: list[tuple[str, float]], bad: list[tuple[str, float]], window: int, stride: int
) -> dict[str, np.ndarray]:
    x0, w0 = stacked(good, window, stride)
    x1, w1 = stacked(bad, window, stride)
    model = HistGradientBoostingClassifier(
        max_iter=120,
        learning_rate=0.12,
        max_features=0.35,
        max_leaf_nodes=12,
        max_depth=5,
        min_samples_leaf=40,
        l2_regularization=10.0,
        monotonic_cst=[DIRECTION.get(name, 0) for name in windows.FEATURES],
        random_state=0,
        early_stopping=False,
    )
    target = np.concatenate([np.zeros(len(x0)), np.ones(len(x1))])
    weight = np.concatenate([w0 * len(x0) / w0.sum(), w1 * len(x0) / w1.sum()])
    model.fit(np.concatenate([x0, x1]), target, sample_weight=weight)
    tables = as_tables(model)
    fitted = trees.Trees(**tables)
    score0, score1 = trees.scores(x0, fitted), trees.scores(x1, fitted)
    print(
        f"  {len(x0)} legitimate, {len(x1)} salad; exported trees agree:",
        np.allclose(score0, model.decision_function(x0), atol=1e-3),
    )
    for limit in (0, 1, 2, 3, 4, 5, 6):
        print(
            f"  score > {limit}: {np.mean(score0 > limit):.4%} of legitimate,"
            f" {np.mean(score1 > limit):.2%} of salad windows"
        )
    return tables


def as_tables(model: HistGradientBoostingClassifier) -> dict[str, np.ndarray]:
    """The fitted trees as flat arrays: what `assay` needs to run them without scikit-learn."""
    parts: dict[str, list[np.ndarray]] = {
        name: [] for name in ("feature", "threshold", "left", "right", "value")
    }
    roots, offset, depth = [], 0, 0
    for (tree,) in model._predictors:
        nodes = tree.nodes
        own = np.arange(len(nodes))
        leaf = nodes["is_leaf"].astype(bool)
        parts["feature"].append(np.where(leaf, 0, nodes["feature_idx"]))
        parts["threshold"].append(np.where(leaf, 0.0, nodes["num_threshold"]))
        parts["left"].append(np.where(leaf, own, nodes["left"]) + offset)
        parts["right"].append(np.where(leaf, own, nodes["right"]) + offset)
        parts["value"].append(np.where(leaf, nodes["value"], 0.0))
        roots.append(offset)
        offset += len(nodes)
        depth = max(depth, int(nodes["depth"].max()))
    types = {
        "feature": np.int16,
        "threshold": np.float64,
        "left": np.int32,
        "right": np.int32,
        "value": np.float32,
    }
    tables = {name: np.concatenate(rows).astype(types[name]) for name, rows in parts.items()}
    return {
        **tables,
        "roots": np.array(roots, dtype=np.int32),
        "baseline": np.float64(model._baseline_prediction.item()),
        "depth": np.int64(depth),
    }


def stacked(
    texts: list[tuple[str, float]], window: int, stride: int
) -> tuple[np.ndarray, np.ndarray]:
    """Measures of windows of all texts, and their weights: a long text counts less than its
    windows.
    """
    rng = np.random.default_rng(0)
    found, weights = [], []
    for text, weight in texts:
        view = TextView(text)
        sums = windows.running_sums(view)
        if sums is not None:
            values = windows.measure(view, sums, window, stride).values
            kept = rng.permutation(len(values))[:MOST_WINDOWS]
            found.append(values[kept])
            weights.append(np.full(len(kept), weight * len(values) ** -0.5))
    return np.concatenate(found), np.concatenate(weights)


if __name__ == "__main__":
    main()
