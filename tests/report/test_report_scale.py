from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.report.svg import caption, drawable, fit, interval, number, value_axis
from assay.verdict import Band, Chart, Point, Series

finite = st.floats(allow_nan=False, allow_infinity=False)


def chart(*points, kind="line", **options):
    return Chart("t", kind, (Series("s", points),), **options)


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0, 1], (0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        ([3, 97], (0, 20, 40, 60, 80, 100)),
        ([-0.04, 0.03], (-0.04, -0.02, 0, 0.02, 0.04)),
        ([5, 5], (2, 3, 4, 5, 6, 7, 8)),
        ([0, 0], (-0.6, -0.4, -0.2, 0, 0.2, 0.4, 0.6)),
        ([], (-0.6, -0.4, -0.2, 0, 0.2, 0.4, 0.6)),
    ],
)
def test_linear_ticks_are_round_and_hold_the_data(values, ticks):
    assert fit(values).ticks == pytest.approx(ticks, abs=1e-12)


@pytest.mark.parametrize(
    ("values", "ends", "ticks"),
    [
        ([1e-4, 0.05], (1e-4, 0.05), (1e-4, 1e-3, 1e-2)),
        ([16, 4096], (10, 5000), (10, 100, 1000)),
        ([3, 40], (2, 50), (2, 5, 10, 20, 50)),
        ([1, 1], (1, 2), (1, 2)),
        ([-3, 0, 7], (5, 10), (5, 10)),
    ],
)
def test_logarithmic_axes_end_on_round_numbers(values, ends, ticks):
    axis = fit(values, log=True)
    assert (axis.lo, axis.hi) == pytest.approx(ends)
    assert axis.ticks == pytest.approx(ticks)


@given(st.lists(finite, min_size=1), st.booleans())
def test_any_numbers_have_an_axis_with_few_ticks_and_places_in_order(values, log):
    axis = fit(values, log)
    assert 1 <= len(axis.ticks) <= 14
    places = [axis.at(v) for v in sorted(values)]
    assert all(0 <= p <= 1 for p in places)
    assert places == sorted(places)
    assert all(axis.label(t) for t in axis.ticks)


def test_places_on_the_axes():
    assert fit([0, 10]).at(2.5) == 0.25
    assert fit([1, 100], log=True).at(10) == pytest.approx(0.5)
    assert fit([1, 100], log=True).at(0) == 0
    assert fit([0, 1]).at(math.inf) == 1


def test_tick_labels_have_the_decimals_that_the_step_needs():
    labels = lambda axis: [axis.label(t) for t in axis.ticks]  # noqa: E731
    assert labels(fit([0, 0.1])) == ["0.00", "0.02", "0.04", "0.06", "0.08", "0.10"]
    assert labels(fit([0, 12000])) == ["0", "5,000", "10,000", "15,000"]
    assert labels(fit([0, 4e9]))[-1] == "4e+09"


def test_points_without_a_place_are_counted():
    points = (Point(1, 1), Point(2, math.nan), Point(math.inf, 1), Point(3, -1), Point(-4, 2))
    assert drawable(chart(*points))[1] == 2
    logarithmic = chart(*points, log_x=True, log_y=True)
    assert drawable(logarithmic) == ([[Point(1, 1)]], 4)
    assert (
        caption(logarithmic, 4)
        == "4 points not drawn: not a finite number, or not positive on a logarithmic axis."
    )
    assert caption(chart(note="A note."), 1) == "A note. 1 point not drawn: not a finite number."


def test_intervals_are_ordered_and_need_two_numbers():
    assert interval(Point(0, 1, 2, 0)) == (0, 2)
    assert interval(Point(0, 1, 0, None)) is None
    assert interval(Point(0, 1, math.nan, 2)) is None


def test_the_value_axis_holds_intervals_and_bands_and_bars_stand_on_zero():
    plain = chart(Point(0, 5, 1, 9), bands=(Band("b", 10, 19),))
    axis = value_axis(plain, drawable(plain)[0])
    assert axis.lo <= 1 and axis.hi >= 19
    bar = chart(Point("a", 98), kind="bar")
    assert value_axis(bar, drawable(bar)[0]).lo == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1.0, "1"), (0.123456, "0.1235"), (1234.5, "1,234"), (123456789, "123,456,789"), (1e-9, "1e-09"),  # noqa: E501
     (2e12, "2e+12"), (math.inf, "∞"), (-math.inf, "−∞"), (math.nan, "n/a"), (-1500, "-1,500")],
)  # fmt: skip
def test_numbers_for_people(value, text):
    assert number(value) == text
