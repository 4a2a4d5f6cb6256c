"""A report as an SVG picture of a terminal, for a README: rich's export, without the fonts it would
load.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from assay.report.console import Titled, comparison, renderables
from assay.verdict import Report

if TYPE_CHECKING:
    from rich.console import Console

# rich's own frame, less its font links (an SVG in a README loads nothing) and with fonts that
# readers have.
_FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: system-ui, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""  # noqa: E501


def export_svg(report: Report, width: int = 100) -> str:
    """`report` as its console output would look in a terminal of `width` columns."""
    console = _recorder(width)
    _record(console, *renderables(report, console))
    return _export(console, f"assay {report.command}")


def export_comparison_svg(reports: Titled, title: str = "assay demo", width: int = 110) -> str:
    """Several reports side by side, as `side_by_side` shows them in a terminal of `width`
    columns.
    """
    console = _recorder(width)
    _record(console, *comparison(reports, console))
    return _export(console, title)


def _recorder(width: int) -> Console:
    from rich.console import Console

    return Console(
        file=io.StringIO(), record=True, force_terminal=True, color_system="truecolor", width=width,
        highlight=False, markup=False, emoji=False, legacy_windows=False, _environ={},
    )  # fmt: skip


def _record(console: Console, *parts: object) -> None:
    for part in parts:
        console.print(part)


def _export(console: Console, title: str) -> str:
    from assay.report.text import one_line

    return console.export_svg(title=one_line(title), unique_id="assay", code_format=_FORMAT)
