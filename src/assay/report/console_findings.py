"""Findings on a terminal: the gravest last, next to the prompt; commands each on a line of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from assay.report.console_style import TONES, dim
from assay.report.text import evidence_items, is_command, one_line, split_code
from assay.report.tone import SEVERITIES, plural
from assay.verdict import Finding, Severity

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

MAX_ALIKE = 5

_ORDER = (Severity.INFO, Severity.WARNING, Severity.ERROR)


def draw(findings: Sequence[Finding], console: Console) -> Iterator[RenderableType]:
    """The findings in full; of many with one id the first `MAX_ALIKE`."""
    findings = sorted(findings, key=lambda f: _ORDER.index(f.severity))
    alike = Counter(f.id for f in findings)
    seen: Counter[str] = Counter()
    for finding in findings:
        seen[finding.id] += 1
        if seen[finding.id] <= MAX_ALIKE:
            yield ""
            yield from _finding(finding, console)
        elif seen[finding.id] == alike[finding.id]:
            more = plural(alike[finding.id] - MAX_ALIKE, "more finding")
            yield ""
            yield dim(f"{more} [{finding.id}] in the HTML report (--html FILE) and in --json.")


def _finding(finding: Finding, console: Console) -> Iterator[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    look = SEVERITIES[finding.severity]
    mark = f"{look.glyph} {look.word}" if console.is_terminal else look.word.upper()
    yield Text.assemble(
        (mark, f"bold {TONES[look.tone]}"),
        "  ",
        (one_line(finding.title), "bold"),
        (f"  [{finding.id}]", "dim"),
    )
    if finding.detail:
        yield Padding(_prose(finding.detail), (0, 0, 0, 2))
    evidence = [f"{key} {value}" for key, value in evidence_items(finding.evidence)]
    if evidence:
        yield Padding(Text.assemble(("Evidence: ", "dim"), "; ".join(evidence)), (0, 0, 0, 2))
    yield from _causes(finding)
    yield from _remedies(finding)
    for reference in finding.references:
        yield Text.assemble(("  See ", "dim"), one_line(reference), no_wrap=True)


def _causes(finding: Finding) -> Iterator[RenderableType]:
    from rich.padding import Padding

    if finding.causes:
        yield dim("  Likely causes, the likeliest first:" if len(finding.causes) > 1 else "  Likely cause:")
    for i, cause in enumerate(finding.causes, 1):
        number = f"{i}. " if len(finding.causes) > 1 else ""
        yield Padding(_prose(f"{number}{cause}"), (0, 0, 0, 4))


def _remedies(finding: Finding) -> Iterator[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    if finding.remedies:
        yield dim("  What to do:")
    for remedy in finding.remedies:
        parts = split_code(remedy)
        commands = [code for coded, code in parts if coded and is_command(code)]
        prose = "".join(part for coded, part in parts if not (coded and is_command(part))).strip()
        if prose:
            yield Padding(_prose(prose), (0, 0, 0, 4))
        for command in commands:
            # No prompt sign and no wrapping: the line is there to be copied.
            yield Text.assemble("      ", (command, "bold"), no_wrap=True)


def _prose(text: str) -> Text:
    from rich.text import Text

    return Text.assemble(*((part, "bold") if coded else part for coded, part in split_code(text)))
