"""From what was seen of every token of a candidate to its result: figures, breakdowns, floors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.errors import AssayError
from assay.fidelity.breakdown.bins import by_class, by_confidence, by_depth, worst_tokens
from assay.fidelity.breakdown.floors import Floors
from assay.fidelity.breakdown.token_class import token_class
from assay.fidelity.engaged import Engaged
from assay.fidelity.observation import WindowObservation
from assay.fidelity.plan import Plan
from assay.fidelity.result import CandidateResult
from assay.fidelity.summary import margins_of, summarise
from assay.stats import Resampling

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Scores:
    """What was seen of one candidate.

    Attributes:
        label: How it is named in tables, without folders.
        seen: Its windows.
        engaged: Whether the thing under test took part.
        engine: What its engine says of itself.
        decode: Turns token ids into text. Without it there is no breakdown by kind, and tokens are
            shown as their ids.
        blocks: The cluster of each window by its index; None: every window is one.
        self_test: Whether it is the reference itself.
    """

    label: str
    seen: Sequence[WindowObservation]
    engaged: Engaged
    engine: Mapping[str, Any]
    decode: Decode | None
    blocks: Sequence[int] | None
    self_test: bool


def assess(
    scores: Scores, plan: Plan, floors: Floors, *, confidence: float = 0.95
) -> CandidateResult:
    """Figures, breakdowns and floors of what was seen.

    Args:
        scores: What was seen.
        plan: The margins, and the seed and the draws of the bootstrap.
        floors: How much the reference differs from itself.
        confidence: Confidence of the intervals that the grade rests on.

    Raises:
        AssayError: Not one token is finite.
    """
    seen, decode = scores.seen, scores.decode
    if not any(w.finite.any() for w in seen):
        raise AssayError(
            f"{scores.label}: the logits of all {sum(w.kl.size for w in seen):,} tokens are not"
            " finite",
            finding_id="fidelity.nonfinite",
            remedy=(
                "look for NaN in the checkpoint (assay verify --values) or score in a wider type"
                " (?dtype=float32)"
            ),
        )
    return CandidateResult(
        label=scores.label,
        summary=summarise(
            seen,
            margins_of(plan),
            Resampling(plan.draws, plan.seed),
            blocks=scores.blocks,
            confidence=confidence,
        ),
        engaged=scores.engaged,
        seen=seen,
        blocks=scores.blocks,
        self_test=scores.self_test,
        engine=scores.engine,
        breakdowns={
            "depth": by_depth(seen),
            "confidence": by_confidence(seen),
            "class": by_class(seen, lambda token: token_class(decode([token]))) if decode else [],
        },
        worst=worst_tokens(seen, decode or (lambda ids: " ".join(map(str, ids)))),
        floors=floors,
    )
