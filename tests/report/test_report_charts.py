"""Charts as tables of numbers and in SVG, where marks stand where their numbers say."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from report_samples import charts, forest

from assay.report import svg as charts_svg
from assay.report.svg import drawable, listing
from assay.verdict import Band, Chart, Point, Series

SVG = "{http://www.w3.org/2000/svg}"


def svg(chart):
    return ET.fromstring(charts_svg.draw(chart, "c0"))


def marked(root, element, css):
    return [e for e in root.iter(SVG + element) if css in (e.get("class") or "").split()]


def bars(*values, **options):
    return Chart(
        "t", "bar", (Series("s", [Point(f"row {i}", v) for i, v in enumerate(values)]),), **options
    )


def test_a_listing_has_every_point_with_its_interval_and_the_bands():
    table = listing(forest())
    assert table.columns[0] == "series"
    story = next(row for row in table.rows if row[:2] == ["this server", "story"])
    assert story[-1] == "1 [0.51, 1]"
    assert "tolerated: " in table.note
    assert listing(bars(1.0, 0.5)).rows == [["row 0", "1"], ["row 1", "0.5"]]


@settings(deadline=None, max_examples=60)
@given(charts)
def test_a_listing_leaves_out_no_point_that_can_be_drawn(chart):
    points, _ = drawable(chart)
    table = listing(chart)
    assert len(table.rows) == sum(map(len, points))
    assert {len(row) for row in table.rows} <= {len(table.columns)}


def test_svg_bars_are_as_long_as_their_values():
    widths = [float(e.get("width")) for e in marked(svg(bars(1.0, 0.5, 0.25)), "rect", "s0")]
    assert [w / widths[0] for w in widths] == pytest.approx([1, 0.5, 0.25], abs=0.01)


def test_svg_forest_has_marks_whiskers_a_band_and_a_description():
    root = svg(forest())
    legend, capital, story = (float(e.get("cx")) for e in marked(root, "circle", "s0"))
    (band,) = [e for e in marked(root, "rect", "band") if float(e.get("height")) > 20]
    left, right = float(band.get("x")), float(band.get("x")) + float(band.get("width"))
    assert legend < left < capital < right < story
    assert capital == pytest.approx((left + right) / 2, abs=0.2)
    assert story == pytest.approx(left + 5 * (right - left), abs=0.5)
    assert len(marked(root, "path", "whisker")) == 3
    assert root.find(SVG + "title").text == "Share of degenerate texts"
    described = root.find(SVG + "desc").text
    assert (
        "this server (2 points)" in described
        and "reference (1 points)" in described
        and "tolerated" in described
    )
    assert root.get("aria-labelledby").split() == ["c0-t", "c0-d"]


def test_svg_line_on_logarithmic_axes_is_straight_for_a_power_law():
    points = [Point(10.0**k, 10.0 ** (2 * k)) for k in range(5)]
    root = svg(Chart("t", "line", (Series("s", points),), log_x=True, log_y=True))
    (line,) = marked(root, "polyline", "s0")
    places = [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
    steps = {(round(b[0] - a[0]), round(b[1] - a[1])) for a, b in pairwise(places)}
    assert len(steps) == 1
    ((right, down),) = steps
    assert right > 0 > down


def test_svg_line_with_intervals_has_a_ribbon_around_it():
    points = [Point(k, k, k - 1, k + 1) for k in range(4)]
    root = svg(Chart("t", "line", (Series("s", points),), bands=(Band("floor", 0, 1),)))
    (ribbon,) = marked(root, "polygon", "ribbon")
    assert len(ribbon.get("points").split()) == 8


def test_svg_text_is_escaped_and_short():
    chart = Chart("<b>&\"'", "bar", (Series("s", (Point("<i>" + "x" * 500, 1),)),), "<x>", "<y>")
    root = svg(chart)
    assert {e.tag.removeprefix(SVG) for e in root.iter()} <= {
        "svg",
        "title",
        "desc",
        "text",
        "rect",
        "line",
        "path",
    }
    assert max(len(e.text or "") for e in root.iter(SVG + "text")) < 150


def test_too_many_points_are_thinned_and_counted():
    chart = Chart("t", "scatter", (Series("s", [Point(k, k) for k in range(10_000)]),))
    drawn = len(marked(svg(chart), "circle", "s0"))
    assert drawn == 2500
    assert charts_svg.thinned(chart) == 7500
    assert charts_svg.thinned(bars(*range(500))) == 100


def test_a_chart_without_a_drawable_point_has_no_picture():
    assert charts_svg.draw(bars(float("nan")), "c0") == ""


@settings(deadline=None, max_examples=60)
@given(charts)
def test_svg_holds_only_finite_places(chart):
    drawn = charts_svg.draw(chart, "c0")
    numbers = re.sub(r">[^<]*<", "><", drawn)
    assert "nan" not in numbers and "inf" not in numbers
    if drawn:
        ET.fromstring(drawn)


def waterfall():
    steps = [Point("engine", 1.0, 0.5, 1.5), Point("codec", 3.0), Point("interaction", -2.0)]
    return Chart(
        "t",
        "waterfall",
        (Series("change", steps), Series("level", [Point("total", 2.0, 1.0, 3.0)])),
    )


def test_svg_waterfall_draws_bars_and_their_intervals_at_the_same_places():
    root = svg(waterfall())
    bars = [(float(r.get("x")), float(r.get("width"))) for r in marked(root, "rect", "s0")]
    (engine, codec, interaction) = [b for b in bars if b[1] > 14.5]
    ((total_x, total_width),) = [
        (float(r.get("x")), float(r.get("width")))
        for r in marked(root, "rect", "s1")
        if float(r.get("height")) > 10 and float(r.get("width")) > 14.5
    ]
    assert codec[0] == pytest.approx(engine[0] + engine[1], abs=0.2)
    assert codec[1] == pytest.approx(3 * engine[1], abs=0.3)
    assert interaction[0] + interaction[1] == pytest.approx(codec[0] + codec[1], abs=0.3)
    assert total_x == pytest.approx(engine[0], abs=0.2)
    assert total_x + total_width == pytest.approx(interaction[0], abs=0.3)
    first = marked(root, "path", "error")[0].get("d")
    low, high = (float(x) for x in re.findall(r"M([\d.]+) [\d.]+(?:H([\d.]+))?", first)[1])
    assert low == pytest.approx(engine[0] + 0.5 * engine[1], abs=0.3)
    assert high == pytest.approx(engine[0] + 1.5 * engine[1], abs=0.3)
