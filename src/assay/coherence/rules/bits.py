"""How well does the model predict plain text, near the start and deep in the context?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from assay.coherence.record import CheckRecord
from assay.coherence.rules.ruling import Ruling, interval_json
from assay.verdict import Finding, Severity

SANE_BITS = 2.0
"""Bits per byte of plain English that no sane language model needs."""
BITS_MARGIN = 0.01
"""With a reference: bits per byte that a candidate may lose (paired by passage, lower bound)."""
DEPTH_MARGIN = 0.05
"""Bits per byte by which a passage may become harder to predict when text is put before it (lower bound)."""


def bits(record: CheckRecord, reference: CheckRecord | None) -> Sequence[Ruling]:
    """A model that is whole needs few bits for plain text, and as many as its reference."""
    from assay.stats.means import mean_interval

    values = [p.bits_per_byte for p in record.passages]
    if not values:
        return ()
    if len(values) < 2:
        return ()
    absolute = mean_interval(values)
    evidence: dict[str, Any] = {"bits_per_byte": interval_json(absolute), "passages": len(values)}
    says = f"{absolute.value:.3f} bits per byte of plain text over {len(values)} passages"
    if not absolute.lo < SANE_BITS:
        title = f"the model cannot predict plain English: {absolute.value:.2f} bits per byte, a sane one needs well under 2"
        return (Ruling("bits_per_byte", "bad", says, (_bits_finding(title, evidence),)),)
    theirs = {(p.passage, p.depth): p.bits_per_byte for p in reference.passages} if reference else {}
    pairs = [
        (p.bits_per_byte, theirs[p.passage, p.depth])
        for p in record.passages
        if (p.passage, p.depth) in theirs
    ]
    if len(pairs) < 8:
        return (Ruling("bits_per_byte", "good", says),)
    loss = mean_interval([ours - their for ours, their in pairs])
    evidence |= {"difference": interval_json(loss), "paired_passages": len(pairs), "margin": BITS_MARGIN}
    says += f", {loss.value:+.4f} [{loss.lo:+.4f}, {loss.hi:+.4f}] against the reference (n = {len(pairs)})"
    if loss.lo > BITS_MARGIN:
        title = (
            f"the server predicts plain text worse than the model itself: {loss.value:+.3f} bits per byte "
            f"[{loss.lo:+.3f}, {loss.hi:+.3f}]"
        )
        return (Ruling("bits_per_byte", "bad", says, (_bits_finding(title, evidence),)),)
    if loss.hi < -BITS_MARGIN:
        finding = Finding(
            id="coherence.other_model",
            severity=Severity.WARNING,
            title=f"the server predicts plain text better than the reference ({says}): they are not the same model",
            evidence=evidence,
            remedies=("check that server and reference hold the same model and revision",),
        )
        return (Ruling("bits_per_byte", "unclear", says, (finding,)),)
    return (Ruling("bits_per_byte", "good" if loss.hi <= BITS_MARGIN else "unclear", says),)


def _bits_finding(title: str, evidence: Mapping[str, Any]) -> Finding:
    return Finding(id="coherence.bits_per_byte", severity=Severity.ERROR, title=title, evidence=evidence)


def depth(record: CheckRecord, reference: CheckRecord | None) -> Sequence[Ruling]:
    """Text before a passage helps to predict it, or does nothing. Where it harms, the model loses its way at depth."""
    from assay.stats.means import mean_interval

    shallow = {p.passage: p.bits_per_byte for p in record.passages if p.depth == 0}
    harm = [p.bits_per_byte - shallow[p.passage] for p in record.passages if p.depth and p.passage in shallow]
    if len(harm) < 4:
        return ()
    interval = mean_interval(harm)
    says = f"{interval.value:+.3f} [{interval.lo:+.3f}, {interval.hi:+.3f}] bits per byte from depth (n = {len(harm)})"
    if interval.lo <= DEPTH_MARGIN:
        return (Ruling("depth", "good", says),)
    if reference is not None and depth(reference, None) and depth(reference, None)[0].state == "bad":
        return (Ruling("depth", "good", f"{says}; the reference does the same"),)
    finding = Finding(
        id="coherence.lost_at_depth",
        severity=Severity.ERROR,
        title=f"the deeper in the context, the worse the prediction: {says}",
        evidence={"difference": interval_json(interval), "passages": len(harm), "margin": DEPTH_MARGIN},
        causes=(
            "rope_theta or rope_scaling differs from what the model was trained with",
            "the KV cache loses too much (fp8 without scales, low-bit cache)",
            "a sliding window is missing or wrong",
        ),
    )
    return (Ruling("depth", "bad", says, (finding,)),)
