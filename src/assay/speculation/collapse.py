"""What totals hide: acceptance that falls within a run, windows of zero, impossible extremes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from assay.speculation.observation import Observation
from assay.speculation.rate import Rate, overdispersion, proportion, total

MIN_DRAFTS = 50
"""Trials that a part of a run needs before it is compared with another part."""

_LIKELIHOOD_RATIO = 15.0

_FALL = 0.5


@dataclass(frozen=True)
class Collapse:
    """Acceptance before and after the window at which it fell, counted in windows of that
    engine.
    """

    at: int
    windows: int
    before: Rate
    after: Rate
    time: str | None = None
    replica: str | None = None
    zero: bool = False
    """Every later window is exactly zero: a switch, not a drift."""


def find_collapse(windows: Sequence[Observation]) -> Collapse | None:
    """The clearest fall of acceptance to less than half within one engine's windows; None if there
    is none.

    The split with the greatest binomial likelihood ratio, deflated by the overdispersion inside the
    two parts, must exceed 15, and the upper bound after it must lie under half the lower bound
    before it.
    """
    best: tuple[float, Collapse] | None = None
    for replica, own in _series(windows).items():
        pairs = [judged_pair(w) for w in own]
        split = _best_split(pairs)
        if split is None:
            continue
        at, ratio = split
        before, after = proportion(*total(pairs[:at])), proportion(*total(pairs[at:]))
        ratio /= overdispersion(pairs[:at], pairs[at:], least=3)
        if (
            after.hi < _FALL * before.lo
            and ratio > _LIKELIHOOD_RATIO
            and (best is None or ratio > best[0])
        ):
            zero = after.value == 0.0
            best = (ratio, Collapse(at, len(own), before, after, own[at].time, replica, zero))
    return None if best is None else best[1]


def _best_split(pairs: Sequence[tuple[int, int]]) -> tuple[int, float] | None:
    """The index at which the rate falls most clearly, and twice the log-likelihood gained by
    splitting there.
    """
    whole_x, whole_n = total(pairs)
    whole = _loglik(whole_x, whole_n)
    best: tuple[int, float] | None = None
    x = n = 0
    for at, (own_x, own_n) in enumerate(pairs[:-1], 1):
        x, n = x + own_x, n + own_n
        rest_x, rest_n = whole_x - x, whole_n - n
        if n < MIN_DRAFTS or rest_n < MIN_DRAFTS or rest_x * n >= _FALL * x * rest_n:
            continue
        ratio = 2 * (_loglik(x, n) + _loglik(rest_x, rest_n) - whole)
        if best is None or ratio > best[1]:
            best = (at, ratio)
    return best


def zero_windows(windows: Sequence[Observation], collapse: Collapse | None) -> list[Observation]:
    """Windows of exact zero over many drafts although the same engine accepts at least a fifth in
    others.
    """
    found = []
    for replica, own in _series(windows).items():
        pairs = [judged_pair(w) for w in own]
        if not any(n >= MIN_DRAFTS and x / n >= 0.2 for x, n in pairs):
            continue
        for i, (w, (x, n)) in enumerate(zip(own, pairs, strict=True)):
            after_collapse = (
                collapse is not None and collapse.replica == replica and i >= collapse.at
            )
            if x == 0 and n >= MIN_DRAFTS and not after_collapse:
                found.append(w)
    return found


def all_or_nothing(windows: Sequence[Observation]) -> bool:
    """Whether every window accepted exactly nothing or exactly everything, and both occur.

    No text does that; NaN logits do (nothing compares as greater, or everything does).
    """
    return {_extreme(w) for w in windows} == {0, 1}


def _extreme(w: Observation) -> int | None:
    """0 for a window that accepted nothing, 1 for one that accepted everything, else None."""
    if w.counts.drafted is not None and w.counts.accepted is not None:
        return (
            int(w.counts.accepted > 0)
            if w.counts.drafted >= 20 and w.counts.accepted in (0, w.counts.drafted)
            else None
        )
    length, depth = w.printed.mean_acceptance_length, w.num_speculative_tokens
    if length == 1.0:
        return 0 if depth else None
    return 1 if depth and length in (depth, depth + 1) else None


def _series(windows: Sequence[Observation]) -> dict[str | None, list[Observation]]:
    """Windows with enough behind them to be counted, by engine."""
    series: dict[str | None, list[Observation]] = defaultdict(list)
    for w in windows:
        if judged_pair(w)[1]:
            series[w.replica].append(w)
    return series


def judged_pair(w: Observation) -> tuple[int, int]:
    """(accepted, tried) of position 0, or of everything where positions are not known."""
    if w.counts.at_position and (w.counts.tried_at_position or w.counts.drafts):
        return w.counts.at_position[0], (w.counts.tried_at_position or (w.counts.drafts,))[0] or 0
    return (w.counts.accepted, w.counts.drafted or 0) if w.counts.accepted is not None else (0, 0)


def _loglik(x: int, n: int) -> float:
    """Binomial log-likelihood at the maximum."""
    if not 0 < x < n:
        return 0.0
    return x * math.log(x / n) + (n - x) * math.log(1 - x / n)
