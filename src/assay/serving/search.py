"""Find a minimal failing set of settings, with configurations whose outcome may vary from start to
start.

`decide` is a sequential test on starts (Wald's likelihood ratio with a prior over the rate at which
a fault shows); `minimal_failing_set` is ddmin (Zeller and Hildebrandt, IEEE TSE 28 (2002) 183) with
parts of equal weight, so that a setting that is often guilty is tried by itself first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

State = Literal["bad", "good", "cannot_run", "undecided"]
Configuration = frozenset[str]

ERROR_RATE = 0.05
"""Of each decision: to call a good configuration bad, or a bad one good."""
FALSE_ALARM = 0.02
"""Rate at which a start of a good configuration is measured as bad: the rules' own intervals allow
about as much.
"""
RATES: Mapping[float, float] = {0.98: 0.9, 2 / 3: 0.05, 1 / 3: 0.05}
"""Prior over the share of starts that show a fault: most faults are there at every start."""
VARYING: Mapping[float, float] = {0.98: 0.6, 2 / 3: 0.25, 1 / 3: 0.15}
"""Prior where the evidence of a bad start was close: such a fault may well not show the next time.
"""
MOST_STARTS = 12


@dataclass(frozen=True)
class Rates:
    """What is known of the share of starts that show the fault: weights over rates, learnt from the
    given command.
    """

    weights: Mapping[float, float] = field(default_factory=lambda: dict(RATES))

    def after(self, bad: int, good: int) -> Rates:
        """The posterior after so many starts of a command that has the fault."""
        raw = {rate: w * rate**bad * (1 - rate) ** good for rate, w in self.weights.items()}
        total = sum(raw.values()) or 1.0
        return Rates({rate: w / total for rate, w in raw.items()})

    def decide(self, bad: int, good: int, error: float = ERROR_RATE) -> State:
        """`bad` or `good` once the likelihood ratio of the starts leaves (e/(1−e), (1−e)/e); until
        then `undecided`.
        """
        faulty = sum(w * rate**bad * (1 - rate) ** good for rate, w in self.weights.items())
        healthy = FALSE_ALARM**bad * (1 - FALSE_ALARM) ** good
        ratio = faulty / healthy if healthy > 0 else math.inf
        bound = (1 - error) / error
        if ratio >= bound:
            return "bad"
        return "good" if ratio <= 1 / bound else "undecided"


def starts_needed(rate: float, error: float = ERROR_RATE) -> int:
    """Good starts after which a fault that shows in `rate` of the starts would have shown, but for
    `error`.
    """
    return max(1, math.ceil(math.log(error) / math.log(1 - rate))) if rate < 1 else 1


@dataclass
class Tally:
    """The starts of one configuration."""

    bad: int = 0
    good: int = 0
    unclear: int = 0
    cannot: int = 0

    @property
    def starts(self) -> int:
        """All starts."""
        return self.bad + self.good + self.unclear + self.cannot


class OutOfTime(Exception):
    """The budget is spent."""


@dataclass
class Bench:
    """Launches configurations until each is decided. `start(configuration, index)` gives the
    outcome of one start.

    Outcomes are `bad`, `good`, `undecided` (measured, and unclear) or `cannot_run`; `start` raises
    OutOfTime.
    """

    start: Callable[[Configuration, int], State]
    rates: Rates = field(default_factory=Rates)
    tallies: dict[Configuration, Tally] = field(default_factory=dict)
    settled: dict[Configuration, State] = field(default_factory=dict)
    ahead: Callable[[Configuration, int, int], None] = lambda configuration, index, count: None
    """Told before a start that `count` starts from `index` on will be needed, so that they may run
    at the same time.
    """

    def once(self, configuration: Configuration) -> State:
        """One more start."""
        tally = self.tallies.setdefault(configuration, Tally())
        outcome = self.start(configuration, tally.starts)
        match outcome:
            case "bad":
                tally.bad += 1
            case "good":
                tally.good += 1
            case "cannot_run":
                tally.cannot += 1
            case _:
                tally.unclear += 1
        return outcome

    def decide(self, configuration: Configuration) -> State:
        """The state of a configuration, launched as often as its noise demands; the
        answer is kept.
        """
        if configuration in self.settled:
            return self.settled[configuration]
        tally = self.tallies.setdefault(configuration, Tally())
        while True:
            state = self.rates.decide(tally.bad, tally.good)
            if state != "undecided" or tally.starts >= MOST_STARTS or tally.unclear >= 3:
                break
            # A start that fails twice does not run; once may be an accident.
            if tally.cannot >= 2 and not tally.bad + tally.good:
                state = "cannot_run"
                break
            self.ahead(configuration, tally.starts, self._surely(tally))
            self.once(configuration)
        self.settled[configuration] = state
        return state

    def _surely(self, tally: Tally) -> int:
        """How many starts more a decision needs at least, with any results."""
        count = 1
        most = min(MOST_STARTS - tally.starts, 3 - tally.unclear)
        if not tally.bad + tally.good:
            most = min(most, 2 - tally.cannot)
        while count < most and all(
            self.rates.decide(tally.bad + bad, tally.good + count - bad) == "undecided"
            for bad in (0, count)
        ):
            count += 1
        return count


def overturned(bench: Bench, names: Sequence[str]) -> bool:
    """Whether one of several settings that fail together can be left out after all.

    That settings fail only together is rare, and each acquittal of a smaller set may be wrong:
    every set with one of them left out is started once more. If one is bad now, the fault varies,
    and what was called good is open again.
    """
    for name in names if len(names) > 1 else ():
        part = frozenset(names) - {name}
        if bench.settled.get(part) == "good" and bench.once(part) == "bad":
            bench.rates = Rates(dict(VARYING))
            bench.settled = {
                c: state for c, state in bench.settled.items() if state != "good" or not c
            }
            return True
    return False


def parts_of(items: Sequence[str], count: int, weight: Callable[[str], float]) -> list[list[str]]:
    """`items` in their order as at most `count` parts of about equal weight, none empty."""
    count = min(count, len(items))
    total, parts, left = sum(map(weight, items)), [], list(items)
    for number in range(count, 0, -1):
        if number == 1:
            parts.append(left)
            break
        part: list[str] = []
        share, mass = total / number, 0.0
        while left and len(left) > number - 1 and (not part or mass + weight(left[0]) / 2 <= share):
            mass += weight(left[0])
            part.append(left.pop(0))
        total -= mass
        parts.append(part)
    return [part for part in parts if part]


def minimal_failing_set(
    items: Sequence[str],
    test: Callable[[Configuration], State],
    weight: Callable[[str], float] = lambda name: 1.0,
) -> tuple[list[str], bool]:
    """Settings that fail together, none of which can be left out, and whether that is proven.

    `items` as a whole is known to be `bad` and nothing at all to be `good`. It is not proven where
    a smaller configuration could not run or was not decided.
    """
    left = sorted(items, key=lambda name: -weight(name))
    count, proven = 2, True
    while len(left) > 1:
        parts = parts_of(left, count, weight)
        states: list[State] = []
        for part in parts:
            states.append(test(frozenset(part)))
            if states[-1] == "bad":
                left, count = part, 2
                break
        else:
            for part in parts if len(parts) > 2 else ():
                rest = [name for name in left if name not in part]
                states.append(test(frozenset(rest)))
                if states[-1] == "bad":
                    left, count = rest, max(len(parts) - 1, 2)
                    break
            else:
                if len(parts) >= len(left):
                    proven = all(state == "good" for state in states)
                    break
                count = min(len(left), 2 * count)
    return left, proven


def exhaustive(settings: int) -> int:
    """Launches of a search that tries every combination once, with the baseline."""
    return int(2**settings)
