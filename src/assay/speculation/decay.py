"""Acceptance by draft position where it is not counted: a geometric decay."""

from __future__ import annotations

from collections.abc import Sequence

from assay.speculation.record import Record


def decay(record: Record) -> float | None:
    """a in p_i ≈ a^(i+1): the geometric decay with the record's mean of accepted tokens a draft."""
    positions = record.positions
    if positions and all(n for _, n in positions):
        return geometric_ratio(sum(a / n for a, n in positions), len(positions))
    if record.tokens_per_step is not None and record.num_speculative_tokens:
        return geometric_ratio(record.tokens_per_step - 1, record.num_speculative_tokens)
    return None


def geometric_ratio(mean: float, k: int, first: int = 1) -> float | None:
    """The root a of Σ a^i = mean over k powers from `first` on; 1 where the mean is larger than
    any, None where it is 0.
    """
    powers = range(first, first + k)
    if mean <= 0 or (first == 0 and mean < 1):
        return None if mean <= 0 else 0.0
    if mean >= k:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in powers) < mean else (low, middle)
    return low


def position_rates(record: Record) -> tuple[float, ...]:
    """Acceptance of each position: as counted, or a geometric decay with the same mean (empty if
    unknown).

    Where position 0 is known the decay starts there, else at 1.
    """
    if record.per_position:
        return record.per_position
    k, length = record.num_speculative_tokens, record.mean_acceptance_length
    if record.first and k and length is not None and record.first[1]:
        start = record.first[0] / record.first[1]
        ratio = geometric_ratio((length - 1) / start, k, first=0) if start else None
        return tuple(start * ratio**i for i in range(k)) if ratio is not None else ()
    ratio = decay(record)
    return tuple(ratio**i for i in range(1, k + 1)) if ratio is not None and k else ()


def expected_tokens(rates: Sequence[float], depth: int) -> float:
    """1 + Σ p_i over the first N positions: tokens of a step that drafts."""
    return 1 + sum(rates[:depth])


def extrapolated(rates: Sequence[float], depth: int) -> tuple[float, ...]:
    """`rates` carried on to `depth` positions at the mean ratio of its own decay."""
    known = list(rates[:depth])
    ratio = (
        (known[-1] / known[0]) ** (1 / (len(known) - 1))
        if len(known) > 1 and known[0] > 0
        else known[-1]
    )
    while len(known) < depth:
        known.append(known[-1] * min(1.0, ratio))
    return tuple(known)
