"""Bars, waterfalls and forests: one row a point, the value axis runs to the right, the numbers stand beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from assay.report.scale import (
    Axis,
    categories,
    drawable_bands,
    interval,
    name,
    starts,
    value_axis,
    with_interval,
)
from assay.report.svg_parts import CHAR, WIDTH, colour, mark, tag, text
from assay.report.text import one_line
from assay.verdict import Chart, Point

MAX_ROWS = 400
_TICK_ROOM = 24
_LABEL_ROOM = 18


@dataclass(frozen=True)
class _Frame:
    axis: Axis
    left: float
    span: float
    top: float
    row: float

    def x(self, value: float) -> float:
        return self.left + self.axis.at(value) * self.span


def draw(chart: Chart, points: Sequence[Sequence[Point]], top: float) -> tuple[str, float]:
    """The chart below `top`, and the y at which it ends."""
    rows = _rows(chart, points)
    longest = max(len(one_line(name(x))) for x, _, _, _ in rows)
    left = min(max(longest * CHAR + 14, 40), WIDTH * 0.36)
    right = WIDTH - max(len(with_interval(p)) for _, _, p, _ in rows) * CHAR - 16
    frame = _Frame(
        value_axis(chart, points), left, max(right - left, 80), top + (_LABEL_ROOM if chart.x_label else 0),
        24 if len(rows) <= 40 else 15,
    )  # fmt: skip
    bottom = frame.top + frame.row * len(rows) + 4
    parts = [*_bands(chart, frame, bottom), *_ticks(frame, bottom)]
    if chart.x_label:
        parts.append(text(chart.x_label, 4, frame.top - 6, "quiet"))
    if chart.y_label:
        parts.append(text(chart.y_label, left + frame.span / 2, bottom + 36, "quiet", "middle"))
    shown: float | str | None = None
    for k, (x, i, point, begin) in enumerate(rows):
        y = frame.top + frame.row * (k + 0.5) + 2
        if x != shown:
            parts.append(text(name(x), left - 10, y + 4, "label", "end", int(left / CHAR) - 1))
        shown = x
        if chart.kind == "forest":
            parts.append(_whisker(frame, i, point, y))
        else:
            parts.append(_bar(frame, i, point, begin, y))
        parts.append(text(with_interval(point), WIDTH - 4, y + 4, "num", "end"))
    return "".join(parts), bottom + _TICK_ROOM + (_LABEL_ROOM if chart.y_label else 0)


def _rows(chart: Chart, points: Sequence[Sequence[Point]]) -> list[tuple[float | str, int, Point, float]]:
    """(x, series, point, where its bar begins), the series of one x next to each other."""
    begins = starts(chart, points)
    found = [
        {p.x: (p, b) for p, b in zip(reversed(series), reversed(begins[i]), strict=True)}
        for i, series in enumerate(points)
    ]
    return [(x, i, *by_x[x]) for x in categories(points) for i, by_x in enumerate(found) if x in by_x][
        :MAX_ROWS
    ]


def _bands(chart: Chart, frame: _Frame, bottom: float) -> Iterator[str]:
    for band in drawable_bands(chart):
        low, high = sorted((frame.x(band.lo), frame.x(band.hi)))
        yield tag("rect", css="band", x=low, y=frame.top, width=high - low, height=bottom - frame.top)


def _ticks(frame: _Frame, bottom: float) -> Iterator[str]:
    free = -1.0
    for tick in frame.axis.ticks:
        x = frame.x(tick)
        css = "axis" if tick == 0 else "grid"
        yield tag("line", css=css, x1=x, y1=frame.top, x2=x, y2=bottom)
        half = len(frame.axis.label(tick)) * CHAR / 2
        if x - half > free:
            yield text(frame.axis.label(tick), x, bottom + 16, "tick", "middle")
            free = x + half + 6


def _bar(frame: _Frame, series: int, point: Point, begin: float, y: float) -> str:
    low, high = sorted((frame.x(begin), frame.x(begin + point.y)))
    thick = frame.row * 0.66
    bar = tag(
        "rect", css=colour(series), x=low, y=y - thick / 2, width=max(high - low, 1), height=thick, rx=2
    )
    return bar + _extent(frame, point, y, "error", begin)


def _whisker(frame: _Frame, series: int, point: Point, y: float) -> str:
    return _extent(frame, point, y, f"{colour(series)} whisker") + mark(series, frame.x(point.y), y)


def _extent(frame: _Frame, point: Point, y: float, css: str, begin: float = 0.0) -> str:
    bounds = interval(point)
    if bounds is None:
        return ""
    low, high = (frame.x(begin + bound) for bound in bounds)
    return tag(
        "path", css=css, d=f"M{low:.1f} {y - 4:.1f}v8M{low:.1f} {y:.1f}H{high:.1f}M{high:.1f} {y - 4:.1f}v8"
    )
