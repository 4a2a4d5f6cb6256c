"""Ways that take turns: their shares are right on a machine that becomes slower and slower."""

from __future__ import annotations

import pytest

import vllm_kl_speed
from vllm_kl_speed import Way, in_turns, share


class Machine:
    """A clock that work moves; each second of work takes `drift` longer than the one before."""

    def __init__(self, drift: float) -> None:
        self.now, self.drift, self.ran = 0.0, drift, list[str]()

    def way(self, name: str, work: float) -> Way:
        def run() -> None:
            self.now += work * (1 + self.drift * self.now)
            self.ran.append(name)

        return Way(run, tokens=100)

    def clock(self) -> float:
        return self.now


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(drift=0.01)
    for name in ("perf_counter", "process_time"):
        monkeypatch.setattr(vllm_kl_speed.time, name, machine.clock)
    return machine


def test_ways_take_turns_and_every_other_round_goes_back(machine: Machine) -> None:
    found = in_turns({"a": machine.way("a", 1.0), "b": machine.way("b", 3.0)}, 3)
    assert "".join(machine.ran) == "ab" + "ab" + "ba" + "ab"
    assert {name: len(f["all"]) for name, f in found.items()} == {"a": 3, "b": 3}
    assert found["a"]["tokens_per_s"] == sorted(found["a"]["all"])[1]


def test_a_share_does_not_feel_the_drift_that_the_speeds_feel(machine: Machine) -> None:
    found = in_turns({"plain": machine.way("a", 1.0), "kl": machine.way("b", 2.0)}, 6)
    speeds = found["plain"]["all"]
    assert speeds[0] / speeds[-1] > 1.15
    got = share(found["kl"]["all"], speeds)
    assert got["lo"] < 0.5 < got["hi"]
    assert got["value"] == pytest.approx(0.5, rel=0.01)


def test_a_share_of_rounds_that_are_missing_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        share([1.0], [1.0, 2.0])
