"""Tables and charts of a judged source; the table that decides comes first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from assay.speculation.benefit import Benefit
from assay.speculation.health import WORTH
from assay.speculation.judged import Judged
from assay.speculation.observation import Observation
from assay.speculation.rate import Rate, proportion
from assay.verdict import Band, Block, Chart, Point, Series, Table

PROSE = Band("usual for prose", 0.4, 0.7)
"""The band of acceptance that the field quotes, as context (dense code: 0.2 to 0.5); nothing is
judged by it.
"""

_POINTS = 120

_ENGINES = 6


def blocks(judged: Judged) -> list[Block]:
    """Tables and charts, where there is something to show."""
    bad = judged.assessment.health.bad
    tables = [_baseline(judged), _positions(judged), _engines(judged), _implementations(judged)]
    if judged.assessment.dead_engines:
        tables.insert(0, tables.pop(2))
    charts = [
        _position_chart(judged),
        _over_time(judged),
        _multiplier_chart(judged.benefit) if judged.benefit and not bad else None,
    ]
    return [b for b in (*tables, *charts) if b is not None]


def _positions(judged: Judged) -> Table | None:
    a = judged.assessment
    rows = []
    before: int | None = None
    for i, ((accepted, drafts), rate) in enumerate(
        zip(judged.record.positions or (), a.positions, strict=False)
    ):
        given = "" if not before else f"{100 * min(1.0, accepted / before):.1f} %"
        rows.append((str(i), f"{accepted:,}", f"{drafts:,}", rate.percent(), given))
        before = accepted
    columns = ("position", "accepted", "drafts", "rate [95 %]", "given the one before")
    note = "" if a.design_effect == 1 else f"design effect {a.design_effect:.1f}"
    return Table("Draft positions", columns, rows, frozenset(range(5)), note=note) if rows else None


def _position_chart(judged: Judged) -> Chart | None:
    rates = judged.assessment.positions
    points = [Point(f"position {i}", r.value, r.lo, r.hi) for i, r in enumerate(rates)]
    series = [Series("acceptance", points)]
    return (
        Chart("Acceptance per draft position", "bar", series, "", "rate")
        if len(rates) > 1
        else None
    )


def _over_time(judged: Judged) -> Chart | None:
    """Acceptance over the run: each engine of several, or position 0 and everything of one."""
    counted = [
        w for w in judged.evidence.windows if w.counts.drafted and w.counts.accepted is not None
    ]
    engines = list(dict.fromkeys(w.replica for w in counted))
    if 1 < len(engines) <= _ENGINES:
        series = [
            _series(f"engine {e}", [w for w in counted if w.replica == e], _pooled) for e in engines
        ]
    else:
        series = [_series("all draft tokens", counted, _pooled)]
        if all(w.counts.at_position and w.counts.drafts for w in counted):
            series.insert(0, _series("position 0", counted, _first))
    if max((len(s.points) for s in series), default=0) < 2:
        return None
    first, last = counted[0].time, counted[-1].time
    note = f"{first} to {last}" if first and last else ""
    return Chart("Acceptance over time", "line", series, "window", "rate", [PROSE], note=note)


def _series(
    name: str, windows: Sequence[Observation], rate: Callable[[Sequence[Observation]], Rate]
) -> Series:
    """The rate in each window; long runs are summed into at most 120 points."""
    size = max(1, -(-len(windows) // _POINTS))
    points = []
    for start in range(0, len(windows), size):
        own = rate(windows[start : start + size])
        points.append(Point(float(1 + start), own.value, own.lo, own.hi))
    return Series(name, points)


def _pooled(group: Sequence[Observation]) -> Rate:
    return proportion(
        sum(w.counts.accepted or 0 for w in group), sum(w.counts.drafted or 0 for w in group)
    )


def _first(group: Sequence[Observation]) -> Rate:
    return proportion(
        sum((w.counts.at_position or (0,))[0] for w in group),
        sum(w.counts.drafts or 0 for w in group),
    )


def _multiplier_chart(b: Benefit) -> Chart:
    known = max(b.measured_depth, b.depth or 0)
    points = [Point(float(n), m) for n, m in enumerate(b.multipliers[: known + 4], 1)]
    series = [Series("measured positions", points[:known])]
    if known < len(points):
        series.append(Series("extrapolated", points[known - 1 :]))
    bands = [Band("costs more than it earns", 0.0, 1.0), Band("hardly worth it", 1.0, WORTH)]
    note = f"a draft token costs {b.cost} target steps ({b.cost.source})"
    title = "Predicted net multiplier"
    return Chart(title, "line", series, "speculative tokens", "times as fast", bands, note=note)


def _engines(judged: Judged) -> Table | None:
    rows = []
    for name, a in judged.assessment.per_engine.items():
        record = judged.evidence.per_engine[name]
        length = "" if record.tokens_per_step is None else f"{record.tokens_per_step:.2f}"
        counts = f"{_count(record.counts.accepted)} / {_count(record.counts.drafted)}"
        rows.append((name, a.health.value, counts, a.rate.percent() if a.rate else "", length))
    columns = ("engine", "health", "accepted / drafted", "judged rate [95 %]", "tokens per step")
    return Table("Engines", columns, rows, frozenset({2, 3, 4})) if rows else None


def _implementations(judged: Judged) -> Table | None:
    rows = []
    for name, c in judged.record.methods.items():
        rate = proportion(c.accepted or 0, c.drafted).percent() if c.drafted else ""
        rows.append((name, _count(c.drafts), _count(c.drafted), _count(c.accepted), rate))
    columns = ("method", "drafts", "drafted", "accepted", "acceptance [95 %]")
    note = "lifetime statistics; not added to the request lines"
    title = "Drafting methods since start"
    return Table(title, columns, rows, frozenset({1, 2, 3, 4}), note=note) if rows else None


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _baseline(judged: Judged) -> Table | None:
    c = judged.comparison
    if c is None:
        return None
    rows = []
    if c.acceptance is not None:
        rows.append(("all draft tokens", _points(c.acceptance)))
    rows += [(f"position {i}", _points(d)) for i, d in enumerate(c.per_position)]
    if c.tokens_per_step is not None:
        rows.append(
            ("tokens per step", f"{c.tokens_per_step[0]:.2f} against {c.tokens_per_step[1]:.2f}")
        )
    if c.speeds is not None:
        rows.append(("tokens per second", f"{c.speeds[0]:.1f} against {c.speeds[1]:.1f}"))
    return Table(
        "Against the baseline", ("", "difference [95 %]"), rows, frozenset({1}), note=c.reading
    )


def _points(difference: Rate) -> str:
    return (
        f"{100 * difference.value:+.1f} points [{100 * difference.lo:+.1f},"
        f" {100 * difference.hi:+.1f}]"
    )
