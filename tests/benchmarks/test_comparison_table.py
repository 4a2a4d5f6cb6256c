"""The kept tables are what the kept numbers give, and a candidate without bytes is a row too."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

from comparison_table import comparison_table, sizes

RESULTS = Path(__file__).parents[2] / "benchmarks" / "compare" / "results"


@pytest.mark.parametrize("name", ["compare_engines", "compare_exports", "compare_candidates"])
def test_the_kept_table_is_that_of_the_kept_numbers(name: str) -> None:
    document = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    drawn = import_module(name).table(document)
    assert drawn == (RESULTS / f"{name}.md").read_text(encoding="utf-8")


def test_a_row_says_its_numbers_with_their_intervals() -> None:
    r = {
        "dppl_pct": {"value": 0.114, "lo": -0.081, "hi": 0.139},
        "kld": {"mean": 0.001144, "lo": 0.00112, "hi": 0.001171},
        "top1_pct": {"value": 97.564, "lo": 97.46, "hi": 97.66},
        "grade": "ACCEPT",
    }
    assert comparison_table([("a", 3 * 2**19, r), ("b", None, r)], "checkpoint") == [
        "| checkpoint | MiB | Δppl % | KL, nats | top-1 % | grade |",
        "|---|---:|---|---|---|---|",
        (
            "| a | 1.5 | +0.11 [-0.08, +0.14] | 0.00114 [0.00112, 0.00117] | 97.56 [97.46, 97.66] |"
            " ACCEPT |"
        ),
        (
            "| b | – | +0.11 [-0.08, +0.14] | 0.00114 [0.00112, 0.00117] | 97.56 [97.46, 97.66] |"
            " ACCEPT |"
        ),
    ]
    assert (
        comparison_table([("b", None, r)])[0]
        == "| candidate | Δppl % | KL, nats | top-1 % | grade |"
    )


def test_all_sizes_are_said() -> None:
    rows = [{"windows": w, "tokens": 1023 * w} for w in (64, 8, 64)]
    assert sizes(rows).startswith("8 windows, 8,184 tokens; 64 windows, 65,472 tokens; intervals")
    assert sizes([]).startswith("nothing yet")
