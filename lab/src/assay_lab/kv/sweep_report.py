"""The figures, tables and charts that a sweep shows."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from assay.errors import AssayError
from assay.verdict import Block, Chart, Finding, Metric, Point, Series, Severity, Table
from assay_lab.kv.choice import bytes_of, ranked


def failure(codec: str, error: AssayError) -> Finding:
    """The finding of a codec that could not be measured."""
    return Finding(
        "kv.sweep_failed",
        Severity.WARNING,
        f"{codec} could not be measured: {error.message}",
        remedies=(error.remedy,) if error.remedy else (),
    )


def not_ranked(rows: Sequence[Mapping[str, Any]], ranks: Collection[int]) -> list[Finding]:
    """The finding about rows that were cut short before bytes and KL were known."""
    names = [row["codec"] for i, row in enumerate(rows) if i not in ranks]
    if not names:
        return []
    title = f"{', '.join(names)}: cut short before its bytes and KL were known, so it is not ranked"
    return [Finding("kv.not_ranked", Severity.INFO, title, remedies=("run the same sweep again",))]


def headline_of(
    rows: Sequence[Mapping[str, Any]], winner: Mapping[str, Any] | None
) -> list[Metric]:
    """The chosen codec and the same on fresh windows, or the row of least KL."""
    if winner is None:
        if not rows:
            return []
        ranks = ranked(rows)
        if not ranks:
            return []
        least = rows[min(ranks, key=lambda i: ranks[i][::-1])]
        return [Metric("least KL", f"{least['codec']}: {_said(least)}")]
    row, again = winner["same_windows"], winner["fresh_windows"]
    found = [Metric("chosen", f"{winner['codec']}: {_said(row)}")]
    if again:
        found.append(Metric("fresh windows", _said(again)))
    if difference := winner.get("winners_curse"):
        found.append(Metric("winner's selection_bias", f"{_interval(difference, '+.2g', 'nats')}"))
    return found


UNKNOWN = "–"
"""In place of a figure that was not measured."""


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)


def _interval(figure: Mapping[str, Any], form: str, unit: str = "") -> str:
    """A value with its interval, as far as they are known."""
    value = figure["mean" if "mean" in figure else "value"]
    shown = f"{_number(value, form)} {unit}".rstrip()
    if None in (figure["lo"], figure["hi"]):
        return shown
    return f"{shown} [{figure['lo']:{form}}, {figure['hi']:{form}}]"


def _smaller(row: Mapping[str, Any]) -> str:
    return f"{row['bytes']['ratio']:.2f}×" if row["bytes"] else UNKNOWN


def _said(row: Mapping[str, Any]) -> str:
    size = f"{_smaller(row)} smaller" if row["bytes"] else "bytes not measured"
    return (
        f"{size}, KL {_number(row['kld']['mean'], '.3g')} nats, "
        f"Δppl {_interval(row['dppl_pct'], '+.2f', '%')}, {row['grade']}"
    )


def blocks_of_rows(rows: Sequence[Mapping[str, Any]], on_front: Sequence[int]) -> list[Block]:
    """The table of all rows, and their chart."""
    ranks = ranked(rows)
    ordered = sorted(range(len(rows)), key=lambda i: bytes_of(rows[i]) or math.inf)
    table = Table(
        "Codecs by stored bytes",
        ("", "codec", "smaller", "KL (nats)", "Δppl %", "top-1 %", "grade"),
        [["◆" if i in on_front else "", *_cells(rows[i])] for i in ordered],
        numeric=frozenset({2}),
        note="◆ on the Pareto front: no other is smaller without a larger KL",
    )
    if not ranks:
        return [table]
    points = {i: Point(size / 1024, kl) for i, (size, kl) in ranks.items()}
    others = [points[i] for i in points if i not in on_front]
    series = [Series("Pareto front", [points[i] for i in on_front])]
    if others:
        series.append(Series("others", others))
    chart = Chart(
        "KL against stored bytes",
        "scatter",
        series,
        x_label="stored KiB of a window's cache",
        y_label="KL (nats)",
        log_x=True,
        log_y=all(p.y > 0 for p in points.values()),
    )
    return [table, chart]


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row["codec"],
        _smaller(row),
        _interval(row["kld"], ".3g"),
        _interval(row["dppl_pct"], "+.2f"),
        _number(row["top1_pct"]["value"], ".2f"),
        row["grade"],
    ]
