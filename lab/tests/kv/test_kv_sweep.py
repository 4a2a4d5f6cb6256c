"""Fronts, choices, rows that are kept, and codecs fitted by other processes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.errors import AssayError, UsageError
from assay.report import console
from assay.verdict import Report
from assay_lab.kv import choice, sweep_report
from assay_lab.kv.choice import choose, pareto_front, selection_bias
from assay_lab.kv.sweep import identity, specs_in
from assay_lab.options import SweepPlan

points = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12)


@given(points)
def test_the_front_is_what_nothing_beats(values: list[tuple[int, int]]) -> None:
    found = pareto_front(values)

    def beats(a: tuple[int, int], b: tuple[int, int]) -> bool:
        return a != b and a[0] <= b[0] and a[1] <= b[1]

    kept = {values[i] for i in found}
    assert len(kept) == len(found)
    assert kept == {p for p in values if not any(beats(q, p) for q in values)}
    assert [values[i][0] for i in found] == sorted(values[i][0] for i in found)


def row(grade: str, stored: float, kl: float) -> dict[str, Any]:
    return {"grade": grade, "bytes": {"stored": stored}, "kld": {"mean": kl}}


def test_the_smallest_of_the_best_grade_is_chosen() -> None:
    rows = [
        row("REJECT", 1, 9),
        row("ACCEPT", 5, 0.1),
        row("ACCEPT", 4, 0.2),
        row("MARGINAL", 2, 0.5),
    ]
    assert choose(rows) == 2
    assert choose([rows[0], rows[3]]) == 1
    assert choose([row("REJECT", 1, 9), row("INCONCLUSIVE", 7, 3)]) is None


def figure(draw: st.DrawFn, *names: str) -> dict[str, float | None]:
    return {name: draw(st.none() | st.floats(1e-4, 9)) for name in names}


@st.composite
def any_row(draw: st.DrawFn) -> dict[str, Any]:
    """A row of a sweep in which any figure may be missing."""
    size = draw(st.none() | st.just({"stored": 1000, "ratio": 2.5}))
    return {
        "codec": draw(st.sampled_from(["fp8", "int(bits=4)"])),
        "grade": draw(st.sampled_from(["ACCEPT", "MARGINAL", "REJECT", "INCONCLUSIVE"])),
        "bytes": size,
        "kld": figure(draw, "mean", "lo", "hi"),
        "kld_se": draw(st.none() | st.just(0.01)),
        "dppl_pct": figure(draw, "value", "lo", "hi"),
        "top1_pct": figure(draw, "value", "lo", "hi"),
        "windows": draw(st.integers(1, 9)),
        "score_s": 0.0,
    }


@given(st.lists(any_row(), min_size=0, max_size=4), st.none() | any_row())
def test_rows_without_a_figure_are_shown_and_not_ranked(
    rows: list[dict[str, Any]], again: dict[str, Any] | None
) -> None:
    report = report_of(rows, again)
    shown = report_text(report)
    assert "None" not in shown.replace("None of the", "") and "nan" not in shown.split()
    assert all(row["codec"] in shown for row in rows)
    assert report.to_html() and json.dumps(report.to_json(), allow_nan=False)
    chosen = choose(rows)
    assert chosen is None or (rows[chosen]["bytes"] and rows[chosen]["kld"]["mean"] is not None)


def report_of(rows: list[dict[str, Any]], again: dict[str, Any] | None) -> Report:
    """The parts of a sweep's report that are made from its rows."""
    ranks = choice.ranked(rows)
    front = [list(ranks)[i] for i in pareto_front(list(ranks.values()))]
    chosen = choose(rows)
    winner = None if chosen is None else choice.winner_of(rows[chosen], again)
    verdict, findings = choice.judged(rows, winner)
    return Report(
        "kv sweep",
        verdict,
        findings=[*findings, *sweep_report.not_ranked(rows, ranks)],
        results={"rows": rows, "winner": winner},
        headline=sweep_report.headline_of(rows, winner),
        blocks=sweep_report.blocks_of_rows(rows, front) if rows else [],
    )


def report_text(report: Report) -> str:
    out = io.StringIO()
    console.print_report(report, file=out, verbose=True)
    return out.getvalue()


def test_the_winners_curse_has_the_error_of_both_measurements() -> None:
    found = selection_bias((0.010, 0.0003), (0.012, 0.0004))
    assert found["value"] == pytest.approx(0.002)
    assert found["hi"] - found["lo"] == pytest.approx(2 * 1.959964 * 0.0005)


def test_specs_come_from_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "specs.txt"
    path.write_text("fp8\n\n# a comment\n  hadamard(bits=4)  \n")
    assert specs_in(path) == ("fp8", "hadamard(bits=4)")
    with pytest.raises(UsageError, match="none"):
        specs_in(tmp_path / "none.txt")


def test_wrong_requests_are_refused() -> None:
    for wrong in ({"codecs": ()}, {"mode": "x"}, {"streams": "q"}):
        with pytest.raises(UsageError):
            SweepPlan(**{"model": "m", "codecs": ("fp8",), **wrong})


def test_rows_belong_to_windows_and_tables(tmp_path: Path) -> None:
    tables = tmp_path / "c"
    tables.write_bytes(b"1")
    plan = SweepPlan("m", codecs=("fp8",), calibration=str(tables))
    first = identity(plan, ["a", "b"])
    assert first == identity(plan, ["a", "b"]) != identity(plan, ["a", "c"])
    tables.write_bytes(b"2")
    assert identity(plan, ["a", "b"]) != first
    assert identity(SweepPlan("m", codecs=("fp8", "bf16")), []) == identity(
        SweepPlan("m", codecs=("fp8",)), []
    )


@pytest.mark.slow
def test_other_processes_fit_the_same_coders() -> None:
    torch = pytest.importorskip("torch")
    from assay_lab.kv.cache_shape import CacheShape
    from assay_lab.kv.fitters import fitters
    from assay_lab.kv.layer_coders import LayerCoders
    from assay_lab.kv.spec import parse_spec

    layer_coders = LayerCoders(CacheShape(3, 2, 4, 16, (None,) * 3, "M"))
    x = torch.randn(2, 20, 16)
    with fitters(layer_coders, 2) as pool:
        coders = pool.fit(parse_spec("k:hadamard(bits=3)"), [0, 2])
        assert set(coders.by_stream) == {(0, "k"), (2, "k")}
        alone = layer_coders.fit(parse_spec("k:hadamard(bits=3)").k, 2, "k")  # type: ignore[arg-type]
        assert coders.by_stream[2, "k"].encode(x) == alone.encode(x)
        with pytest.raises(AssayError, match="calibration") as caught:
            pool.fit(parse_spec("mean+fp8"), [0])
        assert caught.value.finding_id == "kv.no_calibration"
