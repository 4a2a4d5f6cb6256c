"""What fits into a budget, what is said of the rest, and when a verdict is certain."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from assay.cli.main import invoke
from assay.fidelity.budget import Budget, OutOfTime, size_for
from assay.fidelity.observation import WindowObservation
from assay.fidelity.plan import Plan
from assay.fidelity.plan_file import plan_from
from assay.fidelity.summary import is_certain
from assay.stats.equivalence import Margins
from assay.verdict import Severity, Verdict


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (1e6, (64, 1024)),  # all of it
        (20.0, (19, 1024)),  # fewer passages
        (10.0, (19, 512)),  # shorter ones rather than too few
        (3.0, (23, 128)),
        (1.1, (8, 128)),
        (1.0, None),
        (-5.0, None),
    ],
)
def test_passages_get_fewer_then_shorter(seconds: float, expected: tuple[int, int] | None) -> None:
    assert size_for(seconds, 1e-3, 64, 1024) == expected


def test_a_plan_that_is_small_already_is_never_enlarged() -> None:
    assert size_for(1e6, 1e-3, 4, 64) == (4, 64)


def test_a_budget_says_what_it_left_out_and_what_that_hides() -> None:
    budget = Budget(60.0)
    assert budget.findings() == []
    budget.note_size((64, 1024), (16, 256))
    budget.note_size((64, 1024), (16, 256))
    (finding,) = budget.findings()
    assert (finding.id, finding.severity) == ("fidelity.budget", Severity.INFO)
    assert "48 of 64 passages" in finding.title
    assert "contexts of more than 256 tokens" in finding.detail


def test_a_budget_too_small_for_any_answer_is_inconclusive_in_one_line() -> None:
    budget = Budget(1.0)
    with pytest.raises(OutOfTime, match="a budget of 1 s is too small for any answer") as caught:
        budget.size(1.0, 64, 1024)
    assert caught.value.verdict is Verdict.INCONCLUSIVE
    assert caught.value.to_finding().severity is Severity.WARNING
    assert "\n" not in caught.value.message


def test_without_a_budget_there_is_always_time() -> None:
    budget = Budget.of(None, quick=False, quick_minutes=3)
    assert budget.left() == float("inf")
    assert budget.affords("floors", "what rounding does", 1e9)
    assert Budget.of(None, quick=True, quick_minutes=3).seconds == 180
    assert Budget.of(1, quick=True, quick_minutes=3).seconds == 60


def test_who_asks_for_a_number_of_windows_gets_as_many() -> None:
    engines = {"reference": "hf:a", "candidates": ["hf:b"]}
    assert plan_from(engines, {"windows": 32}, where="test").all
    assert not plan_from(engines, {}, where="test").all
    assert not plan_from(engines, {"windows": 32, "quick": True}, where="test").all
    assert "budget" not in Plan("hf:a", ("hf:b",), budget=3.0).facts()


def _windows(
    kl: float, dnll: float, count: int = 16, spoiled: bool = False
) -> list[WindowObservation]:
    rng = np.random.default_rng(7)
    found = []
    for index in range(count):
        n = 100
        values = rng.gamma(1.0, kl, n)
        nll = np.full(n, 2.0)
        candidate = nll + rng.normal(dnll, 0.01, n)
        if spoiled:
            candidate[3] = np.nan
        p, yes = np.full(n, 0.5), np.ones(n, dtype=bool)
        found.append(
            WindowObservation(
                index,
                1,
                np.zeros(n + 1, np.int32),
                nll,
                candidate,
                values,
                values,
                yes,
                p,
                p,
                p,
                values,
                ~yes,
            )
        )
    return found


def test_a_verdict_is_certain_on_both_sides_and_not_between() -> None:
    margins = Margins()
    assert is_certain(_windows(0.001, 0.0), margins, None)  # ACCEPT
    assert is_certain(_windows(0.5, 0.3), margins, None)  # REJECT
    assert not is_certain(_windows(0.0098, 0.0), margins, None)  # at the margin of KL
    assert not is_certain(_windows(0.001, 0.0, count=4), margins, None)  # too few to be judged
    assert is_certain(_windows(0.001, 0.0, spoiled=True), margins, None)  # fails in any case


@pytest.mark.engine
def test_compare_fits_its_budget_and_goes_on_with_its_size(
    smollm2: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    engines = (f"hf:{smollm2}", f"hf:{smollm2}?weights=int(bits=8)")
    began = time.monotonic()
    code = invoke(["compare", *engines, "--budget", "0.5", "--json"])
    taken = time.monotonic() - began
    captured = capsys.readouterr()
    body = json.loads(captured.out)
    assert code == body["exit_code"] in (0, 3)
    assert taken < 150  # five times what was asked for: this machine may be busy
    finding = next(f for f in body["findings"] if f["id"] == "fidelity.budget")
    assert finding["severity"] in ("info", "warning")
    if body["results"].get("candidates"):
        results = body["results"]
        assert "expected: about" in captured.err
        assert results["windows"] == results["candidates"][0]["windows"] < 64
        assert body["subject"]["plan"]["length"] < 1024
        assert results["times"]["budget_s"] == 30
        assert set(results["times"]["expected_s"]) == {"reference", results["candidate"]}


@pytest.mark.engine
@pytest.mark.parametrize(
    "words",
    [
        ["kv", "eval", "MODEL", "--codec", "fp8"],
        ["kv", "sweep", "MODEL", "--codec", "fp8", "--codec", "int(bits=4)"],
        ["kv", "attribute", "MODEL", "--codec", "fp8"],
        ["gap", "hf:MODEL", "hf:MODEL?dtype=float32", "--codec", "fp8"],
        ["compare", "hf:MODEL", "hf:MODEL?dtype=float32"],
    ],
    ids=lambda words: " ".join(words[: 1 + (words[0] == "kv")]),
)
def test_every_verb_says_in_one_line_that_a_budget_is_too_small(
    words: list[str],
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    written = [word.replace("MODEL", str(tiny_llama)) for word in words]
    code = invoke([*written, "--budget", "0.01", "--json"])
    body = json.loads(capsys.readouterr().out)
    assert (code, body["verdict"]) == (3, "inconclusive"), body["findings"]
    (finding,) = body["findings"]
    assert finding["id"] == "fidelity.budget"
    assert "too small for any answer" in finding["title"] and "\n" not in finding["title"]
    assert finding["remedies"] == ["give it more time: --budget MINUTES"]
    code = invoke([*written, "--budget", "0.01"])
    shown = capsys.readouterr().out
    assert code == 3 and len(shown.splitlines()) <= 6


@pytest.mark.engine
def test_the_expected_time_of_every_stage_is_told_without_a_budget_too(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    for module in ("assay.fidelity.open_reference", "assay_lab.kv.evaluator"):
        monkeypatch.setattr(f"{module}.WORTH_MEASURING", 1024)
    few = ["--windows", "16", "--length", "32"]
    for words, stages in (
        (
            ["compare", f"hf:{tiny_llama}", f"hf:{tiny_llama}?dtype=float32", *few, "--no-floors"],
            "(reference ",
        ),
        (["kv", "eval", str(tiny_llama), "--codec", "fp8", *few], "(the exact cache "),
        (
            ["kv", "sweep", str(tiny_llama), "--codec", "fp8", "--codec", "fp8(scale=head)", *few],
            "2 measurements ",
        ),
    ):
        invoke([*words, "--json"])
        captured = capsys.readouterr()
        lines = [line for line in captured.err.splitlines() if line.startswith("expected: about ")]
        assert len(lines) == 1 and stages in lines[0], words
        assert "times" not in json.loads(captured.out)["results"]  # equal runs give equal results
    invoke(
        [
            "compare",
            f"hf:{tiny_llama}",
            f"hf:{tiny_llama}?dtype=float32",
            "--windows",
            "8",
            "--length",
            "32",
        ]
    )
    assert "expected" not in capsys.readouterr().err  # done in a moment


@pytest.mark.engine
def test_a_certain_verdict_ends_the_run(
    smollm2: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    coarse = f"hf:{smollm2}?weights=int(bits=2)"
    code = invoke(
        [
            "compare",
            f"hf:{smollm2}",
            coarse,
            "--length",
            "32",
            "--batch",
            "8",
            "--no-floors",
            "--json",
        ]
    )
    body = json.loads(capsys.readouterr().out)
    assert code == 1
    assert body["results"]["windows"] == 16
    assert "fidelity.certain" in [f["id"] for f in body["findings"]]
