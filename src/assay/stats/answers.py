"""Paired answers of two models: McNemar's test, and the difference of right answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import comb
from statistics import NormalDist

from assay.stats import Interval, newcombe, wilson
from assay.stats.non_inferiority import MOST_NEEDED, POWER, Standing


def mcnemar(only_ours: int, only_theirs: int) -> float:
    """Two-sided mid-p value of McNemar's exact test: of the pairs that differ, half are expected on
    either side.

    p = 2 P(X < k) + P(X = k) with k the smaller count and X binomial (n, ½); Fagerland, Lydersen
    and Laake, BMC Med. Res. Methodol. 13 (2013) 91.
    """
    n, k = int(only_ours + only_theirs), int(min(only_ours, only_theirs))
    if n == 0:
        return 1.0
    below, at, all_ = sum(comb(n, i) for i in range(k)), comb(n, k), 2**n
    return float(1.0 - at / (2 * all_) if 2 * k == n else (2 * below + at) / all_)


@dataclass(frozen=True)
class Answers:
    """Right answers of ours against theirs: difference of the shares with its 95 % interval,
    p-value of "no difference".

    `standing` is *no worse* where even the lower bound shows no loss beyond the margin, *worse*
    where the upper bound shows one. `questions_needed` decide with a chance of 80 % where the
    shares stay what they are; None: no number does.
    """

    standing: Standing
    difference: Interval
    p_value: float
    questions_needed: int | None


def paired_answers(only_ours: int, only_theirs: int, asked: int, *, margin: float = 0.0) -> Answers:
    """From answers to the same questions: how many only we and only they got right, of how many
    that were asked.

    `margin` is a difference of shares. The interval is that of Tango's score test (Stat. Med. 17
    (1998) 891), which holds for few questions and for none that differ. Questions for 80 % power
    after Connor (Biometrics 43 (1987) 207).
    """
    if min(only_ours, only_theirs) < 0 or only_ours + only_theirs > asked or asked < 1:
        raise ValueError(f"{only_ours} and {only_theirs} of {asked} questions is not possible")
    value, apart = (only_ours - only_theirs) / asked, (only_ours + only_theirs) / asked
    interval = Interval(
        value,
        _bound(only_ours, only_theirs, asked, -1.0),
        _bound(only_ours, only_theirs, asked, 1.0),
    )
    p = mcnemar(only_ours, only_theirs)
    needed = _questions(value + margin, apart, value)
    if apart == 0 and margin > 0:  # where the two never differ, the bound is z² / (n + z²)
        needed = math.ceil(_Z**2 * (1 - margin) / margin)
    return Answers(standing_of(interval, p, margin), interval, p, needed)


def _bound(b: int, c: int, n: int, side: float) -> float:
    """The end of Tango's interval on one side (±1): the difference at which the score is z, by
    bisection.
    """

    def score(d: float) -> float:
        half = ((2 * n - b + c) * d - b - c) / 2
        q = (math.sqrt(half**2 + 2 * n * c * d * (1 - d)) - half) / (2 * n)
        variance = n * (2 * q + d * (1 - d))
        return (
            (b - c - n * d) / math.sqrt(variance)
            if variance > 0
            else math.copysign(math.inf, -side)
        )

    near, far = (b - c) / n, side
    for _ in range(60):
        middle = (near + far) / 2
        near, far = (middle, far) if abs(score(middle)) < _Z else (near, middle)
    return near


def counted_answers(ours: int, asked: int, theirs: int, asked_theirs: int) -> Answers:
    """From two counts alone, where the pairs of questions are unknown: Newcombe's interval,
    a pooled z test.
    """
    interval = newcombe(ours, asked, theirs, asked_theirs)
    a, b = wilson(ours, asked).value, wilson(theirs, asked_theirs).value
    pooled = (ours + theirs) / (asked + asked_theirs)
    se = math.sqrt(pooled * (1 - pooled) * (1 / asked + 1 / asked_theirs))
    p = 2 * NormalDist().cdf(-abs(a - b) / se) if se else 1.0
    # Independent answers differ as often as this.
    return Answers(
        standing_of(interval, p, 0.0), interval, p, _questions(a - b, a + b - 2 * a * b, a - b)
    )


_Z = NormalDist().inv_cdf(0.975)


def standing_of(difference: Interval, p_value: float, margin: float) -> Standing:
    """By the interval and, without a margin, by the exact test too: both must say so."""
    if margin == 0 and p_value > 0.05:
        return Standing.UNDECIDED
    if difference.lo >= -margin:
        return Standing.NO_WORSE
    return Standing.WORSE if difference.hi < -margin else Standing.UNDECIDED


def _questions(distance: float, apart: float, difference: float) -> int | None:
    """n = (z₀.₉₇₅ √ψ + z₀.₈ √(ψ − δ²))² / distance², ψ the share of questions on which the two
    differ.
    """
    if distance == 0 or apart == 0:
        return None
    spread = _Z * math.sqrt(apart) + NormalDist().inv_cdf(POWER) * math.sqrt(
        max(0.0, apart - difference**2)
    )
    needed = math.ceil((spread / distance) ** 2)
    return needed if needed <= MOST_NEEDED else None
