"""Counts behind rounded figures: how many drafts a log line stands for."""

from __future__ import annotations

import math
from collections.abc import Sequence


def infer_drafts(
    drafted: int,
    accepted: int,
    positions: int | None,
    mean_length: float | None,
    rates: Sequence[float] | None = None,
) -> int | None:
    """Number of drafts behind a line that prints drafted and accepted tokens and a rounded mean
    length.

    A draft has at most `positions` tokens, so there are at least `drafted / positions` drafts, and
    exactly that many where none was cut short. That number is taken if it agrees with the printed
    figures; else the one that agrees best among those whose mean length rounds to the printed one;
    None if the line does not say enough.
    """
    if drafted == 0:
        return 0
    full = math.ceil(drafted / positions) if positions else None
    if mean_length is None or not math.isfinite(mean_length):
        return full
    half = 0.005 + 1e-9  # two decimals are printed

    def agrees(drafts: int) -> bool:
        return bool(abs(1 + accepted / drafts - mean_length) <= half)

    if full is not None and agrees(full) and (accepted == 0 or _rates_agree(full, accepted, rates)):
        return full
    low, high = mean_length - 1 - half, mean_length - 1 + half
    if accepted == 0 or low <= 0:
        return full
    first, last = math.ceil(accepted / high), math.floor(accepted / low)
    candidates = range(max(first, full or 1), min(last, drafted) + 1)
    if not candidates or len(candidates) > 2000:
        return full if full is not None else round(accepted / (mean_length - 1))
    fitting = (
        [d for d in candidates if _rates_agree(d, accepted, rates)] if rates else list(candidates)
    )
    middle = accepted / (mean_length - 1)
    return min(fitting or candidates, key=lambda d: abs(d - middle))


def exact_counts(
    drafted: int, accepted: int, mean_length: float, rates: Sequence[float]
) -> tuple[int, tuple[int, ...]] | None:
    """Drafts and accepted drafts per position where full-length drafts explain every printed
    figure; None otherwise.

    What `infer_drafts` and `position_counts` would say, for the usual line at a third of the cost.
    """
    drafts = -(-drafted // len(rates))
    if not drafts or max(rates) > 1 or abs(1 + accepted / drafts - mean_length) > 0.005 + 1e-9:
        return None
    counts = tuple([round(rate * drafts) for rate in rates])
    if sum(counts) != accepted:
        return None
    half = (0.0005 + 1e-9) * drafts
    for count, rate in zip(counts, rates, strict=True):
        if abs(count - rate * drafts) > half:
            return None
    return drafts, counts


def position_counts(
    drafts: int, rates: Sequence[float], accepted: int | None, complete: bool = True
) -> tuple[int, ...]:
    """Accepted drafts per position from rounded rates: the nearest counts, corrected so that they
    add up.

    `accepted` is the known sum (None or `complete=False` where some positions are not printed).
    """
    exact = [min(rate, 1.0) * drafts for rate in rates]
    counts = [min(drafts, max(0, round(value))) for value in exact]
    if accepted is None or not complete:
        return tuple(counts)
    missing = accepted - sum(counts)
    # The true counts lie within a rounding step of `exact`; a larger gap means that the rates are
    # something else.
    if missing and abs(missing) <= min(10_000, max(2, len(counts) * (1 + drafts // 1000))):
        step = 1 if missing > 0 else -1
        for _ in range(abs(missing)):
            movable = [i for i in range(len(counts)) if 0 <= counts[i] + step <= drafts]
            nearest = max(movable, key=lambda i: step * (exact[i] - counts[i]), default=None)
            if nearest is None:
                break
            counts[nearest] += step
    return tuple(counts)


def _rates_agree(drafts: int, accepted: int, rates: Sequence[float] | None) -> bool:
    """Whether counts over `drafts` can print as `rates` (three decimals) and add up to
    `accepted`.
    """
    if not rates:
        return True
    if max(rates) > 1:
        return False
    half = 0.0005 + 1e-9
    low = sum(max(0, math.ceil((rate - half) * drafts)) for rate in rates)
    high = sum(math.floor((rate + half) * drafts) for rate in rates)
    return low <= accepted <= high
