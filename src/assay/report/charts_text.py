"""Charts in unicode text, for terminals and Markdown.

A drawn chart is a list of lines, a line a list of (text, role) parts; the console turns roles into colours.
Roles: `s0` … `s5` a series, `band`, `dim`, `label`, and the empty role.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.cells import cell_len, set_cell_size

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
from assay.report.text import one_line
from assay.verdict import Chart, Point

Part = tuple[str, str]
Line = list[Part]

PALETTE = 6
MAX_ROWS = 40
MIN_SPAN = 16
"""Fewest columns in which a picture still says something."""
_MARKS = "●○▲△■□"
_PLANE_ROWS = 12
# Bits of a braille cell, by column and row of its 2 × 4 dots.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def draw(chart: Chart, width: int) -> list[Line]:
    """`chart` in at most `width` columns. Where there is no room for a picture, `listing` takes its place."""
    points, _ = drawable(chart)
    if not any(points):
        return [[("nothing to draw", "dim")]]
    drawn = _rows(chart, points, width) if chart.kind in ROWS else _plane(chart, points, width)
    return [*_legend(chart, width), *drawn] if drawn else listing(chart)


def listing(chart: Chart) -> list[Line]:
    """The numbers of `chart`, one line a point."""
    points, _ = drawable(chart)
    lines: list[Line] = []
    for i, series in enumerate(points):
        for point in series:
            title = f"{one_line(chart.series[i].name)}, " if len(points) > 1 else ""
            lines.append([(f"{title}{one_line(name(point.x))}: ", "label"), (with_interval(point), role(i))])
    return _cut(lines)


def role(series: int) -> str:
    """The role of a series' marks."""
    return f"s{series % PALETTE}"


def _cut(lines: list[Line]) -> list[Line]:
    if len(lines) <= MAX_ROWS:
        return lines
    return [*lines[:MAX_ROWS], [(f"… {len(lines) - MAX_ROWS:,} more", "dim")]]


def _legend(chart: Chart, width: int) -> list[Line]:
    """The names of several series and of the bands, as many on a line as fit."""
    several = len(chart.series) > 1
    keys = [(_MARKS[i % PALETTE], role(i), s.name) for i, s in enumerate(chart.series) if several]
    keys += [("░", "band", band.name) for band in drawable_bands(chart)]
    lines: list[Line] = []
    free = 0
    for mark, mark_role, title in keys:
        text = _cropped(f" {one_line(title)}", width - 1)
        if cell_len(text) + 1 > free:
            lines.append([])
            free = width
        lines[-1] += [(mark, mark_role), (f"{text}   ", "")]
        free -= cell_len(text) + 4
    return lines


def _cropped(text: str, width: int) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, max(width - 1, 0)) + "…"


# Bars and forests: one row a point, the value axis runs to the right.


def _rows(chart: Chart, points: Sequence[Sequence[Point]], width: int) -> list[Line]:
    axis = value_axis(chart, points)
    begins = starts(chart, points)
    found = [
        {p.x: (p, b) for p, b in zip(reversed(series), reversed(begins[i]), strict=True)}
        for i, series in enumerate(points)
    ]
    rows = [(x, i, *by_x[x]) for x in categories(points) for i, by_x in enumerate(found) if x in by_x]
    labels = {x: one_line(name(x)) for x, _, _, _ in rows}
    values = {id(p): with_interval(p) for _, _, p, _ in rows}
    label_width = min(max(cell_len(label) for label in labels.values()), width // 3)
    value_width = max(map(len, values.values()))
    span = width - label_width - value_width - 4
    if span < MIN_SPAN:
        return []
    bands = _band_cells(chart, axis, span)
    lines: list[Line] = []
    shown: float | str | None = None
    for x, i, point, begin in rows:
        label = set_cell_size("" if x == shown else labels[x], label_width)
        cells = (
            _whisker(point, axis, span, _MARKS[i % PALETTE])
            if chart.kind == "forest"
            else _bar(point, begin, axis, span)
        )
        parts = [
            (c, role(i)) if c != " " else ("░", "band") if k in bands else (" ", "")
            for k, c in enumerate(cells)
        ]
        lines.append([(f"{label}  ", "label"), *_joined(parts), (f"  {values[id(point)]}", "")])
        shown = x
    return [*_cut(lines), *_axis_lines(axis, span, label_width + 2, one_line(chart.y_label))]


def _bar(point: Point, begin: float, axis: Axis, span: int) -> str:
    low, high = sorted((axis.at(begin), axis.at(begin + point.y)))
    first, last = round(low * span * 2), round(high * span * 2)
    halves = [first <= k < last for k in range(span * 2)]
    return "".join(" ▐▌█"[2 * left + right] for left, right in zip(halves[::2], halves[1::2], strict=True))


def _whisker(point: Point, axis: Axis, span: int, mark: str) -> str:
    cells = [" "] * span
    bounds = interval(point)
    if bounds:
        first, last = (_cell(axis, v, span) for v in bounds)
        cells[first : last + 1] = "─" * (last - first + 1)
        if last > first:
            cells[first], cells[last] = "├", "┤"
    cells[_cell(axis, point.y, span)] = mark
    return "".join(cells)


def _cell(axis: Axis, value: float, span: int) -> int:
    return min(int(axis.at(value) * span), span - 1)


def _band_cells(chart: Chart, axis: Axis, span: int) -> frozenset[int]:
    ends = [sorted((_cell(axis, b.lo, span), _cell(axis, b.hi, span))) for b in drawable_bands(chart)]
    return frozenset(k for lo, hi in ends for k in range(lo, hi + 1))


def _joined(parts: Sequence[Part]) -> Iterator[Part]:
    """Neighbours of one role become one part."""
    text, current = "", None
    for char, char_role in parts:
        if char_role != current and text:
            yield text, current or ""
            text = ""
        text, current = text + char, char_role
    if text:
        yield text, current or ""


def _axis_lines(axis: Axis, span: int, indent: int, label: str) -> list[Line]:
    """The ticks under a chart: their labels where they fit beside each other, then the axis label."""
    rule, text = ["─"] * span, [" "] * (span + 1)
    free = 0
    for tick in axis.ticks:
        at = _cell(axis, tick, span)
        rule[at] = "┴"
        written = axis.label(tick)
        start = max(0, min(at - len(written) // 2, span + 1 - len(written)))
        if start >= free and start + len(written) <= span + 1:
            text[start : start + len(written)] = written
            free = start + len(written) + 2
    pad = " " * indent
    lines: list[Line] = [[(pad + "".join(rule), "dim")], [(pad + "".join(text).rstrip(), "dim")]]
    return [*lines, [(pad + _cropped(label, span), "dim")]] if label else lines


# Lines and scatters: a plane of cells.


def _plane(chart: Chart, points: Sequence[Sequence[Point]], width: int) -> list[Line]:
    axis = value_axis(chart, points)
    names = categories(points)
    numeric = are_numbers(points)
    x_axis = fit((x for x in names if not isinstance(x, str)), log=chart.log_x) if numeric else None
    margin = max(len(axis.label(t)) for t in axis.ticks) + 1
    span = width - margin - 2
    if span < MIN_SPAN:
        return []
    places = {x: k for k, x in enumerate(names)}

    def across(point: Point) -> float:
        if x_axis is not None and not isinstance(point.x, str):
            return x_axis.at(point.x)
        return (places[point.x] + 0.5) / len(names)

    located = [[(across(p), axis.at(p.y)) for p in series] for series in points]
    if len([s for s in located if s]) == 1:
        only = next(i for i, s in enumerate(located) if s)
        cells = _braille(located[only], span, chart.kind == "line", role(only))
    else:
        cells = _marked(located, span, chart.kind == "line")
    _shade(cells, chart, axis, span)
    lines = _with_scale(cells, axis, margin, _cropped(one_line(chart.y_label), span))
    if x_axis is not None:
        return lines + _axis_lines(x_axis, span, margin + 1, one_line(chart.x_label))
    ends = (
        f"{one_line(name(names[0]))} … {one_line(name(names[-1]))}"
        if len(names) > 1
        else one_line(name(names[0]))
    )
    label = f"{one_line(chart.x_label)}: {ends}" if chart.x_label else ends
    return [*lines, [(" " * (margin + 1) + _cropped(label, span), "dim")]]


Grid = dict[tuple[int, int], Part]
Located = Sequence[tuple[float, float]]


def _braille(located: Located, span: int, joined: bool, colour: str) -> Grid:
    dots: dict[tuple[int, int], int] = {}
    for x, y in _traced(located, span * 2, _PLANE_ROWS * 4) if joined else located:
        column = min(int(x * span * 2), span * 2 - 1)
        row = min(int((1 - y) * _PLANE_ROWS * 4), _PLANE_ROWS * 4 - 1)
        cell = (row // 4, column // 2)
        dots[cell] = dots.get(cell, 0) | _DOTS[column % 2][row % 4]
    return {cell: (chr(0x2800 + bits), colour) for cell, bits in dots.items()}


def _marked(located: Sequence[Located], span: int, joined: bool) -> Grid:
    cells: Grid = {}
    for i, series in enumerate(located):
        for path, mark in (
            (_traced(series, span, _PLANE_ROWS) if joined else (), "·"),
            (series, _MARKS[i % PALETTE]),
        ):
            for x, y in path:
                place = (min(int((1 - y) * _PLANE_ROWS), _PLANE_ROWS - 1), min(int(x * span), span - 1))
                if mark != "·" or place not in cells:
                    cells[place] = (mark, role(i))
    return cells


def _traced(located: Located, columns: int, rows: int) -> Iterator[tuple[float, float]]:
    """The points and, between them, one place for every cell that the line crosses."""
    ordered = sorted(located)
    yield from ordered[:1]
    for (x0, y0), (x1, y1) in pairwise(ordered):
        steps = 2 * max(round(abs(x1 - x0) * columns), round(abs(y1 - y0) * rows), 1)
        for k in range(1, steps + 1):
            yield x0 + (x1 - x0) * k / steps, y0 + (y1 - y0) * k / steps


def _shade(cells: Grid, chart: Chart, axis: Axis, span: int) -> None:
    for row in _band_cells(chart, axis, _PLANE_ROWS):
        for column in range(span):
            cells.setdefault((_PLANE_ROWS - 1 - row, column), ("░", "band"))


def _with_scale(cells: Grid, axis: Axis, margin: int, label: str) -> list[Line]:
    width = max(column for _, column in cells) + 1
    ticks = {_PLANE_ROWS - 1 - _cell(axis, t, _PLANE_ROWS): axis.label(t) for t in axis.ticks}
    lines: list[Line] = [[(" " * (margin + 1) + label, "dim")]] if label else []
    for row in range(_PLANE_ROWS):
        edge = "┤" if row in ticks else "│"
        parts = [cells.get((row, column), (" ", "")) for column in range(width)]
        lines.append([(f"{ticks.get(row, ''):>{margin}}{edge}", "dim"), *_joined(parts)])
    return lines
