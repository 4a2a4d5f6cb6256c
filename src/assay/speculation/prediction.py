"""`assay spec LOG --predict COMPARISON`: what a healthy head will accept beside a changed target.

A head that reads the target's hidden states follows a target that changes: it drafts on the
changed states, and the text that it guesses is the changed target's own. So acceptance need not
fall with the distance between the two targets. Each position's acceptance, given the ones before
it, is taken to fall by the factor 1 − β d for a total variation d; the fitted β is 0 up to the
total variation that was measured. β comes from one head beside targets of many formats, the
errors from another model and from vLLM (`lab/benchmarks/heads/heads_tables.py`,
`lab/benchmarks/heads/results/heads_predict.json`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import UsageError
from assay.files import json_of
from assay.verdict import Finding, Severity, Table

BETA = 0.00
"""Share of the changed tokens that the head would have had right, fitted to the simulated rows of
one model: none.
"""

ERROR: float | None = 0.065
"""Largest error of position 0 on rows that were not fitted: another model's, and all that vLLM
served; None: not measured.
"""

LENGTH_ERROR: float | None = 0.31
"""The same of the tokens per step."""

FITTED_TO = 0.24
"""Largest total variation of the rows: beyond it nothing was measured."""


@dataclass(frozen=True)
class Change:
    """How far a target is from the one that the head was trained on. `exact` is False for a bound
    from the KL alone.
    """

    tv: float
    exact: bool
    source: str


@dataclass(frozen=True)
class Prediction:
    """Shares accepted by position and tokens a step beside the changed target; errors are None
    where they are not known.
    """

    change: Change
    positions: tuple[float, ...]
    tokens_per_step: float
    error: float | None = ERROR
    length_error: float | None = LENGTH_ERROR


def read_change(text: str) -> Change:
    """The total variation that `text` gives: a number, or the JSON of `assay compare` (its `tv`,
    else √(KL / 2) as a bound).

    UsageError where it gives none.
    """
    try:
        value = float(text)
    except ValueError:
        return _of_comparison(Path(text))
    if not 0 <= value <= 1:
        raise _unusable(f"--predict {text}: a total variation lies between 0 and 1")
    return Change(value, True, "given")


def _of_comparison(path: Path) -> Change:
    try:
        results = json_of(path)["results"]
        tv, kl = (results.get("tv") or {}).get("mean"), (results.get("kld") or {}).get("mean")
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(
            f"--predict {path}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unusable(f"--predict {path} is no result of assay compare") from error
    if isinstance(tv, int | float) and math.isfinite(tv):
        return Change(float(tv), True, path.name)
    if isinstance(kl, int | float) and 0 <= kl < math.inf:
        return Change(min(1.0, math.sqrt(kl / 2)), False, path.name)
    raise _unusable(f"--predict {path} has neither a total variation nor a KL")


def _unusable(message: str) -> UsageError:
    return UsageError(
        message,
        remedy=(
            "assay compare hf:TRAINED hf:SERVED --text PROMPTS --json FILE, then assay spec LOG"
            " --predict FILE"
        ),
        finding_id="speculation.usage",
    )


def predict(positions: Sequence[float], change: Change) -> Prediction:
    """From the shares [k] of steps that accept at least so many drafts beside the head's own
    target.
    """
    factor = max(0.0, 1 - BETA * change.tv)
    shares = tuple(share * factor ** (j + 1) for j, share in enumerate(positions))
    return Prediction(change, shares, 1 + sum(shares))


def to_json(p: Prediction) -> dict[str, Any]:
    """Plain JSON types."""
    return {
        "tv": p.change.tv,
        "tv_exact": p.change.exact,
        "positions": list(p.positions),
        "tokens_per_step": p.tokens_per_step,
        "error": p.error,
        "tokens_per_step_error": p.length_error,
    }


def table(p: Prediction, now: Sequence[float]) -> Table:
    """Beside what the source shows."""
    rows = [
        (
            f"position {j}",
            f"{100 * a:.1f} %",
            f"{100 * b:.1f} %" + ("" if p.error is None else f" ± {100 * p.error:.1f}"),
        )
        for j, (a, b) in enumerate(zip(now, p.positions, strict=True))
    ]
    rows.append(
        (
            "tokens per step",
            f"{1 + sum(now):.2f}",
            f"{p.tokens_per_step:.2f}"
            + ("" if p.length_error is None else f" ± {p.length_error:.2f}"),
        )
    )
    kind = "total variation" if p.change.exact else "total variation, at most"
    known = p.error is not None
    error = (
        "±: the largest error on measured rows that were not fitted."
        if known
        else "The error is not known."
    )
    note = f"{kind}: {100 * p.change.tv:.2g} %. {error}"
    return Table(
        "Predicted beside the changed target",
        ("", "now", "predicted"),
        rows,
        frozenset({1, 2}),
        note,
    )


def doubts(p: Prediction) -> list[Finding]:
    """What makes the prediction weaker than its error says."""
    if p.change.tv <= FITTED_TO and p.change.exact:
        return []
    title = (
        f"the target changes by {100 * p.change.tv:.0f} %, and the prediction was measured up to"
        f" {100 * FITTED_TO:.0f} %"
        if p.change.tv > FITTED_TO
        else (
            "the comparison has no total variation: the prediction is a lower bound, from √(KL / 2)"
        )
    )
    return [
        Finding(
            "speculation.prediction",
            Severity.WARNING,
            title,
            remedies=("serve it, and run assay spec on its log",),
        )
    ]
