"""The table of greedy continuations."""

from __future__ import annotations

from assay.engines.continuing import GreedyStep
from assay.fidelity.greedy import NEAR_TIE, Divergence, Greedy
from assay.verdict import Table


def greedy_blocks(greedy: Greedy, prefix: str) -> list[Table]:
    """One row a prefix, with both sides' two likeliest tokens where they part."""
    title = f"{prefix}Greedy continuations"
    if greedy.reason:
        return [Table(title, ("not available",), [[greedy.reason]])]
    median = "–" if greedy.median_first is None else f"{greedy.median_first:g}"
    return [
        Table(
            title,
            ("window", "parts at token", "reference", "gap", "candidate", "gap", "what it is"),
            [_row(d, greedy) for d in greedy.found],
            numeric=frozenset({0, 1, 3, 5}),
            note=f"{len(greedy.diverged)} of {len(greedy.found)} part within {greedy.tokens} tokens, median {median}. "
            f"Gaps are those of the two likeliest tokens, in nats; below {NEAR_TIE} on both sides rounding may "
            "decide. After the first difference the two read different texts.",
        )
    ]


def _row(d: Divergence, greedy: Greedy) -> list[str]:
    if d.first is None or d.reference is None or d.candidate is None:
        return [str(d.window), "–", "", "", "", "", "the same throughout"]
    what = "near tie" if d.near_tie else "another choice"
    return [
        str(d.window),
        str(d.first),
        _shown(d.reference, greedy),
        f"{d.reference.gap:.3f}",
        _shown(d.candidate, greedy),
        f"{d.candidate.gap:.3f}",
        what,
    ]


def _shown(step: GreedyStep, greedy: Greedy) -> str:
    """The token that was taken and the next likeliest."""
    return f"{greedy.texts(step.token)!r} over {greedy.texts(step.runner_up)!r}"
