from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from assay.coherence.arrays import has_stretch, true_stretches
from assay.coherence.detectors.periodic import Run, periodic_runs


def plain_runs(ids: list[int], period: int, need: int) -> list[tuple[int, int]]:
    """Maximal stretches with one period, the slow way."""
    runs, at = [], 0
    while at + period < len(ids):
        end = at + period
        while end < len(ids) and ids[end] == ids[end - period]:
            end += 1
        if end - at >= need and end > at + period:
            runs.append((at, end))
        at = max(end - period + 1, at + 1)
    return runs


def test_finds_period_start_and_end() -> None:
    ids = np.array([9, 8, *[1, 2, 3] * 5, 1, 7])
    assert periodic_runs(ids) == [Run(3, 2, 18)]
    assert Run(3, 2, 18).repeats == 16 / 3


def test_smaller_period_explains_larger_ones() -> None:
    assert periodic_runs(np.array([5] * 40)) == [Run(1, 0, 40)]


@given(st.lists(st.integers(0, 2), max_size=80), st.integers(2, 5))
def test_agrees_with_the_slow_way(ids: list[int], repeats: int) -> None:
    got = periodic_runs(np.array(ids, dtype=np.int64), min_repeats=repeats)
    for run in got:
        assert (run.start, run.end) in plain_runs(ids, run.period, repeats * run.period)
    found = np.zeros(len(ids), dtype=bool)
    for run in got:
        found[run.start : run.end] = True
    for period in range(1, len(ids) // repeats + 1):
        for start, end in plain_runs(ids, period, repeats * period):
            assert found[start:end].mean() >= 0.9


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 40))
def test_cheap_test_never_misses_a_stretch(flags: list[bool], length: int) -> None:
    starts, ends = true_stretches(np.array(flags, dtype=bool))
    if any(e - s >= length for s, e in zip(starts, ends, strict=True)):
        assert has_stretch(np.array(flags, dtype=bool), length)


@given(st.lists(st.booleans(), max_size=60))
def test_stretches_rebuild_the_flags(flags: list[bool]) -> None:
    rebuilt = np.zeros(len(flags), dtype=bool)
    for start, end in zip(*true_stretches(np.array(flags, dtype=bool)), strict=True):
        assert start < end
        rebuilt[start:end] = True
    assert rebuilt.tolist() == flags
