"""Charts as static inline SVG: no script, no external file, colours from the page's style sheet.

Marks carry classes (`s0` … `s5`, `band`, `grid`, `axis`, `label`); series differ in shape and dash as well as in
colour, and every picture has a title and a description for those who cannot see it.
"""

from __future__ import annotations

from collections.abc import Sequence

from assay.report import svg_plane, svg_rows
from assay.report.scale import ROWS, drawable, drawable_bands
from assay.report.svg_parts import CHAR, WIDTH, label, mark, tag, text
from assay.verdict import Chart, Point

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
    body, height = (svg_rows if chart.kind in ROWS else svg_plane).draw(chart, points, top)
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
        return max(0, total - svg_rows.MAX_ROWS)
    return total - sum(len(svg_plane.sample(series)) for series in points)


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
