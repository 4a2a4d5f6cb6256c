"""Every option of `assay kv …` reaches the plan of its command."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.cli.kv import numbers_of
from assay.cli.main import invoke
from assay.errors import UsageError
from assay.verdict import Report, Verdict

PASSAGES = {"--text": "a.txt", "--windows": "3", "--length": "64", "--batch": "2"}
EXPECTED_PASSAGES = {"text": ("a.txt",), "windows": 3, "length": 64, "batch": 2}
STREAMS = {"--stream": "k", "--skip-layers": "0, 2-3"}
EXPECTED_STREAMS = {"streams": "k", "skip_layers": (0, 2, 3)}
CODEC = {"--codec": "int(bits=4)", "--calibration": "c.st"}
EXPECTED_CODEC = {"codec": "int(bits=4)", "calibration": "c.st"}
ALL_STREAMS = EXPECTED_STREAMS | {"mode": "snapshot"}


@pytest.mark.parametrize(
    ("command", "runs", "options", "expected"),
    [
        (
            "eval",
            "evaluate:run_eval",
            PASSAGES | STREAMS | CODEC | {"--mode": "snapshot", "--table-tokens": "9", "--seed": "7"},
            EXPECTED_PASSAGES | ALL_STREAMS | EXPECTED_CODEC | {"table_tokens": 9, "seed": 7},
        ),
        (
            "sweep",
            "sweep:run_sweep",
            PASSAGES | STREAMS | CODEC | {"--mode": "snapshot", "--table-tokens": "9", "--seed": "7"},
            EXPECTED_PASSAGES
            | ALL_STREAMS
            | {"codecs": ("int(bits=4)",), "calibration": "c.st", "table_tokens": 9, "seed": 7},
        ),
        (
            "noise",
            "noise:run_noise",
            PASSAGES | STREAMS | {"--mode": "snapshot", "--sigma": "0.1,0.2", "--seed": "7"},
            EXPECTED_PASSAGES | ALL_STREAMS | {"sigmas": (0.1, 0.2), "seed": 7},
        ),
        (
            "diagnose",
            "diagnose:run_diagnose",
            PASSAGES | STREAMS | CODEC | {"--queries": "5"},
            EXPECTED_PASSAGES | EXPECTED_STREAMS | EXPECTED_CODEC | {"queries": 5},
        ),
        (
            "attribute",
            "attribute:run_attribute",
            PASSAGES | CODEC | {"--skip-layers": "5", "--mode": "decode", "--each": "layer"},
            EXPECTED_PASSAGES | EXPECTED_CODEC | {"skip_layers": (5,), "mode": "decode", "each": "layer"},
        ),
        (
            "allocate",
            "allocate:run_allocate",
            PASSAGES | CODEC | {"--target-ratio": "4", "--mode": "decode", "--fresh": "9", "--step": "0.5"},
            EXPECTED_PASSAGES
            | EXPECTED_CODEC
            | {"target_ratio": 4.0, "mode": "decode", "fresh": 9, "step": 0.5},
        ),
        (
            "calibrate",
            "calibrate:run_calibrate",
            PASSAGES | {"--out": "o.st", "--tokens": "300", "--sensitivity": "2"},
            EXPECTED_PASSAGES | {"tokens": 300, "sensitivity": 2},
        ),
        (
            "serve",
            "serve:run_serve",
            STREAMS | CODEC | {"--mode": "decode", "--python": "p"},
            EXPECTED_STREAMS | EXPECTED_CODEC | {"mode": "decode", "python": "p"},
        ),
    ],
)
def test_every_option_reaches_the_plan(
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    runs: str,
    options: dict[str, str],
    expected: dict[str, Any],
) -> None:
    module, _, name = runs.partition(":")
    plans: list[Any] = []

    def kept(plan: Any, *_: object, **__: object) -> Report:
        plans.append(plan)
        return Report(f"kv {command}", Verdict.PASS)

    monkeypatch.setattr(import_module(f"assay.lab.kv.{module}"), name, kept)
    assert invoke(["kv", command, "hf:MODEL", *(word for pair in options.items() for word in pair)]) == 0
    found = {field: getattr(plans[0], field) for field in expected}
    assert found == expected
    assert plans[0].model == "hf:MODEL"


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0,1,28-29", (0, 1, 28, 29)), (" 3 - 4 ,, 3", (3, 4)), ("", ()), ("007", (7,)), ("5-5", (5,))],
)
def test_lists_of_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert numbers_of(text, "--x", "0,1") == numbers


@pytest.mark.parametrize(
    "text", ["a", "1-", "-1", "1-2-3", "9-3", "1.5", "0-99999999999", "²", "10000", "1;2"]
)
def test_what_is_no_list_of_numbers_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--x .* is no number or range"):
        numbers_of(text, "--x", "0,1")


@given(st.lists(st.integers(0, 9999), unique=True, max_size=20))
def test_numbers_come_back(numbers: list[int]) -> None:
    assert numbers_of(",".join(map(str, numbers)), "--x", "0,1") == tuple(numbers)
