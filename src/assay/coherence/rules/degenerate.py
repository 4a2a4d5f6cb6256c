"""Rules on the rate of degenerate texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from assay.coherence.record import CheckRecord, GradedReply
from assay.coherence.rules.rule import Rule, Ruling, Rulings, coherence_finding, percent
from assay.coherence.rules.scores import BITS_EQUAL, BITS_MARGIN, bit_loss
from assay.stats import Interval, interval_json, newcombe, wilson
from assay.stats.multiplicity import confidence_of_analysis
from assay.verdict import Finding, Severity

HARD_RATE = 0.05
"""Without a reference: the rate of floods, salads and empty answers must not lie above this (lower
bound).
"""
HARD_MARGIN = 0.02
"""With a reference: so much above its rate (lower bound of the difference); a whole weak model
writes one in forty.
"""
MAJORITY = 0.5
"""Without a reference: more degenerate texts than this (lower bound) is a failure, of any
kind.
"""
TOLERATED = 1 / 3
"""A subject passes without a reference if its degenerate rate stays below this (upper bound)."""
RATE_MARGIN = 0.10
"""With a reference: so much more degenerate than the reference (lower bound of the difference) is a
failure.
"""
RATE_CLEAR = 0.25
"""If the rate of hard texts, or the difference to the reference, may be larger than this (upper
bound), it is unclear.
"""


def is_hard(sample: GradedReply) -> bool:
    """Whether the text is one that no sane model writes at any size: a flood, a salad, nothing at
    all.
    """
    return sample.degenerate and not sample.is_loop


def hard_texts(record: CheckRecord, reference: CheckRecord | None, confidence: float) -> Rulings:
    """Floods, salads and empty answers: no model that is whole writes them."""
    n = len(record.samples)
    if not n:
        return Ruling(Rule.HARD_TEXTS, "not_examined", "no text was graded")
    hard = [sample for sample in record.samples if is_hard(sample)]
    rate = wilson(len(hard), n, confidence)
    says = f"{len(hard)} of {n} are floods, salads or empty"
    evidence = _rate_evidence("hard", hard, n, rate)
    if reference is not None and reference.samples:
        theirs = sum(map(is_hard, reference.samples))
        difference = newcombe(len(hard), n, theirs, len(reference.samples), confidence)
        evidence |= {"reference_hard": theirs, "difference": interval_json(difference)}
        says += (
            f", of the reference {theirs} of {len(reference.samples)}: difference"
            f" {percent(difference)}"
        )
        bad, open_ = difference.lo > HARD_MARGIN, difference.hi > RATE_CLEAR
    else:
        says += f": {percent(rate)}"
        bad, open_ = rate.lo > HARD_RATE, rate.hi > RATE_CLEAR
    if not (bad and len(hard) >= 3):
        return Ruling(Rule.HARD_TEXTS, "unclear" if open_ else "good", says)
    title = (
        f"the server writes text that no sane model writes: {len(hard)} of {n} texts,"
        f" {percent(rate)}"
    )
    return Ruling(
        Rule.HARD_TEXTS,
        "bad",
        says,
        (coherence_finding("degenerate", Severity.ERROR, title, evidence),),
    )


def _rate_evidence(name: str, bad: Sequence[GradedReply], n: int, rate: Interval) -> dict[str, Any]:
    kinds = Counter(sample.kind or sample.label for sample in bad)
    return {
        "texts": n,
        name: len(bad),
        "rate": interval_json(rate),
        "kinds": dict(kinds.most_common()),
    }


def degenerate_rate(
    record: CheckRecord, reference: CheckRecord | None, confidence: float
) -> Rulings:
    """All degenerate texts, loops included; a weak model loops too, so only a large share or a
    difference counts.
    """
    n = len(record.samples)
    if not n:
        return Ruling(Rule.DEGENERATE_RATE, "not_examined", "no text was graded")
    bad = [sample for sample in record.samples if sample.degenerate]
    rate = wilson(len(bad), n, confidence)
    evidence = _rate_evidence("degenerate", bad, n, rate)
    if reference is not None and reference.samples:
        return _rate_against(record, reference, confidence, len(bad), evidence)
    says = f"{len(bad)} of {n} texts: {percent(rate)}"
    if rate.lo > MAJORITY:
        finding = coherence_finding(
            "degenerate", Severity.ERROR, f"most texts are degenerate: {says}", evidence
        )
        return Ruling(Rule.DEGENERATE_RATE, "bad", says, (finding,))
    if rate.hi > TOLERATED:
        compare = (
            "compare with the model itself: --reference-engine hf:PATH, or --reference run.json"
            " from a healthy server"
        )
        return Ruling(Rule.DEGENERATE_RATE, "unclear", says, (_thin(says, evidence, compare),))
    title = f"{len(bad)} of {n} texts are degenerate; a small model does that on its own"
    findings = (coherence_finding("degenerate", Severity.WARNING, title, evidence),) if bad else ()
    return Ruling(Rule.DEGENERATE_RATE, "good", says, findings)


def _rate_against(
    record: CheckRecord,
    reference: CheckRecord,
    confidence: float,
    bad: int,
    evidence: dict[str, Any],
) -> Ruling:
    """The rate of degenerate texts against the reference's; where it is too coarse, equal fixed
    texts decide.

    Where they are equal no weight is damaged, and a model that loops at every other text differs
    from itself now and then: there a higher rate fails only with the confidence of the second
    interim analysis.
    """
    n, m = len(record.samples), len(reference.samples)
    theirs = sum(sample.degenerate for sample in reference.samples)
    difference = newcombe(bad, n, theirs, m, confidence)
    evidence |= {
        "reference_texts": m,
        "reference_degenerate": theirs,
        "difference": interval_json(difference),
    }
    says = f"{bad} of {n} texts, of the reference {theirs} of {m}: difference {percent(difference)}"
    loss = bit_loss(record, reference, confidence)
    equal = loss is not None and -BITS_MARGIN <= loss.lo <= loss.hi <= BITS_EQUAL
    fixed = (
        f"the fixed texts lose nothing ([{loss.lo:+.4f}, {loss.hi:+.4f}] bits per byte)"
        if loss and equal
        else ""
    )
    certain = (
        newcombe(bad, n, theirs, m, max(confidence, confidence_of_analysis(2)))
        if equal
        else difference
    )
    if certain.lo > RATE_MARGIN:
        title = (
            f"the server degenerates more than the model itself does: {bad} of {n} texts against"
            f" {theirs} of {m}"
        )
        return Ruling(
            Rule.DEGENERATE_RATE,
            "bad",
            says,
            (coherence_finding("degenerate", Severity.ERROR, title, evidence),),
        )
    if difference.hi <= RATE_CLEAR and difference.lo <= RATE_MARGIN:
        return Ruling(Rule.DEGENERATE_RATE, "good", says)
    if difference.lo <= 0 and equal:
        return Ruling(Rule.DEGENERATE_RATE, "good", f"{says}; {fixed}, and they resolve more")
    if difference.lo > RATE_MARGIN:
        says += f"; {fixed}, so that further texts decide"
    return Ruling(Rule.DEGENERATE_RATE, "unclear", says, (_thin(says, evidence),))


def _thin(says: str, evidence: Mapping[str, Any], *remedies: str) -> Finding:
    title = f"too few texts to tell a weak model from a broken server: {says}"
    more = (*remedies, "give it more time (--budget), or more --samples")
    return coherence_finding("unclear", Severity.WARNING, title, evidence, remedies=more)
