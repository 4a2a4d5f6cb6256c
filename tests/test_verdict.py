from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import assay
from assay.errors import AssayError, InconclusiveError, UsageError
from assay.verdict import AREAS, Finding, Report, Severity, Verdict, jsonable, worst

FAILING = Finding("coherence.degenerate", Severity.ERROR, "loops")


@pytest.mark.parametrize(
    ("verdict", "code"),
    [(Verdict.PASS, 0), (Verdict.FAIL, 1), (Verdict.ERROR, 2), (Verdict.INCONCLUSIVE, 3)],
)
def test_exit_codes(verdict: Verdict, code: int) -> None:
    report = Report("check", verdict, findings=(FAILING,))
    assert report.exit_code == code
    assert report.to_json()["exit_code"] == code
    interrupted = Report("check", verdict, findings=(FAILING,), interrupted=True)
    assert interrupted.exit_code == 130


@pytest.mark.parametrize(
    ("verdicts", "answer"),
    [
        ([], "pass"),
        (["pass", "inconclusive"], "inconclusive"),
        (["inconclusive", "error", "pass"], "error"),
        (["error", "fail", "inconclusive"], "fail"),
    ],
)
def test_the_worst_of_several(verdicts: list[str], answer: str) -> None:
    assert worst(Verdict(v) for v in verdicts).value == answer


def test_a_failure_needs_a_finding_that_says_why() -> None:
    with pytest.raises(ValueError, match="severity `error`"):
        Report(
            "check", Verdict.FAIL, findings=(Finding("coherence.unclear", Severity.WARNING, "?"),)
        )


@pytest.mark.parametrize("id_", ["coherence", "coherence.", ".loop", "weather.rain", ""])
def test_a_finding_belongs_to_an_area(id_: str) -> None:
    with pytest.raises(ValueError, match=r"area\.name"):
        Finding(id_, Severity.INFO, "x")


def test_the_json_of_a_report() -> None:
    report = Report("check", Verdict.FAIL, findings=(FAILING,), results={"speed": math.nan})
    assert report.to_json() == {
        "schema": "assay/1",
        "command": "check",
        "verdict": "fail",
        "exit_code": 1,
        "subject": {},
        "findings": [
            {
                "id": "coherence.degenerate",
                "severity": "error",
                "title": "loops",
                "detail": "",
                "evidence": {},
                "causes": [],
                "remedies": [],
                "references": [],
            }
        ],
        "results": {"speed": None},
        "environment": {},
    }


@dataclass(frozen=True)
class Pair:
    left: float
    right: Any


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (math.inf, None),
        (-math.inf, None),
        (True, True),
        (Verdict.PASS, "pass"),
        (PurePosixPath("a/b"), "a/b"),
        (Pair(math.nan, (1, {2})), {"left": None, "right": [1, [2]]}),
        ({1: Severity.INFO}, {"1": "info"}),
        ("half \ud83d a pair", "half ? a pair"),
    ],
)
def test_plain_types(value: Any, plain: Any) -> None:
    assert jsonable(value) == plain


def test_numpy_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    assert jsonable({"a": numpy.float32(0.5), "b": numpy.int64(3), "c": numpy.float64("nan")}) == {
        "a": 0.5, "b": 3, "c": None,
    }  # fmt: skip
    assert jsonable(numpy.arange(3)) == [0, 1, 2]


def test_what_has_no_json_form_is_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        jsonable(object())


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None))
    | st.sampled_from(Verdict),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(anything)
def test_everything_that_goes_in_comes_out_as_strict_json(value: Any) -> None:
    text = json.dumps(jsonable(value), allow_nan=False, ensure_ascii=False)
    text.encode("utf-8")
    assert jsonable(json.loads(text)) == json.loads(text)


@pytest.mark.parametrize(
    ("error", "verdict", "severity"),
    [
        (AssayError("no", finding_id="server.failing", remedy="do"), "error", "error"),
        (UsageError("no", remedy="do"), "error", "error"),
        (
            InconclusiveError("no", finding_id="server.timeout", remedy="do"),
            "inconclusive",
            "warning",
        ),
    ],
)
def test_errors_become_findings(error: AssayError, verdict: str, severity: str) -> None:
    finding = error.to_finding()
    assert (error.verdict.value, finding.severity.value, finding.title) == (verdict, severity, "no")
    assert finding.remedies == ("do",)


def test_every_finding_that_the_source_names_is_in_a_known_area() -> None:
    source = Path(assay.__file__).parent
    named = {
        (str(file.relative_to(source)), area)
        for file in source.rglob("*.py")
        for area in re.findall(
            r'finding_id[^="]*=\s*f?"([a-z_]+)\.', file.read_text(encoding="utf-8")
        )
    }
    assert len(named) > 50
    assert {(file, area) for file, area in named if area not in AREAS} == set()
