"""The detectors: what they promise of false alarms, and how soon they find what changed."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.monitor.change import (
    BETS,
    BITS,
    CALM,
    LEARN,
    MONTH_S,
    Answers,
    Changes,
    Detector,
    Numbers,
    threshold,
    typical,
)


@given(
    st.floats(0.0005, 0.1),
    st.floats(0.0, 0.2),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
)
def test_a_bet_is_an_e_value_under_the_null(
    tolerance: float, slack: float, below: float, mean: float, start: float
) -> None:
    # Two values around a mean within the tolerance: the extreme points of all such laws.
    lo = -slack + below * (slack + tolerance)
    at = lo + mean * (tolerance - lo)
    hi, p = tolerance + 0.5, 0.0
    if hi > lo:
        p = (at - lo) / (hi - lo)
    expected = [0.0] * len(BETS)
    for x, weight in ((lo, 1 - p), (hi, p)):
        detector = Detector(tolerance, slack, 10.0, math.inf, [start] * len(BETS))
        detector.update(x)
        assert min(detector.sums) >= 0
        expected = [e + weight * s for e, s in zip(expected, detector.sums, strict=True)]
    # R grows by at most one a round on average.
    assert all(e <= (start + 1) * (1 + 1e-9) for e in expected)


@pytest.mark.parametrize("law", ["steady", "normal", "rare jumps", "skewed"])
def test_the_mean_time_to_a_false_alarm_is_at_least_the_limit(law: str) -> None:
    # The worst null there is: a mean that lies at the tolerance itself.
    rng = random.Random(law)
    draw = {
        "steady": lambda: 0.002,
        "normal": lambda: rng.gauss(0.002, 0.001),
        "rare jumps": lambda: 0.05 if rng.random() < 0.02 else 0.0010204,
        "skewed": lambda: -0.003 + rng.expovariate(1 / 0.005),
    }[law]
    limit, runs = 100.0, []
    for _ in range(150):
        detector, n = Detector(0.002, 0.003, 0.1, limit), 1
        while not detector.update(draw()) and n < 2000:
            n += 1
        runs.append(n)
    mean = sum(runs) / len(runs)
    error = math.sqrt(sum((n - mean) ** 2 for n in runs) / len(runs) ** 2)
    assert mean + 3 * error >= limit


def test_a_detector_finds_what_it_says_it_finds() -> None:
    detector = Detector(BITS.tolerance, BITS.slack, BITS.cap, threshold(5, 60))
    expected = detector.rounds_to_find(0.01)
    taken = next(n for n in range(1, 1000) if detector.update(0.01))
    assert expected <= 60 and abs(taken - expected) <= 3
    assert detector.rounds_to_find(0.001) == math.inf
    assert detector.evidence == 0.0  # it started anew


def test_one_odd_round_is_no_alarm_and_the_limit_is_a_month_of_all_detectors() -> None:
    detector = Detector(BITS.tolerance, BITS.slack, BITS.cap, threshold(5, 60))
    assert not detector.update(50.0)
    assert not any(detector.update(0.0) for _ in range(1000))
    assert threshold(1, 60) == MONTH_S / 60 and threshold(5, 60, 0.5) == 10 * MONTH_S / 60


def rounds(
    changes: Changes, count: int, shift: float = 0.0, noise: float = 0.0, seed: int = 0
) -> list[str]:
    rng = random.Random(seed)
    raised = []
    for n in range(count):
        items = [(n + i) % 6 for i in range(2)]
        bits = {f"p{i}": 1.0 + 0.1 * i + shift + rng.gauss(0, noise) for i in items}
        raised += changes.update(bits, {f"t{i}": "Paris" for i in items}, {"tool": "right"})[0]
    return raised


@pytest.mark.parametrize("shift, kind", [(0.01, "up"), (-0.01, "down")])
def test_a_drift_of_a_hundredth_of_a_bit_is_found_within_an_hour(shift: float, kind: str) -> None:
    changes = Changes(60.0, 1.0, scores=True)
    assert rounds(changes, 40, noise=0.0005) == []
    assert changes.finds(0.01) <= 60
    found = rounds(changes, 60, shift, noise=0.0005, seed=1)
    assert f"bits_per_byte.{kind}" in found and len(found) == len(set(found))
    # Once it is back, the alarm ends, and not at once.
    rounds(changes, CALM - 1, noise=0.0005, seed=2)
    assert changes.standing
    rounds(changes, 10, noise=0.0005, seed=3)
    assert not changes.standing


def test_noise_makes_a_detector_slower_and_not_more_often_wrong() -> None:
    quiet, noisy = (Changes(60.0, 1.0, scores=True) for _ in range(2))
    assert rounds(quiet, 3000, noise=0.0002) == [] and rounds(noisy, 3000, noise=0.01) == []
    assert quiet.finds(0.01) < noisy.finds(0.01)


def test_scores_that_move_up_and_down_are_found_where_the_mean_stays() -> None:
    changes = Changes(60.0, 1.0, scores=True)
    rounds(changes, 40)
    found = []
    for n in range(60):
        sign = 1 if n % 2 else -1
        found += changes.update({"p0": 1.0 + sign * 0.02, "p1": 1.1 - sign * 0.02}, {}, {})[0]
    assert found == ["bits_per_byte.spread"]


def test_an_answer_that_was_never_stable_says_nothing() -> None:
    answers = Answers("first_tokens", threshold(5, 60))
    for n in range(200):
        assert answers.update({"stable": "a", "shaky": "ab"[n % 2]}) == []
    assert answers.base == {"stable": "a"} and answers.compared == 1
    found = [n for n in range(10) if answers.update({"stable": "b", "shaky": "b"})]
    assert found and found[0] <= 4


def test_the_state_goes_through_json_and_a_damaged_one_is_refused() -> None:
    changes = Changes(60.0, 1.0, scores=True)
    rounds(changes, 50, noise=0.001)
    rounds(changes, 5, shift=0.01)
    kept = json.loads(json.dumps(changes.state()))
    again = Changes(60.0, 1.0, scores=True)
    again.restore(kept)
    assert again.state() == changes.state()
    assert rounds(again, 30, 0.01, seed=5) == rounds(changes, 30, 0.01, seed=5)
    for value in ([1.0], [math.nan] * len(BETS), [-1.0] * len(BETS), ["x"] * len(BETS)):
        kept["first_tokens"]["sums"]["changed"] = value
        with pytest.raises(ValueError):
            Changes(60.0, 1.0, scores=True).restore(kept)


def test_the_baseline_is_the_mean_of_the_first_values() -> None:
    numbers = Numbers("bits_per_byte", BITS, 1e6)
    for n in range(LEARN):
        numbers.update({"p0": 1.0 + 0.01 * n})
    assert numbers.base == {"p0": pytest.approx(1.02)} and numbers.last is None
    numbers.update({"p0": 1.05})
    assert numbers.last == pytest.approx(0.03)


def test_the_usual_cost_leaves_out_what_was_slowed_down() -> None:
    assert typical([1.0, 1.1, 9.0, 30.0]) == pytest.approx(1.05)
    assert typical([2.0]) == 2.0
