"""Fit the weights of the salad detector: a logistic regression on window measures and their products.

    python benchmarks/fit_salad.py

Reads tune halves only: legitimate chunks, synthetic salads, and outputs of broken models labelled as salads.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from broken_outputs import broken
from legit_texts import legitimate
from scipy.optimize import minimize
from split import is_tune
from synthetic_salads import salads

from assay.coherence import windows
from assay.coherence.detectors import salad
from assay.coherence.textview import TextView

OUT = Path(salad.__file__).parent.parent / "data" / salad.WEIGHTS
RIDGE = 3e-4


def main() -> None:
    legit = [item for item in legitimate() if is_tune(item.source)]
    bad = [text for _, text in salads(legit)]
    bad += [t.text for t in broken() if t.label == "salad" and is_tune(t.source)]
    good = [t.text for t in legit] + [t.text for t in broken() if t.label == "ok" and is_tune(t.source)]
    x0, w0 = stacked(good)
    x1, w1 = stacked(bad)
    values = np.concatenate([x0, x1])
    lower, upper = np.percentile(values, [0.5, 99.5], axis=0)
    mean = np.clip(values, lower, upper).mean(axis=0)
    scale = np.maximum(np.clip(values, lower, upper).std(axis=0), 1e-3)
    shape = salad.Weights(lower, upper, mean, scale, np.zeros(0), 0.0)
    design = salad.expand(values, shape)
    target = np.concatenate([np.zeros(len(x0)), np.ones(len(x1))])
    weight = np.concatenate([w0 / w0.sum(), w1 / w1.sum()]) / 2
    solution = fit(design, target, weight)
    weights = salad.Weights(lower, upper, mean, scale, solution[:-1], float(solution[-1]))
    OUT.write_text(json.dumps(weights.to_json(), indent=0) + "\n", encoding="utf-8")
    score0, score1 = salad.scores(x0, weights), salad.scores(x1, weights)
    print(f"windows: {len(x0)} legitimate, {len(x1)} salad")
    for limit in (0, 1, 2, 3, 4, 5, 6):
        print(f"score > {limit}: {np.mean(score0 > limit):.4%} of legitimate, {np.mean(score1 > limit):.2%} of salad windows")


def stacked(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Measures of all windows of all texts, and weights by which each text counts once."""
    found = [w.values for t in texts if (w := windows.measure(TextView(t))) is not None]
    return np.concatenate(found), np.concatenate([np.full(len(v), 1 / len(v) ** 0.5) for v in found])


def fit(design: np.ndarray, target: np.ndarray, weight: np.ndarray) -> np.ndarray:
    def loss(beta: np.ndarray) -> tuple[float, np.ndarray]:
        z = design @ beta[:-1] + beta[-1]
        value = np.sum(weight * (np.logaddexp(0, z) - target * z)) + RIDGE * np.sum(beta[:-1] ** 2)
        error = weight * (1 / (1 + np.exp(-z)) - target)
        return value, np.append(design.T @ error + 2 * RIDGE * beta[:-1], error.sum())

    return minimize(loss, np.zeros(design.shape[1] + 1), jac=True, method="L-BFGS-B", options={"maxiter": 500}).x


if __name__ == "__main__":
    main()
