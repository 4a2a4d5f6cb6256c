"""Which codec of a sweep to take, and what the choice is worth.

The one to take, the smallest of the best grade, was chosen for what these windows say of it; so it
is measured again on windows that took no part, and the difference is the selection bias (the
winner's curse).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from assay.verdict import Finding, Severity, Verdict

GRADES = ("ACCEPT", "MARGINAL")
"""Best first; a row with another grade is never chosen."""


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the (bytes, KL) that no other point beats in one without being worse in the other;
    by bytes.

    Of equal points the first is taken.
    """
    found: list[int] = []
    best = math.inf
    for i in sorted(range(len(points)), key=lambda i: (*points[i], i)):
        if points[i][1] < best:
            found.append(i)
            best = points[i][1]
    return found


def choose(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """Index of the smallest row of the best grade that any has; None where none has a grade that
    can be taken.
    """
    ranks = ranked(rows)
    for grade in GRADES:
        graded = [i for i in ranks if rows[i]["grade"] == grade]
        if graded:
            return min(graded, key=lambda i: ranks[i])
    return None


def ranked(rows: Sequence[Mapping[str, Any]]) -> dict[int, tuple[float, float]]:
    """(stored bytes, KL) of the rows that have both, by index; what the budget cut short may lack
    either.
    """
    figures = {i: (bytes_of(row), row["kld"]["mean"]) for i, row in enumerate(rows)}
    return {i: (a, b) for i, (a, b) in figures.items() if a is not None and b is not None}


def bytes_of(row: Mapping[str, Any]) -> float | None:
    """Stored bytes of a row, None if no stream was encoded."""
    return row["bytes"]["stored"] if row["bytes"] else None


def selection_bias(chosen: tuple[float, float], again: tuple[float, float]) -> dict[str, float]:
    """Second measurement minus first, each (value, standard error), with a normal 95 % interval."""
    value = again[0] - chosen[0]
    half = 1.959964 * math.hypot(chosen[1], again[1])
    return {"value": value, "lo": value - half, "hi": value + half}


def winner_of(row: Mapping[str, Any], again: Mapping[str, Any] | None) -> dict[str, Any]:
    """The chosen row as `results.winner`, with the selection bias if both measurements have
    errors.
    """
    found: dict[str, Any] = {"codec": row["codec"], "same_windows": row, "fresh_windows": again}
    figures = [(r["kld"]["mean"], r["kld_se"]) for r in (row, again) if r]
    if len(figures) == 2 and all(x is not None and math.isfinite(x) for f in figures for x in f):
        found["winners_curse"] = selection_bias(*figures)
    return found


def judged(
    rows: Sequence[Mapping[str, Any]], winner: Mapping[str, Any] | None
) -> tuple[Verdict, list[Finding]]:
    """PASS needs a codec with a grade that fresh windows confirm; where all are rejected the sweep
    fails.
    """
    if winner is None:
        grades = [row["grade"] for row in rows]
        undecided = [row["codec"] for row in rows if row["grade"] != "REJECT"]
        if grades and not undecided:
            title = f"none of the {len(rows)} codecs is within the margins: every one is REJECT"
            remedies = (
                "sweep codecs with more bits, or keep first tokens and boundary layers exact",
            )
            return Verdict.FAIL, [
                Finding("kv.none_accepted", Severity.ERROR, title, remedies=remedies)
            ]
        title = (
            f"nothing is chosen: {len(undecided)} of {len(rows)} codecs are undecided, and none is"
            " accepted"
        )
        remedies = ("run again with more windows (--windows)",)
        return Verdict.INCONCLUSIVE, [
            Finding("kv.undecided", Severity.WARNING, title, remedies=remedies)
        ]
    again = winner["fresh_windows"]
    if again and again["grade"] not in GRADES:
        title = f"fresh windows do not confirm {winner['codec']}: {again['grade']} on them"
        remedies = (
            "run again with more windows (--windows, --fresh), or take a codec with more bits",
        )
        return Verdict.INCONCLUSIVE, [
            Finding("kv.choice_unconfirmed", Severity.WARNING, title, remedies=remedies)
        ]
    return Verdict.PASS, []
