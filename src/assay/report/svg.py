"""Charts as static inline SVG: no script, no external file, colours from the page's style sheet.

Marks carry classes (`s0` … `s5`, `band`, `grid`, `axis`, `label`); series differ in shape and dash as well as in
colour, and every picture has a title and a description for those who cannot see it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from assay.report.axes import (
    ROWS,
    Axis,
    are_numbers,
    categories,
    drawable,
    drawable_bands,
    fit,
    interval,
    name,
    starts,
    value_axis,
    with_interval,
)
from assay.report.text import one_line, shorten
from assay.verdict import Chart, Point

# -----------------------------------------------------------------------------
# The elements of which SVG charts are made. Everything written goes through `tag` or `text`, which escape.

WIDTH = 760
PALETTE = 6
CHAR = 6.7
"""Average width of a character at the font size of the labels."""


def tag(element: str, content: str = "", **attributes: str | float) -> str:
    """One element; `css` is its class, underscores in names become hyphens, numbers get one decimal."""
    written = "".join(f' {_attribute(key)}="{_value(value)}"' for key, value in attributes.items())
    return f"<{element}{written}>{content}</{element}>" if content else f"<{element}{written}/>"


def _attribute(key: str) -> str:
    return "class" if key == "css" else key.replace("_", "-")


def _value(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


def label(content: str, limit: int = 120) -> str:
    """Any text as element content: visible, on one line, short, escaped."""
    return escape(shorten(one_line(content), limit)) or " "


def text(content: str, x: float, y: float, css: str, anchor: str = "start", limit: int = 120) -> str:
    """A line of text at a place."""
    return tag("text", label(content, limit), css=css, x=x, y=y, text_anchor=anchor)


def mark(series: int, x: float, y: float, size: float = 5) -> str:
    """The mark of a series: a circle, square, diamond or triangle in its colour."""
    css = colour(series)
    match series % 4:
        case 1:
            return tag("rect", css=css, x=x - size, y=y - size, width=2 * size, height=2 * size)
        case 2:
            return tag(
                "path", css=css, d=f"M{x:.1f} {y - size:.1f}l{size} {size}l-{size} {size}l-{size} -{size}z"
            )
        case 3:
            return tag("path", css=css, d=f"M{x:.1f} {y - size:.1f}l{size} {1.7 * size:.1f}h-{2 * size}z")
    return tag("circle", css=css, cx=x, cy=y, r=size)


def colour(series: int) -> str:
    """The class that colours a series."""
    return f"s{series % PALETTE}"


# -----------------------------------------------------------------------------
# Line charts and scatter plots: a plane with two axes, intervals as ribbons or error bars.

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


def draw_plane(chart: Chart, points: Sequence[Sequence[Point]], top: float) -> tuple[str, float]:
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


# -----------------------------------------------------------------------------
# Bars, waterfalls and forests: one row a point, the value axis runs to the right, the numbers stand beside it.

MAX_ROWS = 400
_TICK_ROOM = 24
_LABEL_ROOM = 18


@dataclass(frozen=True)
class _RowFrame:
    axis: Axis
    left: float
    span: float
    top: float
    row: float

    def x(self, value: float) -> float:
        return self.left + self.axis.at(value) * self.span


def draw_rows(chart: Chart, points: Sequence[Sequence[Point]], top: float) -> tuple[str, float]:
    """The chart below `top`, and the y at which it ends."""
    rows = _rows(chart, points)
    longest = max(len(one_line(name(x))) for x, _, _, _ in rows)
    left = min(max(longest * CHAR + 14, 40), WIDTH * 0.36)
    right = WIDTH - max(len(with_interval(p)) for _, _, p, _ in rows) * CHAR - 16
    frame = _RowFrame(
        value_axis(chart, points), left, max(right - left, 80), top + (_LABEL_ROOM if chart.x_label else 0),
        24 if len(rows) <= 40 else 15,
    )  # fmt: skip
    bottom = frame.top + frame.row * len(rows) + 4
    parts = [*_row_bands(chart, frame, bottom), *_ticks(frame, bottom)]
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


def _row_bands(chart: Chart, frame: _RowFrame, bottom: float) -> Iterator[str]:
    for band in drawable_bands(chart):
        low, high = sorted((frame.x(band.lo), frame.x(band.hi)))
        yield tag("rect", css="band", x=low, y=frame.top, width=high - low, height=bottom - frame.top)


def _ticks(frame: _RowFrame, bottom: float) -> Iterator[str]:
    free = -1.0
    for tick in frame.axis.ticks:
        x = frame.x(tick)
        css = "axis" if tick == 0 else "grid"
        yield tag("line", css=css, x1=x, y1=frame.top, x2=x, y2=bottom)
        half = len(frame.axis.label(tick)) * CHAR / 2
        if x - half > free:
            yield text(frame.axis.label(tick), x, bottom + 16, "tick", "middle")
            free = x + half + 6


def _bar(frame: _RowFrame, series: int, point: Point, begin: float, y: float) -> str:
    low, high = sorted((frame.x(begin), frame.x(begin + point.y)))
    thick = frame.row * 0.66
    bar = tag(
        "rect", css=colour(series), x=low, y=y - thick / 2, width=max(high - low, 1), height=thick, rx=2
    )
    return bar + _extent(frame, point, y, "error", begin)


def _whisker(frame: _RowFrame, series: int, point: Point, y: float) -> str:
    return _extent(frame, point, y, f"{colour(series)} whisker") + mark(series, frame.x(point.y), y)


def _extent(frame: _RowFrame, point: Point, y: float, css: str, begin: float = 0.0) -> str:
    bounds = interval(point)
    if bounds is None:
        return ""
    low, high = (frame.x(begin + bound) for bound in bounds)
    return tag(
        "path", css=css, d=f"M{low:.1f} {y - 4:.1f}v8M{low:.1f} {y:.1f}H{high:.1f}M{high:.1f} {y - 4:.1f}v8"
    )


# -----------------------------------------------------------------------------

_KINDS = {
    "bar": "Bar chart", "line": "Line chart", "scatter": "Scatter plot", "forest": "Chart of intervals",
    "waterfall": "Waterfall chart",
}  # fmt: skip


def draw(chart: Chart, identifier: str) -> str:
    """`chart` as one `<svg>` element, or nothing if no point can be drawn.

    `identifier` makes the ids of its title and description unique in the page.
    """
    points, _ = drawable(chart)
    if not any(points):
        return ""
    legend, top = _legend(chart)
    body, height = (draw_rows if chart.kind in ROWS else draw_plane)(chart, points, top)
    title = tag("title", label(chart.title), id=f"{identifier}-t")
    described = tag("desc", label(_description(chart, points), 500), id=f"{identifier}-d")
    return tag(
        "svg", title + described + legend + body, viewBox=f"0 0 {WIDTH} {height:.0f}", role="img",
        aria_labelledby=f"{identifier}-t {identifier}-d", xmlns="http://www.w3.org/2000/svg",
    )  # fmt: skip


def thinned(chart: Chart) -> int:
    """How many drawable points the picture leaves out because there are too many to see."""
    points, _ = drawable(chart)
    total = sum(map(len, points))
    if chart.kind in ROWS:
        return max(0, total - MAX_ROWS)
    return total - sum(len(sample(series)) for series in points)


def _description(chart: Chart, points: Sequence[Sequence[Point]]) -> str:
    names = ", ".join(f"{s.name} ({len(kept)} points)" for s, kept in zip(chart.series, points, strict=True))
    bands = "".join(f" Shaded: {b.name}, {b.lo:g} to {b.hi:g}." for b in drawable_bands(chart))
    return (
        f"{_KINDS[chart.kind]} of {chart.y_label or 'values'} by {chart.x_label or 'item'}: {names}.{bands}"
    )


def _legend(chart: Chart) -> tuple[str, float]:
    """The names of the series and bands, and the y at which they end."""
    series = [s.name for s in chart.series] if len(chart.series) > 1 else []
    bands = [b.name for b in drawable_bands(chart)]
    parts: list[str] = []
    x, y = 4.0, 14.0
    for i, entry in enumerate([*series, *bands]):
        width = 36 + CHAR * min(len(entry), 60)
        if x + width > WIDTH and x > 4:
            x, y = 4.0, y + 20
        key = (
            mark(i, x + 7, y - 4)
            if i < len(series)
            else tag("rect", css="band", x=x, y=y - 10, width=14, height=12)
        )
        parts += [key, text(entry, x + 20, y, "label", limit=60)]
        x += width
    return "".join(parts), y + 18 if parts else 8.0
