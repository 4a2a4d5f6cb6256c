"""`assay table`: many comparisons as one table with intervals, from rows larger than memory."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from assay.environment import describe
from assay.errors import AssayError, UsageError
from assay.fidelity.table.rows import FORMAT, parquet_of
from assay.fidelity.table.sums import (
    KEY,
    Line,
    TableOptions,
    connect,
    lines_of,
    ppl_percent,
    write_all,
)
from assay.stats import ClusterEstimate
from assay.verdict import Metric, Report, Table, Verdict

SHOWN = 24
"""Rows on the first screen."""


def run_table(options: TableOptions) -> Report:
    """Read all rows and compare the candidates; AssayError where a file holds none, or a window
    stands in twice.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = parquet_of(options.rows, Path(folder))
        base = connect(options, folder, files)
        _no_window_twice(base)
        lines = sorted(lines_of(base, options.against), key=in_order(options.sort))
        if options.against and not any(line.candidate == options.against for line in lines):
            raise UsageError(
                f"no row is of the candidate {options.against!r}",
                finding_id="fidelity.usage",
                remedy=f"one of: {', '.join(sorted({line.candidate for line in lines})[:8])}",
            )
        count = base.execute("SELECT count(*) FROM rows").fetchone()[0]
        if options.out:
            write_all(base, options.out)
    sets = {line.windows_sha256 for line in lines}
    notes = (
        [Metric("window sets", f"{len(sets)}: figures of different sets do not compare")]
        if len(sets) > 1
        else []
    )
    return Report(
        command="table",
        verdict=Verdict.PASS,
        subject={"rows": list(options.rows), "against": options.against},
        results={"rows": [line.to_json() for line in lines], "windows": count, "format": FORMAT},
        environment=describe(),
        headline=[Metric("rows", f"{count:,} windows of {len(lines):,} candidates"), *notes],
        blocks=tables_of(lines, options),
        summary=f"{len(lines):,} candidates compared.",
    )


def _no_window_twice(base: Any) -> None:
    twice = base.execute(
        f'SELECT candidate, run FROM rows GROUP BY {", ".join(KEY)}, "window" HAVING count(*) > 1'
        " LIMIT 1"
    ).fetchone()
    if twice:
        raise AssayError(
            f"a window of {twice[0]} (run {twice[1]}) is given twice",
            finding_id="fidelity.rows",
            remedy="give the rows of each run once",
        )


def in_order(by: str) -> Any:
    """The sort key of lines by the column `by`."""

    def key(line: Line) -> tuple[Any, ...]:
        worth = {
            "kld": line.kld.value,
            "dppl": abs(line.dnll.value),
            "top1": -line.top1.value,
            "candidate": 0.0,
        }[by]
        finite = math.inf if math.isnan(worth) else worth
        return (line.windows_sha256, line.reference, finite, line.candidate, line.run)

    return key


def _cell(found: ClusterEstimate | None, digits: int, scale: Any = lambda x: x) -> str:
    if found is None:
        return ""
    value, lo, hi = (
        scale(x) if math.isfinite(x) else x
        for x in (found.value, found.interval.lo, found.interval.hi)
    )
    known = math.isfinite(lo) and math.isfinite(hi)
    return (
        f"{value:.{digits}f} [{lo:.{digits}f}, {hi:.{digits}f}]" if known else f"{value:.{digits}f}"
    )


def tables_of(lines: Sequence[Line], options: TableOptions) -> tuple[Table, ...]:
    """The first screen of lines, and the rest as a detail."""
    above = (f"KL above {options.against}",) if options.against else ()
    columns = ("candidate", "windows", "mean KL", "Δppl %", "top-1 %", *above)
    rows = [
        (
            line.candidate,
            f"{line.windows:,}",
            _cell(line.kld, 5),
            _cell(line.dnll, 2, ppl_percent),
            _cell(line.top1, 2, lambda x: 100 * x),
            *((_cell(line.paired, 5),) if above else ()),
        )
        for line in lines
    ]
    numeric = frozenset(range(1, len(columns)))
    note = (
        f"95 % intervals, clustered; {len(rows) - SHOWN:,} more with -v"
        if len(rows) > SHOWN
        else "95 % intervals, clustered"
    )
    first = Table(
        f"Candidates by {options.sort}", columns, rows[:SHOWN], numeric=numeric, note=note
    )
    if len(rows) <= SHOWN:
        return (first,)
    return (first, Table("All candidates", columns, rows, numeric=numeric, detail=True))
