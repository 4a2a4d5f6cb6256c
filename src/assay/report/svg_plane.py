"""Line charts and scatter plots: a plane with two axes, intervals as ribbons or error bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from assay.report.scale import Axis, are_numbers, categories, drawable_bands, fit, interval, name, value_axis
from assay.report.svg_parts import CHAR, WIDTH, colour, mark, tag, text
from assay.report.text import one_line
from assay.verdict import Chart, Point

MAX_POINTS = 3000
MAX_MARKED = 80
MAX_LABELLED = 24
_HEIGHT = 280.0


@dataclass(frozen=True)
class _Frame:
    axis: Axis
    left: float
    right: float
    top: float

    @property
    def bottom(self) -> float:
        return self.top + _HEIGHT

    def y(self, value: float) -> float:
        return self.bottom - self.axis.at(value) * _HEIGHT


def draw(chart: Chart, points: Sequence[Sequence[Point]], top: float) -> tuple[str, float]:
    """The chart below `top`, and the y at which it ends."""
    axis = value_axis(chart, points)
    left = max(len(axis.label(t)) for t in axis.ticks) * CHAR + 16
    frame = _Frame(axis, left, WIDTH - 16, top + (20 if chart.y_label else 4))
    place, x_ticks = _across(chart, points, frame)
    parts = [*_bands(chart, frame), *_y_ticks(frame), *x_ticks]
    for i, series in enumerate(points):
        located = sorted(((place(p), p) for p in sample(series)), key=lambda pair: pair[0])
        parts += _line(frame, i, located) if chart.kind == "line" else _scatter(frame, i, located)
    if chart.y_label:
        parts.append(text(chart.y_label, 4, frame.top - 10, "quiet"))
    if chart.x_label:
        parts.append(text(chart.x_label, (left + frame.right) / 2, frame.bottom + 36, "quiet", "middle"))
    return "".join(parts), frame.bottom + (42 if chart.x_label else 24)


def sample(series: Sequence[Point]) -> Sequence[Point]:
    """Every k-th point, so that at most `MAX_POINTS` are drawn."""
    return series[:: math.ceil(len(series) / MAX_POINTS) or 1]


Located = Sequence[tuple[float, Point]]


def _across(
    chart: Chart, points: Sequence[Sequence[Point]], frame: _Frame
) -> tuple[Callable[[Point], float], list[str]]:
    """Where a point's x lies, and the drawn ticks of the x axis: a scale for numbers, a list for names."""
    names = categories(points)
    span = frame.right - frame.left
    if are_numbers(points):
        axis = fit((x for x in names if not isinstance(x, str)), log=chart.log_x)
        ticks = [(frame.left + axis.at(t) * span, axis.label(t)) for t in axis.ticks]
        return lambda p: frame.left + axis.at(float(p.x)) * span, list(_x_ticks(frame, ticks))
    places = {x: frame.left + (k + 0.5) / len(names) * span for k, x in enumerate(names)}
    return lambda p: places[p.x], list(
        _x_ticks(frame, [(at, one_line(name(x))[:24]) for x, at in places.items()])
    )


def _x_ticks(frame: _Frame, ticks: Sequence[tuple[float, str]]) -> Iterator[str]:
    free = -1.0
    yield tag("line", css="axis", x1=frame.left, y1=frame.bottom, x2=frame.right, y2=frame.bottom)
    for x, label in ticks:
        half = len(label) * CHAR / 2
        if x - half > free:
            yield tag("line", css="axis", x1=x, y1=frame.bottom, x2=x, y2=frame.bottom + 4)
            yield text(label, min(x, WIDTH - half), frame.bottom + 18, "tick", "middle")
            free = x + half + 8


def _y_ticks(frame: _Frame) -> Iterator[str]:
    for tick in frame.axis.ticks:
        y = frame.y(tick)
        yield tag("line", css="grid", x1=frame.left, y1=y, x2=frame.right, y2=y)
        yield text(frame.axis.label(tick), frame.left - 8, y + 4, "tick", "end")


def _bands(chart: Chart, frame: _Frame) -> Iterator[str]:
    for band in drawable_bands(chart):
        top, bottom = sorted((frame.y(band.lo), frame.y(band.hi)))
        yield tag(
            "rect", css="band", x=frame.left, y=top, width=frame.right - frame.left, height=bottom - top
        )


def _line(frame: _Frame, series: int, located: Located) -> Iterator[str]:
    bounded = [(x, bounds) for x, p in located if (bounds := interval(p))]
    if len(bounded) > 1:
        edge = [(x, frame.y(hi)) for x, (_, hi) in bounded] + [
            (x, frame.y(lo)) for x, (lo, _) in reversed(bounded)
        ]
        yield tag("polygon", css=f"{colour(series)} ribbon", points=_path(edge))
    if len(located) > 1:
        trace = [(x, frame.y(p.y)) for x, p in located]
        yield tag("polyline", css=f"{colour(series)} line", points=_path(trace))
    if len(located) <= MAX_MARKED:
        yield from (mark(series, x, frame.y(p.y), 3.5) for x, p in located)


def _scatter(frame: _Frame, series: int, located: Located) -> Iterator[str]:
    size = 4 if len(located) <= MAX_MARKED * 3 else 2
    for x, point in located:
        bounds = interval(point)
        if bounds:
            low, high = map(frame.y, bounds)
            yield tag("line", css=f"{colour(series)} whisker", x1=x, y1=low, x2=x, y2=high)
        yield mark(series, x, frame.y(point.y), size)
        if point.label and len(located) <= MAX_LABELLED:
            beyond = x > (frame.left + frame.right) / 2
            yield text(
                point.label,
                x + (-8 if beyond else 8),
                frame.y(point.y) + 4,
                "tick",
                "end" if beyond else "start",
                48,
            )


def _path(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
