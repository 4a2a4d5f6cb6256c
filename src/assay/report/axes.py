"""From numbers to positions: which points can be drawn, nice axes, and how a number is written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from assay.verdict import Band, Chart, Point, Table

ROWS = ("bar", "forest", "waterfall")
"""Kinds that have one row for each point."""

# Outside this range arithmetic on spans overflows or loses all digits; such values sit at the edge, or at zero.
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
    """The points of each series that have a place on the chart, and how many have none (NaN, infinite, ≤ 0 on a log axis)."""
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
    """Where the bar of each point begins: at zero, but in a waterfall where the change before it ended."""
    found = [[0.0] * len(series) for series in points]
    if chart.kind == "waterfall" and points:
        level = 0.0
        for k, point in enumerate(points[0]):
            found[0][k] = level
            level += _tame(point.y)
    return found


def value_axis(chart: Chart, points: Sequence[Sequence[Point]]) -> Axis:
    """The axis of `y`: holds every point, interval and band; bars on a linear axis start at zero."""
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
    """The axis with round ends that holds all finite `values` (the positive ones, on a log axis)."""
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
    """The numbers of a chart as a table, for writers that do not draw: one row a point, the bands below."""
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
    note = " ".join(part for part in (f"{bands}." if bands else "", caption(chart, undrawn)) if part)
    columns = [*(["series"] if several else []), chart.x_label, chart.y_label]
    return Table(chart.title, columns, rows, frozenset({len(columns) - 1}), note)
