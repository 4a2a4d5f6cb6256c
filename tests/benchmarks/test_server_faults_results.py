"""Results of the server faults from several machines come together, and no row is lost."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server_faults_results import load, main, merged, save

Results = dict[str, dict[str, dict[str, Any]]]

ROWS = st.dictionaries(
    st.sampled_from(["int2", "rope_theta", "nan_row"]),
    st.fixed_dictionaries(
        {"degenerate": st.integers(0, 3), "machine": st.sampled_from(["a", "b"])}
    ),
)
RESULTS = st.fixed_dictionaries({"healthy": ROWS, "damages": ROWS})


def measurements(results: Results) -> set[str]:
    """Every measurement with its place, those under `earlier` too."""
    found = set()
    for group, rows in results.items():
        for name, row in rows.items():
            for each in (row, *row.get("earlier", ())):
                bare = {k: v for k, v in each.items() if k != "earlier"}
                found.add(json.dumps([group, name, bare], sort_keys=True))
    return found


@given(RESULTS, RESULTS, RESULTS)
def test_no_row_is_lost_or_made_up_and_the_new_one_stands_in_front(
    one: Results, two: Results, three: Results
) -> None:
    all_of = merged(merged(one, two), three)
    assert measurements(all_of) == measurements(one) | measurements(two) | measurements(three)
    for group, rows in three.items():
        for name, row in rows.items():
            assert {k: v for k, v in all_of[group][name].items() if k != "earlier"} == row


@given(RESULTS, RESULTS)
def test_merging_twice_changes_nothing(one: Results, two: Results) -> None:
    once = merged(one, two)
    assert merged(once, two) == once
    assert merged(once, once) == once


def test_files_come_together_by_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    # The machine of all rows once stood at the top of the file.
    old.write_text(
        json.dumps(
            {
                "machine": {"cpu": "x"},
                "healthy": {"1000": {"seed": 1000}},
                "damages": {"int2": {"texts": 41}},
            }
        )
    )
    row = {"texts": 40, "machine": {"cpu": "y"}}
    save(
        new,
        {
            "healthy": {"6000": {"seed": 6000, "machine": {"cpu": "y"}}},
            "damages": {"int2": row, "int3": row},
        },
    )
    monkeypatch.setattr(sys, "argv", ["merge", str(new), "--into", str(old)])
    main()
    results = load(old)
    assert list(results["healthy"]) == ["1000", "6000"]
    assert results["damages"] == {
        "int2": row | {"earlier": [{"texts": 41, "machine": {"cpu": "x"}}]},
        "int3": row,
    }
    assert "6000" in capsys.readouterr().out


def test_a_missing_file_is_named_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["merge", str(tmp_path / "none.json"), "--into", str(tmp_path / "all.json")]
    )
    with pytest.raises(SystemExit):
        main()
    assert "none.json" in capsys.readouterr().err
    assert not (tmp_path / "all.json").exists()
