"""Two reports of one verb side by side: what is worse, better, or only other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import assay
from assay.cli.main import invoke
from assay.errors import AssayError
from assay.report.side_by_side import diff
from assay.verdict import Report, Verdict


def write(path: Path, **changes: Any) -> Path:
    value = {
        "schema": "assay/1",
        "command": "compare",
        "verdict": "pass",
        "exit_code": 0,
        "subject": {"candidate": "hf:int8"},
        "findings": [],
        "results": {"kld": {"mean": 0.004, "lo": 0.003, "hi": 0.005}, "windows": 64},
        "environment": {},
    }
    path.write_text(json.dumps(value | changes))
    return path


def compared(tmp_path: Path, before: dict[str, Any], after: dict[str, Any]) -> Report:
    return diff(write(tmp_path / "a.json", **before), write(tmp_path / "b.json", **after))


def finding(name: str, severity: str = "error") -> dict[str, str]:
    return {"id": name, "severity": severity, "title": f"{name} is wrong"}


def test_a_report_beside_itself_has_nothing_worse(tmp_path: Path) -> None:
    report = compared(tmp_path, {}, {})
    assert (report.verdict, report.exit_code, list(report.findings)) == (Verdict.PASS, 0, [])
    assert report.results["figures"] == [] and report.results["figures_same"] == 2


def test_a_worse_verdict_and_new_findings_fail(tmp_path: Path) -> None:
    after = {"verdict": "fail", "findings": [finding("fidelity.reject")]}
    report = compared(tmp_path, {}, after)
    assert report.exit_code == 1
    assert [f.id for f in report.findings] == ["diff.verdict_worse", "diff.finding_new"]
    assert report.results["verdict"] == {"before": "pass", "after": "fail", "change": "worse"}
    turned = compared(tmp_path, after, {})
    assert turned.exit_code == 0
    assert {f.id for f in turned.findings} == {"diff.verdict_better", "diff.finding_gone"}
    assert "gone: fidelity.reject is wrong" in [f.title for f in turned.findings]


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ("warning", "error", 1),
        ("error", "warning", 0),
        ("warning", "warning", 0),
        ("info", "warning", 1),
    ],
)
def test_a_finding_that_became_graver(tmp_path: Path, before: str, after: str, code: int) -> None:
    one, two = ({"findings": [finding("server.slow", s)]} for s in (before, after))
    assert compared(tmp_path, one, two).exit_code == code


@pytest.mark.parametrize(
    ("name", "before", "after", "change"),
    [
        ("kld", (0.004, 0.003, 0.005), (0.009, 0.008, 0.010), "worse"),
        ("kld", (0.009, 0.008, 0.010), (0.004, 0.003, 0.005), "better"),
        ("kld", (0.004, 0.003, 0.005), (0.0049, 0.0039, 0.0059), None),
        ("acceptance", (0.8, 0.7, 0.9), (0.3, 0.2, 0.4), "worse"),
        ("acceptance", (0.3, 0.2, 0.4), (0.8, 0.7, 0.9), "better"),
        ("weather", (0.3, 0.2, 0.4), (0.8, 0.7, 0.9), "changed"),
    ],
)
def test_figures_by_their_intervals(
    tmp_path: Path,
    name: str,
    before: tuple[float, ...],
    after: tuple[float, ...],
    change: str | None,
) -> None:
    sides = (
        {"results": {name: dict(zip(("value", "lo", "hi"), side, strict=True))}}
        for side in (before, after)
    )
    report = compared(tmp_path, *sides)
    assert [f["change"] for f in report.results["figures"]] == ([change] if change else [])
    assert report.exit_code == (1 if change == "worse" else 0)


def test_figures_without_an_interval_are_shown_and_not_judged(tmp_path: Path) -> None:
    report = compared(tmp_path, {}, {"results": {"windows": 8, "kld": {"mean": 9.0}}})
    assert report.exit_code == 0
    changes = {f["name"]: f["change"] for f in report.results["figures"]}
    assert changes == {"kld": "changed", "kld.mean": "changed", "windows": "changed"}


def test_items_of_lists_are_told_apart_by_their_names(tmp_path: Path) -> None:
    def tasks(first: float, second: float) -> dict[str, Any]:
        rows = [{"name": "mmlu", "n": first}, {"name": "gsm8k", "n": second}]
        return {"results": {"tasks": rows if first < second else rows[::-1]}}

    report = compared(tmp_path, tasks(1, 9), tasks(12, 9))
    assert [f["name"] for f in report.results["figures"]] == ["tasks[mmlu].n"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("not json", "no JSON"),
        ("[1]", "schema"),
        ('{"schema": "other/1"}', "schema"),
        ('{"schema": "assay/1", "command": 3, "results": {}}', "no verb"),
        ('{"schema": "assay/1", "command": "check", "results": {}, "verdict": "fine"}', "verdict"),
    ],
)
def test_what_is_no_report(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(AssayError, match=why):
        diff(path, write(tmp_path / "b.json"))


def test_reports_of_different_verbs_are_not_compared(tmp_path: Path) -> None:
    with pytest.raises(AssayError, match="one of `assay check`"):
        compared(tmp_path, {}, {"command": "check"})


def test_the_command_line_and_the_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a.json")
    b = write(tmp_path / "b.json", verdict="fail", findings=[finding("fidelity.reject")])
    page = tmp_path / "diff.html"
    assert invoke(["diff", str(a), str(b), "--html", str(page), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["command"], shown["verdict"]) == ("diff", "fail")
    assert "Side by side" in page.read_text()
    assert invoke(["diff", str(a), str(tmp_path / "absent.json"), "--json"]) == 2
    assert assay.diff(a, a).verdict is Verdict.PASS
    assert "<html" in assay.diff(a, b).to_html()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda v: (
        st.lists(v, max_size=4)
        | st.dictionaries(st.sampled_from(["value", "lo", "hi", "mean", "name", "kld", "id"]), v)
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(max_size=4), JSON), st.lists(JSON, max_size=3), JSON)
def test_results_of_any_form(
    tmp_path_factory: pytest.TempPathFactory, results: Any, findings: Any, subject: Any
) -> None:
    folder = tmp_path_factory.getbasetemp()
    a = write(folder / "fa.json", results=results, findings=findings, subject=subject)
    b = write(folder / "fb.json")
    try:
        for pair in ((a, b), (b, a), (a, a)):
            json.dumps(diff(*pair).to_json(), allow_nan=False)
    except AssayError as error:
        assert error.finding_id == "diff.unreadable"
