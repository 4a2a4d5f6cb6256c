"""Charts as static inline SVG: no script, no external file, colours from the page's style sheet.

Marks carry classes (`s0` … `s5`, `band`, `grid`, `axis`, `label`); series differ in shape and dash
as well as in colour, and every picture has a title and a description for those who cannot see it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from assay.report.text import one_line, shorten
from assay.verdict import Band, Chart, Point, Table

# The elements of which SVG charts are made. Everything written goes through `tag` or `text`, which
# escape.

WIDTH = 760
PALETTE = 6
CHAR = 6.7
"""Average width of a character at the font size of the labels."""


def tag(element: str, content: str = "", **attributes: str | float) -> str:
    """One element; `css` is its class, underscores in names become hyphens, numbers get one
    decimal.
    """
    written = "".join(f' {_attribute(key)}="{_value(value)}"' for key, value in attributes.items())
    return f"<{element}{written}>{content}</{element}>" if content else f"<{element}{written}/>"


def _attribute(key: str) -> str:
    return "class" if key == "css" else key.replace("_", "-")


def _value(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


def label(content: str, limit: int = 120) -> str:
    """Any text as element content: visible, on one line, short, escaped."""
    return escape(shorten(one_line(content), limit)) or " "


def text(
    content: str, x: float, y: float, css: str, anchor: str = "start", limit: int = 120
) -> str:
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
                "path",
                css=css,
                d=f"M{x:.1f} {y - size:.1f}l{size} {size}l-{size} {size}l-{size} -{size}z",
            )
        case 3:
            return tag(
                "path", css=css, d=f"M{x:.1f} {y - size:.1f}l{size} {1.7 * size:.1f}h-{2 * size}z"
            )
    return tag("circle", css=css, cx=x, cy=y, r=size)


def colour(series: int) -> str:
    """The class that colours a series."""
    return f"s{series % PALETTE}"


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
        parts.append(
            text(chart.x_label, (left + frame.right) / 2, frame.bottom + 36, "quiet", "middle")
        )
    return "".join(parts), frame.bottom + (42 if chart.x_label else 24)


def sample(series: Sequence[Point]) -> Sequence[Point]:
    """Every k-th point, so that at most `MAX_POINTS` are drawn."""
    return series[:: math.ceil(len(series) / MAX_POINTS) or 1]


Located = Sequence[tuple[float, Point]]


def _across(
    chart: Chart, points: Sequence[Sequence[Point]], frame: _Frame
) -> tuple[Callable[[Point], float], list[str]]:
    """Where a point's x lies, and the drawn ticks of the x axis: a scale for numbers, a list for
    names.
    """
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
            "rect",
            css="band",
            x=frame.left,
            y=top,
            width=frame.right - frame.left,
            height=bottom - top,
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


# Bars, waterfalls and forests: one row a point, the value axis runs to the right, the numbers stand
# beside it.

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
        value_axis(chart, points),
        left,
        max(right - left, 80),
        top + (_LABEL_ROOM if chart.x_label else 0),
        24 if len(rows) <= 40 else 15,
    )
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


def _rows(
    chart: Chart, points: Sequence[Sequence[Point]]
) -> list[tuple[float | str, int, Point, float]]:
    """(x, series, point, where its bar begins), the series of one x next to each other."""
    begins = starts(chart, points)
    found = [
        {p.x: (p, b) for p, b in zip(reversed(series), reversed(begins[i]), strict=True)}
        for i, series in enumerate(points)
    ]
    return [
        (x, i, *by_x[x]) for x in categories(points) for i, by_x in enumerate(found) if x in by_x
    ][:MAX_ROWS]


def _row_bands(chart: Chart, frame: _RowFrame, bottom: float) -> Iterator[str]:
    for band in drawable_bands(chart):
        low, high = sorted((frame.x(band.lo), frame.x(band.hi)))
        yield tag(
            "rect", css="band", x=low, y=frame.top, width=high - low, height=bottom - frame.top
        )


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
        "rect",
        css=colour(series),
        x=low,
        y=y - thick / 2,
        width=max(high - low, 1),
        height=thick,
        rx=2,
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
        "path",
        css=css,
        d=f"M{low:.1f} {y - 4:.1f}v8M{low:.1f} {y:.1f}H{high:.1f}M{high:.1f} {y - 4:.1f}v8",
    )


_KINDS = {
    "bar": "Bar chart",
    "line": "Line chart",
    "scatter": "Scatter plot",
    "forest": "Chart of intervals",
    "waterfall": "Waterfall chart",
}


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
        "svg",
        title + described + legend + body,
        viewBox=f"0 0 {WIDTH} {height:.0f}",
        role="img",
        aria_labelledby=f"{identifier}-t {identifier}-d",
        xmlns="http://www.w3.org/2000/svg",
    )


def thinned(chart: Chart) -> int:
    """How many drawable points the picture leaves out because there are too many to see."""
    points, _ = drawable(chart)
    total = sum(map(len, points))
    if chart.kind in ROWS:
        return max(0, total - MAX_ROWS)
    return total - sum(len(sample(series)) for series in points)


def _description(chart: Chart, points: Sequence[Sequence[Point]]) -> str:
    names = ", ".join(
        f"{s.name} ({len(kept)} points)" for s, kept in zip(chart.series, points, strict=True)
    )
    bands = "".join(f" Shaded: {b.name}, {b.lo:g} to {b.hi:g}." for b in drawable_bands(chart))
    return (
        f"{_KINDS[chart.kind]} of {chart.y_label or 'values'} by {chart.x_label or 'item'}:"
        f" {names}.{bands}"
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


# From numbers to positions: which points can be drawn, nice axes, and how a number is written.


ROWS = ("bar", "forest", "waterfall")
"""Kinds that have one row for each point."""

# Outside this range arithmetic on spans overflows or loses all digits; such values sit at the edge,
# or at zero.
_HUGE = 1e150


@dataclass(frozen=True)
class Axis:
    """A value range with its ticks. Values outside it sit at its ends."""

    lo: float
    hi: float
    ticks: tuple[float, ...]
    log: bool = False

    def at(self, value: float) -> float:
        """Where `value` lies, from 0 (low end) to 1 (high end)."""
        if self.log:
            if value <= 0:
                return 0.0
            value = min(math.log10(value), 2 * _HUGE)
            lo, hi = math.log10(self.lo), math.log10(self.hi)
        else:
            lo, hi = self.lo, self.hi
        return min(max((value - lo) / (hi - lo), 0.0), 1.0)

    @property
    def step(self) -> float:
        """Distance of two ticks, which sets how many decimals a tick label needs."""
        return self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else self.hi - self.lo

    def label(self, tick: float) -> str:
        """How a tick is written."""
        return number(tick) if self.log else _tick_text(tick, self.step)


def drawable(chart: Chart) -> tuple[list[list[Point]], int]:
    """The points of each series that have a place on the chart, and how many have none (NaN,
    infinite, ≤ 0 on a log axis).
    """
    kept = [[p for p in series.points if _has_place(p, chart)] for series in chart.series]
    return kept, sum(len(s.points) for s in chart.series) - sum(map(len, kept))


def _has_place(point: Point, chart: Chart) -> bool:
    if not math.isfinite(point.y) or (chart.log_y and point.y <= 0):
        return False
    if isinstance(point.x, str) or chart.kind in ROWS:
        return True
    return math.isfinite(point.x) and not (chart.log_x and point.x <= 0)


def interval(point: Point) -> tuple[float, float] | None:
    """The interval of a point, or None if it has none that can be drawn."""
    if point.lo is None or point.hi is None or math.isnan(point.lo) or math.isnan(point.hi):
        return None
    return min(point.lo, point.hi), max(point.lo, point.hi)


def drawable_bands(chart: Chart) -> list[Band]:
    """The bands whose ends are numbers (an end may be infinite: the band then reaches the edge)."""
    return [b for b in chart.bands if not (math.isnan(b.lo) or math.isnan(b.hi))]


def starts(chart: Chart, points: Sequence[Sequence[Point]]) -> list[list[float]]:
    """Where the bar of each point begins: at zero, but in a waterfall where the change before it
    ended.
    """
    found = [[0.0] * len(series) for series in points]
    if chart.kind == "waterfall" and points:
        level = 0.0
        for k, point in enumerate(points[0]):
            found[0][k] = level
            level += _tame(point.y)
    return found


def value_axis(chart: Chart, points: Sequence[Sequence[Point]]) -> Axis:
    """The axis of `y`: holds every point, interval and band; bars on a linear axis start
    at zero.
    """
    values: list[float] = []
    for series, begins in zip(points, starts(chart, points), strict=True):
        for point, begin in zip(series, begins, strict=True):
            values += [begin + v for v in (point.y, *(interval(point) or ()))]
    for band in drawable_bands(chart):
        values += (band.lo, band.hi)
    if chart.kind in ("bar", "waterfall") and not chart.log_y:
        values.append(0.0)
    return fit(values, log=chart.log_y)


def categories(points: Sequence[Sequence[Point]]) -> list[float | str]:
    """Every distinct `x`, in order of first appearance."""
    return list(dict.fromkeys(p.x for series in points for p in series))


def are_numbers(points: Sequence[Sequence[Point]]) -> bool:
    """Whether every `x` is a number, so that the x axis is a scale and not a list of names."""
    return not any(isinstance(p.x, str) for series in points for p in series)


def fit(values: Iterable[float], log: bool = False) -> Axis:
    """The axis with round ends that holds all finite `values` (the positive ones, on a
    log axis).
    """
    tamed = [_tame(v) for v in values if math.isfinite(v)]
    if log:
        tamed = [v for v in tamed if v > 0]
        return _log_axis(min(tamed, default=1.0), max(tamed, default=1.0))
    return _linear_axis(min(tamed, default=0.0), max(tamed, default=0.0))


def _tame(value: float) -> float:
    return 0.0 if abs(value) < 1 / _HUGE else min(max(value, -_HUGE), _HUGE)


def _linear_axis(lo: float, hi: float) -> Axis:
    if hi - lo <= 1e-9 * max(abs(lo), abs(hi)):
        margin = abs(hi) / 2 or 0.5
        lo, hi = lo - margin, hi + margin
    step = _nice_step((hi - lo) / 5)
    first, last = math.floor(lo / step + 1e-9), math.ceil(hi / step - 1e-9)
    ticks = tuple(i * step for i in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks)


def _nice_step(raw: float) -> float:
    power = 10.0 ** math.floor(math.log10(raw))
    return power * next((m for m in (1, 2, 5) if m * power >= raw * 0.999), 10)


def _log_axis(lo: float, hi: float) -> Axis:
    first, last = math.floor(math.log10(lo) + 1e-9), math.ceil(math.log10(hi) - 1e-9)
    marks = [m * 10.0**e for e in range(first - 1, last + 2) for m in (1, 2, 5)]
    low = max(m for m in marks if m <= lo * (1 + 1e-9))
    high = min(m for m in marks if m >= hi * (1 - 1e-9) and m > low)
    ticks = [m for m in marks if low <= m <= high]
    if last - first > 2:
        stride = math.ceil((last - first) / 8)
        ticks = [10.0**e for e in range(first, last + 1, stride) if low <= 10.0**e <= high]
    return Axis(low, high, tuple(ticks), log=True)


def _tick_text(tick: float, step: float) -> str:
    if tick and (abs(tick) >= 1e7 or step < 1e-5):
        return f"{tick:.3g}"
    return f"{tick:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def number(value: float) -> str:
    """A value for people: four significant digits, thousands separated, no needless exponent."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "−∞" if value < 0 else "n/a"
    if 1e3 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def name(x: float | str) -> str:
    """An `x` as a label."""
    return x if isinstance(x, str) else number(x)


def with_interval(point: Point) -> str:
    """A point's value and its interval, as text."""
    bounds = interval(point)
    return number(point.y) + (f" [{number(bounds[0])}, {number(bounds[1])}]" if bounds else "")


def caption(chart: Chart, undrawn: int) -> str:
    """The chart's note, with a line on the points that could not be drawn."""
    missing = f"{undrawn} point{'s' if undrawn != 1 else ''} not drawn: not a finite number"
    missing += ", or not positive on a logarithmic axis" if chart.log_x or chart.log_y else ""
    return " ".join(filter(None, [chart.note, f"{missing}." if undrawn else ""]))


def listing(chart: Chart) -> Table:
    """The numbers of a chart as a table, for writers that do not draw: one row a point, the bands
    below.
    """
    points, undrawn = drawable(chart)
    several = len(chart.series) > 1
    rows = [
        [*([chart.series[i].name] if several else []), name(point.x), with_interval(point)]
        for i, series in enumerate(points)
        for point in series
    ]
    bands = "; ".join(
        f"{band.name}: {number(band.lo)} to {number(band.hi)}" for band in drawable_bands(chart)
    )
    note = " ".join(
        part for part in (f"{bands}." if bands else "", caption(chart, undrawn)) if part
    )
    columns = [*(["series"] if several else []), chart.x_label, chart.y_label]
    return Table(chart.title, columns, rows, frozenset({len(columns) - 1}), note)
