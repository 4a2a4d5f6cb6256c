"""Which of many configurations matter: those that no other beats in bytes and KL at once, and the one to take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

GRADES = ("ACCEPT", "MARGINAL")
"""Best first. What is graded otherwise is taken only where nothing else is there."""


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the (bytes, KL) that no other point beats in one without being worse in the other; by bytes.

    Of equal points the first stands for all.
    """
    found: list[int] = []
    best = math.inf
    for i in sorted(range(len(points)), key=lambda i: (*points[i], i)):
        if points[i][1] < best:
            found.append(i)
            best = points[i][1]
    return found


def choose(rows: Sequence[Mapping[str, Any]]) -> int:
    """Index of the smallest row of the best grade that any has; of those of no such grade the one with the least KL."""
    for grade in GRADES:
        graded = [i for i, row in enumerate(rows) if row["grade"] == grade]
        if graded:
            return min(graded, key=lambda i: (rows[i]["bytes"]["stored"], rows[i]["kld"]["mean"]))
    return min(range(len(rows)), key=lambda i: (rows[i]["kld"]["mean"], rows[i]["bytes"]["stored"]))


def curse(chosen: tuple[float, float], again: tuple[float, float]) -> dict[str, float]:
    """Second measurement minus first, each (value, standard error), with a normal 95 % interval."""
    value = again[0] - chosen[0]
    half = 1.959964 * math.hypot(chosen[1], again[1])
    return {"value": value, "lo": value - half, "hi": value + half}
