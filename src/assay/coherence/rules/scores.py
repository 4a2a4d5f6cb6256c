"""Rules on the scores of fixed texts, by themselves and deep in a context."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from assay.coherence.passages import LEAST_TEXTS
from assay.coherence.record import CheckRecord
from assay.coherence.rules.rule import Rule, Ruling, Rulings, coherence_finding
from assay.stats import Interval, cluster_mean, interval_json, mean_interval
from assay.stats.multiplicity import confidence_of_analysis
from assay.verdict import Severity

SANE_BITS = 2.0
"""Bits per byte of plain English that no sane language model needs."""
BITS_MARGIN = 0.01
"""With a reference: bits per byte that a candidate may lose (paired by text, lower bound)."""
BITS_EQUAL = BITS_MARGIN / 5
"""A loss that lies below this (upper bound) outweighs rates of few texts; rounding of another
engine is under 0.0015.
"""
DEPTH_MARGIN = 0.05
"""Bits per byte by which a text may become harder to predict when text is put before it (lower
bound).
"""


def bits(record: CheckRecord, reference: CheckRecord | None, confidence: float) -> Rulings:
    """A model that is whole needs few bits for plain text, and as many as its reference."""
    values = [p.bits_per_byte for p in record.passages if not p.depth]
    if len(values) < 2:
        return Ruling(
            Rule.BITS_PER_BYTE,
            "not_examined",
            record.passages_skipped or "no fixed text was scored",
        )
    confidence = _of_fixed_texts(confidence)
    absolute = mean_interval(values, confidence)
    evidence: dict[str, Any] = {
        "bits_per_byte": interval_json(absolute),
        "passages": len(record.passages),
    }
    says = f"{absolute.value:.3f} bits per byte"
    loss = bit_loss(record, reference, confidence)
    title = ""
    if not absolute.lo < SANE_BITS:
        title = (
            f"the model cannot predict plain English: {absolute.value:.2f} bits per byte, a sane"
            " one needs well under 2"
        )
    elif loss is None:
        return Ruling(Rule.BITS_PER_BYTE, "good", f"{says} of plain text over {len(values)} texts")
    else:
        between = f"{loss.value:+.4f} [{loss.lo:+.4f}, {loss.hi:+.4f}]"
        says += f", {between} against the reference"
        evidence |= {"difference": interval_json(loss), "margin": BITS_MARGIN}
        if loss.lo > BITS_MARGIN:
            title = (
                f"the server predicts plain text worse than the model itself: {between} bits per"
                " byte"
            )
    if title:
        return Ruling(
            Rule.BITS_PER_BYTE,
            "bad",
            says,
            (coherence_finding("bits_per_byte", Severity.ERROR, title, evidence),),
        )
    if loss is not None and loss.hi < -BITS_MARGIN:
        title = (
            f"the server predicts plain text better than the reference ({says}): they are not the"
            " same model"
        )
        remedy = ("check that server and reference hold the same model and revision",)
        finding = coherence_finding(
            "other_model", Severity.WARNING, title, evidence, remedies=remedy
        )
        return Ruling(Rule.BITS_PER_BYTE, "unclear", says, (finding,))
    return Ruling(
        Rule.BITS_PER_BYTE,
        "unclear" if loss is not None and loss.hi > BITS_MARGIN else "good",
        says,
    )


BEYOND_ANALYSES = 0.9995
"""Confidence that no interim analysis after the plan has; a run that may end early is judged above
it.
"""


def _of_fixed_texts(confidence: float) -> float:
    """The confidence at which scores of fixed texts are judged: that of the first interim analysis,
    unless the plan is not done yet.

    Extensions of a run add no fixed texts, so later analyses see the same scores again and spend
    no error on them.
    """
    return confidence if confidence > BEYOND_ANALYSES else confidence_of_analysis(1)


def bit_loss(
    record: CheckRecord, reference: CheckRecord | None, confidence: float
) -> Interval | None:
    """Bits per byte that the server loses, clustered by text; None where too few texts were scored
    on both sides.
    """
    confidence = _of_fixed_texts(confidence)
    theirs = (
        {(p.passage, p.depth): p.bits_per_byte for p in reference.passages} if reference else {}
    )
    losses: dict[str, list[float]] = defaultdict(list)
    for p in record.passages:
        if (p.passage, p.depth) in theirs:
            losses[p.passage].append(p.bits_per_byte - theirs[p.passage, p.depth])
    return (
        cluster_mean(list(losses.values()), confidence).interval
        if len(losses) >= LEAST_TEXTS
        else None
    )


def depth(record: CheckRecord, reference: CheckRecord | None, confidence: float) -> Rulings:
    """Text before a text helps to predict it, or does nothing. Where it harms, the model loses its
    way at depth.
    """
    harm = _harm(record, confidence)
    if harm is None:
        return Ruling(
            Rule.DEPTH,
            "not_examined",
            record.passages_skipped or "no text was scored deep in a context",
        )
    says = f"{harm.value:+.3f} [{harm.lo:+.3f}, {harm.hi:+.3f}] bits per byte from depth"
    if harm.lo <= DEPTH_MARGIN:
        return Ruling(Rule.DEPTH, "good", says)
    their_harm = _harm(reference, confidence) if reference is not None else None
    if their_harm is not None and their_harm.lo > DEPTH_MARGIN:
        return Ruling(Rule.DEPTH, "good", f"{says}; the reference does the same")
    finding = coherence_finding(
        "lost_at_depth",
        Severity.ERROR,
        f"the deeper in the context, the worse the prediction: {says}",
        {"difference": interval_json(harm), "margin": DEPTH_MARGIN},
        causes=(
            "rope_theta or rope_scaling differs from what the model was trained with",
            "the KV cache loses too much (fp8 without scales, low-bit cache)",
            "a sliding window is missing or wrong",
        ),
    )
    return Ruling(Rule.DEPTH, "bad", says, (finding,))


def _harm(record: CheckRecord, confidence: float) -> Interval | None:
    """Bits per byte by which texts are harder in a context than by themselves, clustered
    by text.
    """
    confidence = _of_fixed_texts(confidence)
    alone = {p.passage: p.bits_per_byte for p in record.passages if p.depth == 0}
    harm: dict[str, list[float]] = defaultdict(list)
    for p in record.passages:
        if p.depth and p.passage in alone:
            harm[p.passage].append(p.bits_per_byte - alone[p.passage])
    return cluster_mean(list(harm.values()), confidence).interval if len(harm) >= 4 else None
