from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import spec_lines as lines
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from assay.speculation.measured import Measured, median, quotient
from assay.speculation.options import SpecOptions
from assay.speculation.spec import examine


@given(st.lists(st.floats(0.1, 1e4), min_size=1, max_size=160))
def test_the_interval_of_the_median_is_the_binomial_one(values: list[float]) -> None:
    found = median(values)
    assert found is not None
    n, ordered = len(values), sorted(values)
    k = int(binom.ppf(0.025, n, 0.5))  # the smallest k with P(X <= k) >= 2.5 %
    while k > 0 and binom.cdf(k - 1, n, 0.5) > 0.025:
        k -= 1
    if n < 6:
        assert found.lo is None and found.hi is None
    elif n <= 100:
        assert (found.lo, found.hi) == (ordered[k - 1], ordered[n - k])
    else:
        assert found.lo is not None and abs(ordered.index(found.lo) - (k - 1)) <= 1 + values.count(
            found.lo
        )
    if found.lo is not None and found.hi is not None:
        assert found.lo <= found.value <= found.hi


def test_it_covers_the_median_of_the_source() -> None:
    rng = random.Random(3)
    covered = 0
    for _ in range(600):
        found = median([rng.lognormvariate(4.0, 0.3) for _ in range(20)])
        assert found is not None and found.lo is not None and found.hi is not None
        covered += found.lo <= math.exp(4.0) <= found.hi
    assert covered / 600 >= 0.94  # exactly 95.9 %; three standard errors are 2.4 points


def test_nothing_and_idle_windows() -> None:
    assert median([]) is None and median([0.0, 0.0]) is None
    assert median([0.0, 4.0, 2.0]) == Measured(3.0)


def test_quotient() -> None:
    assert quotient(Measured(6.0), Measured(3.0, 2.0, 4.0)) == Measured(2.0)
    found = quotient(Measured(6.0, 5.0, 7.0), Measured(3.0, 3.0, 3.0))
    assert (found.value, found.lo, found.hi) == pytest.approx((2.0, 5 / 3, 7 / 3))
    both = quotient(Measured(6.0, 5.0, 7.0), Measured(3.0, 2.5, 3.5))
    assert both.lo is not None and both.hi is not None and both.lo < 5 / 3 and both.hi > 7 / 3


def test_a_slowdown_within_the_noise_is_no_finding(tmp_path: Path) -> None:
    def log(name: str, speeds: list[float], drafting: bool) -> str:
        rows = []
        for speed in speeds:
            rows += [lines.vllm_engine(0, speed)] + (
                [lines.vllm_v1([80, 60], 100)] if drafting else []
            )
        (tmp_path / name).write_text("\n".join(rows) + "\n")
        return str(tmp_path / name)

    off = log("off.log", [50, 51, 49, 50, 52, 48, 50, 51], drafting=False)
    noisy = log("noisy.log", [48, 60, 35, 47, 58, 30, 55, 49], drafting=True)
    slow = log("slow.log", [30, 31, 29, 30, 32, 30, 31, 29], drafting=True)
    found = {}
    for name in (noisy, slow):
        report = examine([name], SpecOptions(baseline=(off,)))
        found[name] = "speculation.costs_more" in [f.id for f in report.findings]
        interval = report.results["benefit"]["measured_multiplier_interval"]
        assert interval["lo"] < interval["value"] < interval["hi"]
        low, high = report.results["benefit"]["cost_interval"]
        assert low < report.results["benefit"]["cost_ratio"] < high
    assert found == {noisy: False, slow: True}
