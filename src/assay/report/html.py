"""A report as one HTML file: styles and charts inline, nothing loaded, nothing scripted.

Every value passes jinja2's autoescape; the only markup let through is the SVG of `svg`, which
escapes its own text. The page also forbids scripts and loads by its content security policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.report import svg
from assay.report.svg import caption, drawable, name, with_interval
from assay.report.text import (
    SEVERITIES,
    VERDICTS,
    evidence_items,
    excerpt,
    is_command,
    one_line,
    plural,
    safe_json,
    sentence,
    split_code,
    split_fences,
    status_tone,
    subject_items,
    visible,
)
from assay.verdict import SCHEMA, Block, Chart, Quote, Report, Severity, Table

if TYPE_CHECKING:
    from jinja2 import Template

HEAD = 12_000
AROUND = 4_000
MAX_ROWS = 2_000
MAX_LISTED = 300

_GROUPS = ((Severity.ERROR, "Errors"), (Severity.WARNING, "Warnings"), (Severity.INFO, "Notes"))


def render(report: Report) -> str:
    """The page of `report`."""
    blocks = [_block(block, i) for i, block in enumerate(_once(report.blocks))]
    return _template().render(
        report=report,
        look=VERDICTS[report.verdict],
        sentence=sentence(report),
        subject=[*subject_items(report.subject), *_engine(report.subject)],
        whole=report.subject
        if any(isinstance(v, Mapping) for v in report.subject.values())
        else {},
        groups=[
            (title, SEVERITIES[severity], found)
            for severity, title in _GROUPS
            if (found := [f for f in report.findings if f.severity is severity])
        ],
        blocks=blocks,
        schema=SCHEMA,
        json=safe_json(report.to_json()),
    )


def _once(blocks: Sequence[Block]) -> list[Block]:
    """Blocks without a short table that the next one shows in full: a page has room for it."""
    following = [*blocks[1:], None]
    return [
        block
        for block, after in zip(blocks, following, strict=False)
        if not (
            isinstance(block, Table)
            and isinstance(after, Table)
            and after.detail
            and not block.detail
            and after.columns == block.columns
        )
    ]


def _engine(subject: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The engine and its version, where a nested part of the subject names both."""
    for part in subject.values():
        if isinstance(part, Mapping) and part.get("version"):
            kind = part.get("kind") or part.get("engine") or ""
            return [("engine", one_line(f"{kind} {part['version']}".strip()))]
    return []


@cache
def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        line=one_line,
        items=evidence_items,
        code=split_code,
        fences=split_fences,
        command=is_command,
        tone=status_tone,
        plural=plural,
    )
    return environment.get_template("report.html.j2")


def _block(block: Block, index: int) -> dict[str, Any]:
    if isinstance(block, Table):
        return _table(block)
    return _chart(block, f"c{index}") if isinstance(block, Chart) else _quote(block)


def _table(table: Table) -> dict[str, Any]:
    width = len(table.columns)
    rows = [[one_line(str(cell)) for cell in row][:width] for row in table.rows[:MAX_ROWS]]
    return {"kind": "table", "table": table, "rows": rows, "left_out": len(table.rows) - len(rows)}


def _chart(chart: Chart, identifier: str) -> dict[str, Any]:
    from markupsafe import Markup

    points, undrawn = drawable(chart)
    listed = [
        (one_line(series.name), one_line(name(point.x)), with_interval(point))
        for series, kept in zip(chart.series, points, strict=True)
        for point in kept
    ]
    thinned = svg.thinned(chart)
    notes = [
        caption(chart, undrawn),
        f"{plural(thinned, 'further point')} not drawn: too many." if thinned else "",
    ]
    return {
        "kind": "chart",
        "chart": chart,
        "svg": Markup(svg.draw(chart, identifier)),
        "note": " ".join(filter(None, map(one_line, notes))),
        "listed": listed[:MAX_LISTED],
        "left_out": max(0, len(listed) - MAX_LISTED),
    }


def _quote(quote: Quote) -> dict[str, Any]:
    return {
        "kind": "quote",
        "quote": quote,
        "pieces": excerpt(quote, HEAD, AROUND),
        "length": len(visible(quote.text)),
    }
