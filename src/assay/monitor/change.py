"""Sequential change detection with a stated rate of false alarms.

Every round of the canary gives each *quantity* one number: how far the scores of fixed texts lie
from their baseline, or which share of the greedy tokens is another one. While nothing changes, the
number's mean stays within a tolerance; an e-detector grows only where it does not.

Formulas. With a one-sided null hypothesis E[x | past] ≤ m and x ≥ −a, every bet L = 1 + λ (x − m) /
(m + a) with 0 ≤ λ < 1 is a non-negative number of mean ≤ 1 (Waudby-Smith and Ramdas, J. R. Stat.
Soc. B 86 (2024) 1, section 4). The Shiryaev–Roberts detector R ← (R + 1) L then has E[R at any
stopping time τ] ≤ E[τ], so that the mean time to a false alarm of "R ≥ c" is at least c rounds
for any distribution of x (Shin, Ramdas and Rinaldo, New Engl. J. Stat. Data Sci. 2 (2024)
229, definition 2.2 and theorem 2.4; for a likelihood ratio Pollak, Ann. Stat. 15 (1987) 749). A
mean over several λ keeps that. Here c = (quantities) × (rounds a month) / (false alarms a month),
so all detectors together keep the rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

MONTH_S = 30.44 * 86_400
BETS = (0.1, 0.3, 0.6, 0.9)
"""The λ over which a detector is averaged: small ones find small changes, large ones find large
ones soon.
"""
LEARN = 5
"""First values of each item that make its baseline."""
CALM = 30
"""Rounds in a row at the baseline after which an alarm is over."""


@dataclass
class Detector:
    """Whether the mean of a number rose above `tolerance`: one mixture of Shiryaev–Roberts
    e-detectors.

    Numbers are clipped to [−slack, cap]. `cap` bounds what one round can say, so that a single odd
    answer is no alarm.
    """

    tolerance: float
    slack: float
    cap: float
    limit: float
    """Threshold of the evidence: the mean rounds to a false alarm are at least this many."""
    sums: list[float] = field(default_factory=lambda: [0.0] * len(BETS))

    @property
    def evidence(self) -> float:
        """Mean of the sums over the bets; an alarm at `limit`."""
        return fmean(self.sums)

    def update(self, x: float) -> bool:
        """Take the number of a round; whether it raises the alarm, after which the detector starts
        anew.
        """
        x = min(max(x, -self.slack), self.cap)
        gain = (x - self.tolerance) / (self.tolerance + self.slack)
        self.sums = [(r + 1.0) * (1.0 + bet * gain) for r, bet in zip(self.sums, BETS, strict=True)]
        if self.evidence < self.limit:
            return False
        self.sums = [0.0] * len(BETS)
        return True

    def rounds_to_find(self, change: float) -> float:
        """About how many rounds a steady number of `change` needs; infinite within the
        tolerance.
        """
        gain = (min(change, self.cap) - self.tolerance) / (self.tolerance + self.slack)
        if gain <= 0:
            return math.inf
        # R after n rounds of factor g is about gⁿ · g / (g − 1); the largest bet decides.
        return min(
            max(1.0, math.log(1 + len(BETS) * self.limit * (1 - 1 / g)) / math.log(g))
            for g in (1 + bet * gain for bet in BETS)
        )


def threshold(quantities: int, interval_s: float, per_month: float = 1.0) -> float:
    """Limit of each of several detectors, so that all together raise at most `per_month` false
    alarms in a month.
    """
    return quantities * MONTH_S / interval_s / per_month


@dataclass(frozen=True)
class Scale:
    """What counts as no change of a quantity, before its own noise is known; in the unit of the
    quantity.
    """

    tolerance: float
    slack: float
    cap: float


BITS = Scale(0.002, 0.003, 0.1)
"""Bits per byte of scored texts: 0.01 must be found within an hour of rounds."""
TOKEN_BITS = Scale(0.02, 0.03, 1.0)
"""Bits per token of greedy first tokens: where a server cannot score texts."""
SHARE = Scale(0.02, 0.0, 1.0)
"""Share of items that answer otherwise than their baseline."""


class Numbers:
    """A numeric quantity: the mean difference of each item from its own baseline, watched upwards,
    downwards and in size.

    The baseline of an item is the mean of its first `LEARN` values. Tolerance and slack grow with
    the noise that those showed, so a noisy server gives slower answers and no more false alarms.
    """

    KINDS = ("up", "down", "spread")

    def __init__(self, name: str, scale: Scale, limit: float) -> None:
        self.name, self.scale, self.limit = name, scale, limit
        self.first: dict[str, list[float]] = {}
        self.base: dict[str, float] = {}
        self.noise = 0.0
        self.apart = 0.0
        """Mean absolute difference from the baseline while it was learnt."""
        self.detectors: dict[str, Detector] = {}
        self.last: float | None = None
        self.size = 0.0

    def update(self, values: Mapping[str, float]) -> list[str]:
        """Take the values of a round by item; the kinds of change that it raises an alarm for."""
        known = {item: value for item, value in values.items() if item in self.base}
        for item in values.keys() - known.keys():
            self._learn(item, values[item])
        if not known or not self.detectors:
            return []
        differences = [value - self.base[item] for item, value in known.items()]
        self.last = fmean(differences)
        self.size = fmean(map(abs, differences)) - self.apart
        told = {"up": self.last, "down": -self.last, "spread": self.size}
        return [kind for kind, x in told.items() if self.detectors[kind].update(x)]

    def calm(self) -> bool:
        """Whether the last round lay within the tolerance."""
        return self.last is None or max(abs(self.last), self.size) <= self.detectors["up"].tolerance

    def _learn(self, item: str, value: float) -> None:
        first = self.first.setdefault(item, [])
        first.append(value)
        if len(first) < LEARN:
            return
        self.base[item] = fmean(first)
        spread = [
            x - self.base[i] for i, values in self.first.items() if i in self.base for x in values
        ]
        # Unbiased for LEARN values around their own mean.
        self.noise = math.sqrt(fmean(x * x for x in spread) * LEARN / (LEARN - 1))
        self.apart = fmean(map(abs, spread))
        self._set_up()

    def _set_up(self) -> None:
        tolerance = max(self.scale.tolerance, 3.0 * self.noise / math.sqrt(LEARN))
        slack = max(self.scale.slack, 4.0 * self.noise)
        cap = max(self.scale.cap, 5 * tolerance)
        for kind in self.KINDS:
            old = self.detectors.get(kind)
            fresh = Detector(tolerance, slack, cap, self.limit)
            if old is not None:
                fresh.sums = old.sums
            self.detectors[kind] = fresh

    def state(self) -> dict[str, Any]:
        """What has to be kept, as plain JSON types."""
        return {
            "first": self.first,
            "base": self.base,
            "noise": self.noise,
            "apart": self.apart,
            "sums": {kind: detector.sums for kind, detector in self.detectors.items()},
        }

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.first = {str(k): [float(x) for x in v][:LEARN] for k, v in kept["first"].items()}
        self.base = {str(k): float(v) for k, v in kept["base"].items()}
        self.noise, self.apart = float(kept["noise"]), float(kept["apart"])
        if self.base:
            self._set_up()
            for kind, sums in kept["sums"].items():
                self.detectors[kind].sums = _sums(sums)


class Answers:
    """A categorical quantity: the share of a round's items that answer otherwise than at first.

    An item whose first `LEARN` answers were not all equal says nothing and is left out.
    """

    KINDS = ("changed",)

    def __init__(self, name: str, limit: float, scale: Scale = SHARE) -> None:
        self.name = name
        self.first: dict[str, list[str]] = {}
        self.base: dict[str, str] = {}
        self.detectors = {"changed": Detector(scale.tolerance, scale.slack, scale.cap, limit)}
        self.last: float | None = None
        self.compared = 0
        """Items of the last round that could be compared."""

    def update(self, answers: Mapping[str, str]) -> list[str]:
        """Take the answers of a round by item; `["changed"]` where it raises the alarm."""
        compared = [
            answer != self.base[item] for item, answer in answers.items() if item in self.base
        ]
        for item, answer in answers.items():
            first = self.first.setdefault(item, [])
            if len(first) < LEARN:
                first.append(answer)
                if len(first) == LEARN and len(set(first)) == 1:
                    self.base[item] = answer
        self.compared = len(compared)
        if not compared:
            return []
        self.last = fmean(compared)
        return ["changed"] if self.detectors["changed"].update(self.last) else []

    def calm(self) -> bool:
        """Whether the last round answered as at first."""
        return not self.last

    def state(self) -> dict[str, Any]:
        """What has to be kept, as plain JSON types."""
        return {
            "first": self.first,
            "base": self.base,
            "sums": {"changed": self.detectors["changed"].sums},
        }

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.first = {str(k): [str(x) for x in v][:LEARN] for k, v in kept["first"].items()}
        self.base = {str(k): str(v) for k, v in kept["base"].items()}
        self.detectors["changed"].sums = _sums(kept["sums"]["changed"])


Quantity = Numbers | Answers


def _sums(kept: Sequence[Any]) -> list[float]:
    values = [float(x) for x in kept]
    if len(values) != len(BETS) or not all(math.isfinite(x) and x >= 0 for x in values):
        raise ValueError("the sums of a detector are damaged")
    return values


class Changes:
    """All quantities of a watch and the alarms that stand.

    An alarm stands until its quantity was at its baseline for `CALM` rounds in a row.
    """

    def __init__(self, interval_s: float, per_month: float, *, scores: bool) -> None:
        limit = threshold(len(Numbers.KINDS) + 2 * len(Answers.KINDS), interval_s, per_month)
        self.limit = limit
        self.tokens = Answers("first_tokens", limit)
        self.tools = Answers("tool_call", limit)
        self.standing: dict[str, dict[str, Any]] = {}
        self.measure(scores=scores)

    def measure(self, *, scores: bool) -> None:
        """Take bits per byte of scored texts as the numbers, or those of greedy tokens; their
        baseline is learnt anew.
        """
        bits = ("bits_per_byte", BITS) if scores else ("bits_per_token", TOKEN_BITS)
        self.numbers = Numbers(*bits, self.limit)

    @property
    def scores(self) -> bool:
        """Whether the numbers are those of scored texts."""
        return self.numbers.name == "bits_per_byte"

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """The quantities that are watched."""
        return self.numbers, self.tokens, self.tools

    def update(
        self, numbers: Mapping[str, float], tokens: Mapping[str, str], tools: Mapping[str, str]
    ) -> tuple[list[str], list[str]]:
        """Take a round; the alarms that it raises and those that are over, each `quantity.kind`."""
        raised, over = [], []
        rounds: tuple[tuple[Quantity, list[str], bool], ...] = (
            (self.numbers, self.numbers.update(numbers), bool(numbers)),
            (self.tokens, self.tokens.update(tokens), bool(tokens)),
            (self.tools, self.tools.update(tools), bool(tools)),
        )
        for quantity, kinds, asked in rounds:
            for kind in kinds:
                name = f"{quantity.name}.{kind}"
                if name not in self.standing:
                    raised.append(name)
                self.standing[name] = {"calm": 0, "value": quantity.last}
            if not asked:
                continue
            for name in [n for n in self.standing if n.startswith(f"{quantity.name}.")]:
                calm = self.standing[name]["calm"] + 1 if quantity.calm() else 0
                self.standing[name]["calm"] = calm
                if calm >= CALM:
                    del self.standing[name]
                    over.append(name)
        return raised, over

    def finds(self, change: float) -> float:
        """About how many rounds a drift of the scores by `change` needs; infinite while the
        baseline is learnt.
        """
        up = self.numbers.detectors.get("up")
        return math.inf if up is None else up.rounds_to_find(change)

    def state(self) -> dict[str, Any]:
        """What has to be kept, as plain JSON types."""
        return {"standing": self.standing} | {q.name: q.state() for q in self.quantities}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Go on from what `state` gave; ValueError, KeyError or TypeError where it is damaged."""
        for quantity in self.quantities:
            quantity.restore(kept[quantity.name])
        self.standing = {
            str(k): {"calm": int(v["calm"]), "value": v["value"]}
            for k, v in kept["standing"].items()
        }


def typical(costs: Sequence[float]) -> float:
    """The usual cost of something in seconds: the median of the cheaper half, which other people's
    load did not touch.
    """
    return median(sorted(costs)[: (len(costs) + 1) // 2])
