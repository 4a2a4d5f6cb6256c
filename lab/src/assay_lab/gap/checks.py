"""Checks of a decomposition: sums that hold for any two engines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from assay.fidelity.observation import WindowObservation
from assay_lab.gap.buckets import Amount, Decomposition, aligned, effect, own_effect
from assay_lab.gap.floors import FORETOLD_SHARE, Floors, repeated_nll


@dataclass(frozen=True)
class Check:
    """What the buckets say of something (`predicted`), and a measurement that took no part in them,
    nats a token.

    `quantity` is `dnll` or `kl`. `holds`: the difference is within `bound`, or its interval
    contains zero.
    """

    name: str
    quantity: str
    predicted: Amount
    measured: Amount
    difference: Amount
    bound: float
    holds: bool


Seen = Sequence[WindowObservation]


def check_step(
    name: str, direct: Seen, before: Seen, after: Seen, d: Decomposition, floors: Floors
) -> Check:
    """ΔNLL of a step that was measured directly, against the difference of two runs which its
    bucket is; by window.

    KL cannot be compared with it: KL(p_before‖p_after) is another quantity than the step of
    KL(p_ref‖·).
    """
    sums = aligned({"direct": direct, "before": before, "after": after})
    by_path = sums["after"] - sums["before"]
    predicted, measured = effect(by_path).dnll, effect(sums["direct"]).dnll
    difference = effect(sums["direct"] - by_path).dnll
    state = repeated_nll(difference, d.total.dnll, floors.repeat_dnll)
    return Check(name, "dnll", predicted, measured, difference, state.bound, state.ok)


def check_sum(d: Decomposition, fresh: Seen, floors: Floors) -> Check:
    """Whether the KL of the engine and of the codec, each measured alone, adds up to that of both
    on other text.

    It fails where codec and engine act on each other, or where a bucket is that of one text only.
    """
    parts = [b.effect.kl for b in d.buckets if b.name in ("engine", "codec")]
    value = sum(p.value for p in parts)
    half = math.hypot(*(p.hi - p.value for p in parts))
    predicted, measured = Amount(value, value - half, value + half, 1.0), own_effect(fresh).kl
    off, half = measured.value - value, math.hypot(half, measured.hi - measured.value)
    bound = max(FORETOLD_SHARE * abs(measured.value), floors.repeat_kl)
    holds = abs(off) <= max(bound, half)
    return Check(
        "sum on fresh windows",
        "kl",
        predicted,
        measured,
        Amount(off, off - half, off + half, 1.0),
        bound,
        holds,
    )
