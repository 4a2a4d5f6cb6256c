"""A report as GitHub-flavoured Markdown that is safe to paste into an issue.

Model text stands in a fence longer than any inside it; everywhere else the characters that
Markdown, HTML and GitHub act on (tables, emphasis, tags, links, @mentions, #references) are made
inert.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from assay.report.svg import listing
from assay.report.text import (
    VERDICTS,
    evidence_items,
    excerpt,
    is_command,
    one_line,
    plural,
    sentence,
    shorten,
    split_code,
    subject_items,
)
from assay.verdict import Block, Chart, Finding, Metric, Quote, Report, Severity, Table

HEAD = 600
AROUND = 200
MAX_ROWS = 100
MAX_QUOTES = 20
_MAX_PROSE = 4_000

_GROUPS = ((Severity.ERROR, "Errors"), (Severity.WARNING, "Warnings"), (Severity.INFO, "Notes"))
# Characters that act anywhere, an underscore at the edge of a word, and what acts at the start of a
# line.
_SPECIAL = re.compile(r"([\\`*\[\]<>#|~$&]|(?<!\w)_|_(?!\w)|^[+=-]|(?<=^\d)[.)]|(?<=^\d\d)[.)])")
# A zero-width space after the sign: the text reads the same and no longer names anybody or
# anything.
_SUMMONS = re.compile(r"(@|GH-|https?:|www\.)(?=\S)", re.IGNORECASE)
_URL = re.compile(r"https?://[^\s<>()\[\]`|\\]+")


def render(report: Report) -> str:
    """`report` as one Markdown document."""
    look = VERDICTS[report.verdict]
    parts = [f"## {look.glyph} assay {prose(report.command)}: {look.word}", prose(sentence(report))]
    subject = [f"- {prose(key)}: {code(value)}" for key, value in subject_items(report.subject)]
    parts.append("\n".join(subject))
    if report.headline:
        parts.append(_headline(report.headline))
    for severity, title in _GROUPS:
        found = [f for f in report.findings if f.severity is severity]
        if found:
            parts += [f"### {title}", *map(_finding, found)]
    parts += _blocks(report.blocks)
    return "\n\n".join(filter(None, parts)) + "\n"


def prose(text: str) -> str:
    """Any text as inert Markdown on one line."""
    escaped = _SPECIAL.sub(r"\\\1", _SUMMONS.sub("\\1\u200b", shorten(one_line(text), _MAX_PROSE)))
    # GitHub links "#12" even where the sign is escaped.
    return escaped.replace("\\#", "\\#\u200b")


def code(text: str) -> str:
    """Any text as a code span: the ticks around it are more than any run of ticks inside."""
    text = shorten(one_line(text), _MAX_PROSE) or " "
    ticks = "`" * (_longest_run(text) + 1)
    pad = " " if text.startswith(("`", " ")) or text.endswith(("`", " ")) else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def fence(text: str) -> str:
    """Any text as a fenced block: the fence is longer than any run of ticks inside."""
    ticks = "`" * max(3, _longest_run(text) + 1)
    return f"{ticks}text\n{text}\n{ticks}"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def _cell(text: str) -> str:
    return prose(text) or " "


def _rows(
    columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: frozenset[int] = frozenset()
) -> str:
    rule = ["--:" if i in numeric else "---" for i in range(len(columns))]
    lines = [columns, rule, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _headline(metrics: Sequence[Metric]) -> str:
    rows = []
    for metric in metrics:
        value, note = _cell(metric.text), prose(metric.note)
        if not metric.valid:
            value, note = f"~~{value}~~", f"**invalid**: {note}" if note else "**invalid**"
        rows.append([_cell(metric.name), value, note])
    return _rows(["figure", "value", "note"], rows)


def _finding(finding: Finding) -> str:
    parts = [
        f"#### {prose(finding.title)}",
        f"{code(finding.id)} {_marked(finding.detail)}".rstrip(),
    ]
    parts.append(
        "\n".join(
            f"- {prose(key)}: {code(value)}" for key, value in evidence_items(finding.evidence)
        )
    )
    if finding.causes:
        causes = "\n".join(f"{i}. {_marked(cause)}" for i, cause in enumerate(finding.causes, 1))
        parts.append(f"Likely causes, the likeliest first:\n\n{causes}")
    if finding.remedies:
        parts.append("What to do:")
        parts += [_remedy(remedy) for remedy in finding.remedies]
    if finding.references:
        parts.append(f"See {', '.join(map(_reference, finding.references))}")
    return "\n\n".join(filter(None, parts))


def _marked(text: str) -> str:
    """Prose whose code spans stay code."""
    return "".join(
        code(part) if coded else prose(part) if part.strip() else part
        for coded, part in _spaced(text)
    )


def _spaced(text: str) -> Iterator[tuple[bool, str]]:
    """The parts of `text`; `prose` strips the ends of a part, so spaces next to code become parts
    of their own.
    """
    for coded, part in split_code(text):
        if coded:
            yield coded, part
            continue
        yield from ((False, piece) for piece in re.split(r"(^ +| +$)", part) if piece)


def _remedy(remedy: str) -> str:
    """A remedy; its commands in blocks of their own, to be copied."""
    parts = split_code(remedy)
    commands = [part for coded, part in parts if coded and is_command(part)]
    words = "".join(
        part if not coded else f"`{part}`" for coded, part in parts if part not in commands
    ).strip()
    return "\n\n".join([*([_marked(words)] if words else []), *map(fence, commands)])


def _reference(text: str) -> str:
    line = one_line(text)
    return f"<{line}>" if _URL.fullmatch(line) else prose(line)


def _blocks(blocks: Sequence[Block]) -> Iterator[str]:
    quotes = 0
    for block in blocks:
        if isinstance(block, Table):
            yield from _table(block)
        elif isinstance(block, Chart):
            yield from _table(listing(block))
        else:
            quotes += 1
            if quotes <= MAX_QUOTES:
                yield from _quote(block)
    if quotes > MAX_QUOTES:
        yield f"{plural(quotes - MAX_QUOTES, 'more text')} not shown."


def _table(table: Table) -> Iterator[str]:
    yield f"### {prose(table.title)}"
    width = len(table.columns)
    rows = [[_cell(str(cell)) for cell in row][:width] for row in table.rows[:MAX_ROWS]]
    if width:
        yield _rows([_cell(column) for column in table.columns], rows, table.numeric)
    if len(table.rows) > MAX_ROWS:
        yield f"{plural(len(table.rows) - MAX_ROWS, 'more row')} not shown."
    yield prose(table.note)


def _quote(quote: Quote) -> Iterator[str]:
    status = f" ({prose(quote.status)})" if quote.status else ""
    yield f"### {prose(quote.title)}{status}"
    yield prose(quote.note)
    pieces = excerpt(quote, HEAD, AROUND)
    shown = "".join(f"⟦{p.text}⟧" if p.kind in ("onset", "gap") else p.text for p in pieces)
    yield fence(shown) if shown else "*(no text)*"
