"""The labelled samples of the field, where they lie beside the repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from assay.speculation.combine import combine
from assay.speculation.health import assess
from assay.speculation.read import Reading
from assay.speculation.sources import open_source
from assay.speculation.spec import examine

CASES = Path(__file__).resolve().parents[2].parent / "shared" / "cases" / "spec_logs"
FILES = sorted(CASES.glob("*.txt"))
COUNTS = {
    "accepted": "accepted",
    "drafted": "drafted",
    "drafts": "num_drafts",
    "num_speculative_tokens": "num_spec_tokens",
}
RATES = ("acceptance_rate", "mean_acceptance_length")

if not FILES:
    pytest.skip("the labelled samples are not beside the repository", allow_module_level=True)


def label(path: Path) -> dict[str, Any]:
    expected: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())["expected"]
    return expected


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_record(path: Path) -> None:
    reading = Reading()
    reading.add(open_source(str(path)))
    record = combine(reading.settled()).record.to_json()
    expected = label(path)
    for ours, theirs in COUNTS.items():
        assert record[ours] == expected[theirs], ours
    for name in RATES:
        assert record[name] == (
            None if expected[name] is None else pytest.approx(expected[name], abs=1e-3)
        )
    want = expected["per_position"]
    assert record["per_position"] == (None if want is None else pytest.approx(want, abs=1e-3))
    for name, own in expected.get("per_implementation", {}).items():
        assert record["per_implementation"][name.replace("_", "-")] == own


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_health(path: Path) -> None:
    expected = label(path)
    report = examine([str(path)])
    assert report.results["health"] in [
        expected["verdict"],
        *expected.get("verdict_also_acceptable", []),
    ]
    for name, own in expected.get("per_engine", {}).items():
        found = report.results["per_engine"][name]
        assert (found["accepted"], found["drafted"]) == (own["accepted"], own["drafted"])
        assert found["health"] == own["verdict"]


def test_every_sample_names_its_definition() -> None:
    for path in FILES:
        reading = Reading()
        reading.add(open_source(str(path)))
        assert combine(reading.settled()).record.to_json()["definitions"], path.name
        assert assess(combine(reading.settled())).reason
