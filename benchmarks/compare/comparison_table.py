"""The table of rows that `assay compare` measured, with intervals: what every comparison benchmark
draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Row = tuple[str, float | None, Mapping[str, Any]]
"""A name, bytes (None: not told) and the results of one candidate."""


def interval(estimate: Mapping[str, float], form: str, value: str = "value") -> str:
    """`+0.11 [+0.08, +0.14]`."""
    return f"{estimate[value]:{form}} [{estimate['lo']:{form}}, {estimate['hi']:{form}}]"


def sizes(rows: Iterable[Mapping[str, Any]]) -> str:
    """How much was scored, and what the intervals are; rows of other sizes are all named."""
    found = sorted({(r["windows"], r["tokens"]) for r in rows})
    said = (
        "; ".join(f"{windows} windows, {tokens:,} tokens" for windows, tokens in found)
        or "nothing yet"
    )
    return f"{said}; intervals are two-sided 95 %, by window."


def comparison_table(rows: Iterable[Row], first: str = "candidate") -> list[str]:
    """Lines of a Markdown table; `first` heads the names. There is a column of MiB where a row
    tells its bytes.
    """
    rows = list(rows)
    sized = any(size is not None for _, size, _ in rows)
    head, rule = (" MiB |", "---:|") if sized else ("", "")
    lines = [
        f"| {first} |{head} Δppl % | KL, nats | top-1 % | grade |",
        f"|---|{rule}---|---|---|---|",
    ]
    for name, size, r in rows:
        mib = "" if not sized else f" {'–' if size is None else format(size / 2**20, '.1f')} |"
        lines.append(
            f"| {name} |{mib} {interval(r['dppl_pct'], '+.2f')} |"
            f" {interval(r['kld'], '.5f', 'mean')} | {interval(r['top1_pct'], '.2f')} |"
            f" {r['grade']} |"
        )
    return lines
