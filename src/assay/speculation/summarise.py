"""Add up observations to one record: sums of counts, never means of printed percentages."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from assay.speculation.observation import COUNTERS, MOST_POSITIONS, Counts, Observation, Printed
from assay.speculation.record import Record

MOST_SOURCES = 20
"""Quotes that a record keeps."""


def summarise(observations: Sequence[Observation]) -> Record:
    """One record of observations that may be added up. Unknown stays None: nothing is guessed."""
    used = [o for o in observations if not o.empty]
    counted = any(o.counts.known for o in observations)
    counts = _counts(observations, used)
    drafted, accepted = counts.drafted, counts.accepted
    positions = None if counts.partial else _positions(used)
    rate = min(1.0, accepted / drafted) if drafted and accepted is not None else None
    if not counted and rate is None:
        rate = _weighted(used, "acceptance_rate")
    mean = _mean_length(used, counts)
    # Printed rates of positions are kept where exactly one observation has them.
    rates = used[0].printed.rates_per_position if len(used) == 1 else None
    speeds = [s for o in used if (s := o.load.generation_throughput)]
    return Record(
        engine=observations[0].engine if observations else None,
        counts=counts,
        counted=counted,
        positions=positions,
        acceptance_rate=rate,
        mean_acceptance_length=mean,
        tokens_per_step=mean if mean is not None else _derived_length(used, positions, counts),
        per_position=tuple(a / n if n else 0.0 for a, n in positions) if positions else rates,
        num_speculative_tokens=_depth(used, counts, positions),
        printed=Printed(
            multiplier=_weighted(used, "multiplier"), reported_rate=_weighted(used, "reported_rate")
        ),
        generation_throughput=median(speeds) if speeds else None,
        windows=len(used),
        definitions=tuple(dict.fromkeys(o.definition for o in observations)),
        notes=tuple(dict.fromkeys(o.note for o in observations if o.note)),
        sources=tuple(dict.fromkeys(o.source for o in used if o.source))[:MOST_SOURCES],
    )


def _counts(observations: Sequence[Observation], used: Sequence[Observation]) -> Counts:
    """Sums of all counters; the steps of replies follow from what they generated."""
    sums: dict[str, Any] = {name: _sum(observations, name) for name in COUNTERS}
    sums["accepted_first"] = _sum(used, "accepted_first")
    emitted, drafts, generated = sums["emitted"], sums["drafts"], sums["generated"]
    partial = any(o.counts.partial for o in observations)
    if partial:
        sums["drafted"] = sums["accepted"] = None
    kept = emitted - drafts if emitted is not None and drafts else sums["accepted"]
    if sums["steps"] is None and generated is not None and kept is not None and generated > kept:
        sums["steps"] = generated - kept  # every step adds one token of its own
    return Counts(partial=partial, estimated=any(o.counts.estimated for o in used), **sums)


def _sum(observations: Sequence[Observation], name: str) -> int | None:
    """Sum of a count; None if any observation with drafts does not know it."""
    values = [
        value for o in observations if (value := getattr(o.counts, name)) is not None or not o.empty
    ]
    if not values or any(v is None for v in values):
        return None
    return int(sum(values))


def _positions(used: Sequence[Observation]) -> tuple[tuple[int, int], ...] | None:
    """(accepted, drafts) of each position, from the observations that print positions; None if some
    do not.
    """
    if not used or any(o.counts.at_position is None for o in used):
        return None
    accepted: list[int] = []
    tried: list[int] = []
    for o in used:
        own = o.counts.at_position or ()
        of = o.counts.tried_at_position or (o.counts.drafts or 0,) * len(own)
        missing = len(own) - len(accepted)
        accepted += [0] * missing
        tried += [0] * missing
        for i, (a, n) in enumerate(zip(own, of, strict=False)):
            accepted[i] += a
            tried[i] += n
    # A page may be scraped between two counters, so that hits run a little ahead of drafts.
    return tuple((min(a, n), n) for a, n in zip(accepted, tried, strict=True)) or None


def _depth(
    used: Sequence[Observation], counts: Counts, positions: Sequence[Any] | None
) -> int | None:
    """Speculative tokens a step: what is stated, or what divides evenly, or the number of
    positions.
    """
    if not used or used[0].definition.depth_unknown:
        return None
    drafted, drafts = counts.drafted, counts.drafts
    stated = max(o.num_speculative_tokens or 0 for o in used)
    exact = drafted // drafts if drafted and drafts and drafted % drafts == 0 else 0
    deepest = max(stated, exact, len(positions or ()))
    return deepest if 0 < deepest <= MOST_POSITIONS else None


def _mean_length(used: Sequence[Observation], counts: Counts) -> float | None:
    """Tokens per verify step, bonus token included."""
    accepted, drafts, emitted = counts.accepted, counts.drafts, counts.emitted
    if emitted is not None and drafts:
        return emitted / drafts
    if any(o.definition.counts_after_rejection for o in used):
        return None
    if drafts and accepted is not None:
        return 1 + accepted / drafts
    if drafts == 0:
        return None
    printed = [(o.printed.mean_acceptance_length, o.counts.accepted) for o in used]
    if printed and all(m is not None and m > 1 and a for m, a in printed):
        # accepted / (length − 1) drafts each, so the lengths are pooled by their drafts.
        return 1 + sum(a or 0 for _, a in printed) / sum(
            (a or 0) / ((m or 0) - 1) for m, a in printed
        )
    return (
        _weighted(used, "mean_acceptance_length")
        if all(o.counts.accepted is None for o in used)
        else None
    )


def _derived_length(
    used: Sequence[Observation], positions: Sequence[tuple[int, int]] | None, counts: Counts
) -> float | None:
    """Tokens per step where no length is known: from the positions, the implied depth, or the
    generated tokens.
    """
    if positions and all(n for _, n in positions):
        return 1 + sum(a / n for a, n in positions)
    accepted, drafted = counts.accepted, counts.drafted
    last = used[-1] if used else None
    if last is not None and last.printed.implied_depth and drafted:
        emitted = sum(o.counts.emitted or 0 for o in used)
        return emitted / (drafted / last.printed.implied_depth)
    generated = _sum(used, "generated") if used else None
    if generated and accepted is not None and generated > accepted:
        # Every step adds one token of its own: steps = generated − accepted.
        return generated / (generated - accepted)
    lengths = [o.printed.mean_acceptance_length for o in used if o.printed.mean_acceptance_length]
    # Weights are not known: the plain mean serves for judging, but is not reported as the length.
    return sum(lengths) / len(lengths) if lengths and accepted is None else None


def _weighted(used: Sequence[Observation], name: str) -> float | None:
    """Weighted mean of a printed value; None where weights are unknown and the values differ."""
    pairs = [
        (value, o.printed.weight) for o in used if (value := getattr(o.printed, name)) is not None
    ]
    if not pairs:
        return None
    values = {v for v, _ in pairs}
    if len(values) == 1:
        return float(values.pop())
    if any(w is None for _, w in pairs):
        return None
    return float(sum(v * (w or 0.0) for v, w in pairs) / sum(w or 0.0 for _, w in pairs))
