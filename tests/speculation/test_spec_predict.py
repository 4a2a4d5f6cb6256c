"""Acceptance beside a changed target, predicted from its distance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.speculation import prediction as module
from assay.speculation.options import SpecOptions
from assay.speculation.prediction import Change, predict, read_change
from assay.speculation.spec import examine

LINE = (
    "(EngineCore_DP0 pid=7) INFO 11-29 09:00:00 [metrics.py:100] SpecDecoding metrics: Mean"
    " acceptance length: 2.20, Accepted throughput: 12.00 tokens/s, Drafted throughput: 40.00"
    " tokens/s, Accepted: 1200 tokens, Drafted: 4000 tokens, Per-position acceptance rate: 0.600,"
    " 0.350, 0.170, 0.080, Avg Draft acceptance rate: 30.0%"
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    path.write_text(LINE + "\n")
    return path


def compare_result(tmp_path: Path, **results: object) -> Path:
    path = tmp_path / "compare.json"
    path.write_text(json.dumps({"schema": "assay/1", "command": "compare", "results": results}))
    return path


def test_the_constants_are_those_that_were_measured() -> None:
    path = Path(__file__).parents[2] / "lab/benchmarks/heads/results/heads_predict.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    assert pytest.approx(result["beta"], abs=0.006) == module.BETA
    first, length = (
        max(e[name]["max"] for e in result["not_fitted"].values())
        for name in ("position_0", "tokens_per_step")
    )
    assert module.ERROR is not None and module.LENGTH_ERROR is not None
    assert first <= module.ERROR <= first + 0.001
    assert length <= module.LENGTH_ERROR <= length + 0.01
    assert max(case["tv"] for case in result["cases"]) >= module.FITTED_TO


def test_no_change_predicts_what_is_there_and_more_change_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BETA", 0.7)
    shares = (0.6, 0.35, 0.17)
    lengths = [
        predict(shares, Change(tv, True, "")).tokens_per_step for tv in (0.0, 0.02, 0.1, 0.3, 1.0)
    ]
    assert lengths[0] == pytest.approx(1 + sum(shares))
    assert lengths == sorted(lengths, reverse=True) and lengths[-1] >= 1.0  # at a β above 0
    # Each position loses the same share, given the ones before it.
    p = predict(shares, Change(0.1, True, "")).positions
    assert p[1] / p[0] / (shares[1] / shares[0]) == pytest.approx(p[0] / shares[0])


def test_the_distance_is_read_from_a_comparison(tmp_path: Path) -> None:
    assert read_change("0.04") == Change(0.04, True, "given")
    assert (
        read_change(str(compare_result(tmp_path, tv={"mean": 0.03}, kld={"mean": 0.5}))).tv == 0.03
    )
    bound = read_change(str(compare_result(tmp_path, tv={"mean": None}, kld={"mean": 0.02})))
    assert (bound.tv, bound.exact) == (pytest.approx(0.1), False)


@pytest.mark.parametrize(
    ("text", "said"),
    [("1.5", "between 0 and 1"), ("nan", "between 0 and 1"), ("no-such.json", "cannot be read")],
)
def test_what_gives_no_distance_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_change(text)


def test_a_file_that_is_no_comparison_is_refused(tmp_path: Path) -> None:
    for content, said in (("[]", "no result"), ("{", "no result"), ('{"results": {}}', "neither")):
        path = tmp_path / "x.json"
        path.write_text(content)
        with pytest.raises(UsageError, match=said):
            read_change(str(path))


def test_spec_shows_the_prediction_beside_what_is_there(log: Path, tmp_path: Path) -> None:
    report = examine(
        [str(log)], SpecOptions(predict=str(compare_result(tmp_path, tv={"mean": 0.05})))
    )
    found = report.results["prediction"]
    assert found["positions"][0] == pytest.approx(0.6 * (1 - module.BETA * 0.05))
    assert report.blocks[0].title == "Predicted beside the changed target"
    assert "prediction" not in examine([str(log)]).results


def test_a_change_beyond_what_was_measured_is_said(log: Path) -> None:
    report = examine([str(log)], SpecOptions(predict="0.9"))
    assert "speculation.prediction" in [f.id for f in report.findings]
    assert "speculation.prediction" not in [
        f.id for f in examine([str(log)], SpecOptions(predict="0.01")).findings
    ]


def test_a_source_without_positions_cannot_be_predicted(tmp_path: Path) -> None:
    path = tmp_path / "plain.log"
    path.write_text("drafted=3500 accepted=2900\n")
    with pytest.raises(UsageError, match="acceptance by position"):
        examine([str(path)], SpecOptions(predict="0.1"))
