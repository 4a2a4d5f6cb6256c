"""Every option of `assay kv …` reaches the plan of its command."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from assay.cli.main import invoke
from assay.verdict import Report, Verdict
from assay_lab.gap.plan import GapPlan
from assay_lab.options import (
    AllocationPlan,
    AttributionPlan,
    CalibrationPlan,
    DiagnosisPlan,
    EvalPlan,
    NoisePlan,
    SweepPlan,
)

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
            "eval:run_eval",
            PASSAGES
            | STREAMS
            | CODEC
            | {"--mode": "snapshot", "--table-tokens": "9", "--seed": "7"},
            EXPECTED_PASSAGES | ALL_STREAMS | EXPECTED_CODEC | {"table_tokens": 9, "seed": 7},
        ),
        (
            "sweep",
            "sweep:run_sweep",
            PASSAGES
            | STREAMS
            | CODEC
            | {"--mode": "snapshot", "--table-tokens": "9", "--seed": "7"},
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
            "diagnose.verb:run_diagnose",
            PASSAGES | STREAMS | CODEC | {"--queries": "5"},
            EXPECTED_PASSAGES | EXPECTED_STREAMS | EXPECTED_CODEC | {"queries": 5},
        ),
        (
            "attribute",
            "attribute:run_attribute",
            PASSAGES | CODEC | {"--skip-layers": "5", "--mode": "decode", "--each": "layer"},
            EXPECTED_PASSAGES
            | EXPECTED_CODEC
            | {"skip_layers": (5,), "mode": "decode", "each": "layer"},
        ),
        (
            "allocate",
            "allocate:run_allocate",
            PASSAGES
            | CODEC
            | {"--target-ratio": "4", "--mode": "decode", "--fresh": "9", "--step": "0.5"},
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

    monkeypatch.setattr(import_module(f"assay_lab.kv.{module}"), name, kept)
    assert (
        invoke(["kv", command, "hf:MODEL", *(word for pair in options.items() for word in pair)])
        == 0
    )
    found = {field: getattr(plans[0], field) for field in expected}
    assert found == expected
    assert plans[0].model == "hf:MODEL"


@pytest.mark.parametrize(
    ("options", "model"), [({"threads": 0}, "./m"), ({"threads": 3}, "hf:./m?threads=3")]
)
def test_threads_become_a_part_of_how_the_model_is_written(
    options: dict[str, int], model: str
) -> None:
    plans = (
        EvalPlan("./m", "fp8", **options),
        SweepPlan("./m", codecs=("fp8",), **options),
        NoisePlan("./m", **options),
        DiagnosisPlan("./m", "fp8", **options),
        AttributionPlan("./m", "fp8", **options),
        AllocationPlan("./m", "fp8", 4.0, **options),
        CalibrationPlan("./m", Path("c"), text=("t",), **options),
    )
    assert {plan.model for plan in plans} == {model}


def test_threads_of_a_gap_are_of_both_sides_and_what_a_side_names_stays() -> None:
    plan = GapPlan("hf:./m?threads=1", "gguf:m.gguf", threads=2)
    assert (plan.reference, plan.candidate) == ("hf:./m?threads=1", "gguf:m.gguf?threads=2")
    assert GapPlan("./m", "vllm:./m", threads=2).candidate == "vllm:./m"
