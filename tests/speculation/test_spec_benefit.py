from __future__ import annotations

import numpy as np
import pytest
import spec_lines as lines
from hypothesis import given
from hypothesis import strategies as st

from assay.speculation.baseline import compare
from assay.speculation.benefit import Benefit, Cost, benefit, measured_cost
from assay.speculation.combine import Evidence
from assay.speculation.decay import expected_tokens, extrapolated
from assay.speculation.health import assess
from assay.speculation.measured import Measured
from assay.speculation.rate import Rate, design_effect, difference, proportion


def worth(per_position: list[int], drafts: int, cost: float = 0.1) -> Benefit:
    found = benefit(lines.read(lines.vllm_v1(per_position, drafts)).record, Cost(cost, "given"))
    assert found is not None
    return found


def test_multiplier_against_a_simulated_decoder() -> None:
    """E(N) / T(N) is what a decoder reaches that drafts N tokens at cost c and pays one target step
    to verify.
    """
    rng = np.random.default_rng(0)
    given = np.array([0.8, 0.7, 0.6, 0.5])  # acceptance given the one before
    drafts, cost = 200_000, 0.07
    hits = (rng.random((drafts, 4)) < given).cumprod(axis=1)
    found = worth(hits.sum(axis=0).tolist(), drafts, cost)
    for n in range(1, 5):
        tokens = drafts + hits[:, :n].sum()
        time = drafts * (1 + cost * n)
        assert found.multipliers[n - 1] == pytest.approx(tokens / time, rel=1e-3)


def test_too_deep() -> None:
    found = worth([890, 220, 50, 10, 0], 1000)
    assert (found.depth, found.best, found.too_deep) == (5, 2, True)
    assert "from 5 to 2" in found.advice
    assert not worth([890, 800, 700], 1000).too_deep


def test_advice() -> None:
    assert "disable" in worth([100, 10], 1000).advice
    assert "hardly" in worth([250, 100], 1000, 0.1).advice
    assert "try up to" in worth([950, 900], 1000).advice
    assert worth([890, 600, 300, 120], 1000).advice == "keep it"


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8).map(lambda r: sorted(r, reverse=True)))
def test_extrapolation_never_rises(rates: list[float]) -> None:
    longer = extrapolated(rates, 16)
    assert len(longer) == 16
    assert list(longer[: len(rates)]) == rates
    assert all(
        a >= b - 1e-12 for a, b in zip(longer[len(rates) - 1 :], longer[len(rates) :], strict=False)
    )
    assert expected_tokens(longer, 16) <= 17


@given(st.floats(1.0, 6.0), st.integers(1, 8), st.floats(0.0, 1.0))
def test_measured_cost_inverts_the_model(length: float, depth: int, cost: float) -> None:
    speed = length / (1 + cost * depth)
    found = measured_cost(length, depth, Measured(speed, 0.9 * speed, 1.2 * speed))
    assert found is not None and found.ratio == pytest.approx(cost, abs=1e-9)
    assert (
        found.lo is not None
        and found.hi is not None
        and 0 <= found.lo <= found.ratio <= found.hi + 1e-9
    )


def test_cost_that_no_model_explains() -> None:
    assert measured_cost(2.0, 3, Measured(3.0)) is None
    assert measured_cost(2.0, 3, Measured(0.0)) is None


def test_coverage_of_drafts_that_come_now_and_then() -> None:
    page = lines.vllm_page({"0": (100, [60, 40])}, {"0": 500})
    found = benefit(lines.read_metrics(page).record, Cost(0.0, "given"))
    assert found is not None and found.coverage == pytest.approx(100 / 400)


def test_newcombe_against_the_published_example() -> None:
    """Newcombe (1998), table II, method 10: 56/70 against 48/80 gives 0.0524 to 0.3339."""
    found = difference(proportion(56, 70), proportion(48, 80))
    assert (round(found.lo, 4), round(found.hi, 4)) == (0.0524, 0.3339)


def test_interval_with_clusters_covers() -> None:
    """Windows whose own rates vary: the widened interval holds the mean about as often as
    it says.
    """
    rng = np.random.default_rng(1)
    held, plain = 0, 0
    for _ in range(400):
        rates = rng.beta(3, 2, 24)
        pairs = [(int(x), 200) for x in rng.binomial(200, rates)]
        total = sum(x for x, _ in pairs)
        wide = proportion(total, 24 * 200, design_effect(pairs))
        narrow = proportion(total, 24 * 200)
        held += wide.lo <= 0.6 <= wide.hi
        plain += narrow.lo <= 0.6 <= narrow.hi
    assert 0.90 <= held / 400 <= 0.98
    assert plain / 400 < 0.4


def test_design_effect_is_one_for_equal_windows() -> None:
    assert design_effect([(60, 100)] * 8) == 1.0
    assert design_effect([(0, 100)] * 8) == 1.0
    assert design_effect([(99, 100), (1, 100)]) == 1.0, "two windows say too little"


class TestBaseline:
    GOOD = lines.vllm_v1([860, 700, 550], 1000)

    @staticmethod
    def reading(candidate: str, baseline: str) -> tuple[Rate | None, str]:
        a, b = lines.read(candidate), lines.read(baseline)
        found = compare(assess(a), assess(b), a.record, b.record)
        return found.fall, found.reading

    def test_from_86_per_cent_to_nothing_is_a_loader_fault(self) -> None:
        fall, reading = self.reading(lines.vllm_v1([0, 0, 0], 500), self.GOOD)
        assert fall is not None and fall.value == pytest.approx(-0.86) and fall.hi < -0.8
        assert "loader fault" in reading

    def test_a_few_points_are_what_quantization_does(self) -> None:
        _, reading = self.reading(lines.vllm_v1([820, 640, 500], 1000), self.GOOD)
        assert "within what a quantized target explains" in reading

    def test_twenty_points_are_left_open(self) -> None:
        _, reading = self.reading(lines.vllm_v1([640, 400, 200], 1000), self.GOOD)
        assert "assay compare" in reading

    def test_noise(self) -> None:
        assert "no difference" in self.reading(lines.vllm_v1([85, 71, 54], 100), self.GOOD)[1]

    def test_a_baseline_without_speculation(self) -> None:
        a: Evidence = lines.read(self.GOOD)
        b = lines.read(lines.vllm_engine(0))
        assert "only the speeds" in compare(assess(a), assess(b), a.record, b.record).reading
