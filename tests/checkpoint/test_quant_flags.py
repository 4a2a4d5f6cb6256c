"""The flag table, cell by cell: against the recorded one where it is, and against vLLM's
own code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from assay.checkpoint.flags.quantization import (
    DEPRECATED,
    METHODS,
    MIN_CAPABILITY,
    Resolution,
    resolve,
)
from assay.checkpoint.flags.versions import Version
from assay.checkpoint.schemes.registry import parse
from assay.checkpoint.subject import Checkpoint
from checkpoint.flag_configs import KINDS, model_type
from vllm_cpu import said_by_vllm

RECORDED = Path(__file__).parents[3] / "shared" / "facts" / "quantization_flags.json"
FLAGS = (
    "None",
    "awq",
    "awq_marlin",
    "gptq",
    "auto-round",
    "inc",
    "fp8",
    "marlin",
    "humming",
    "moe_wna16",
    "mxfp4",
)


def outcome(kind: str, flag: str, **rest: Any) -> Resolution:
    """From config.json to the outcome, the way `assay verify` goes."""
    raw = {"model_type": model_type(kind)}
    if KINDS[kind] is not None:
        raw["quantization_config"] = KINDS[kind]  # type: ignore[assignment]
    text = json.dumps(raw).encode()
    declared = parse(Checkpoint("folder", {"config.json": len(text)}, lambda name: text))
    return resolve(
        declared.method if declared else None,
        None if flag == "None" else flag,
        algorithm=declared.algorithm if declared else None,
        model_type=model_type(kind),
        **rest,
    )


def cell(kind: str, flag: str) -> str:
    """The outcome as the recorded table writes it."""
    result = outcome(kind, flag)
    if result.status in {"accepted", "ignored"}:
        return str(result.method)
    if "mismatch" in result.reason:
        return "ERR mismatch"
    if "deprecated" in result.reason:
        return "ERR deprecated"
    return "ERR gpt-oss" if "gpt-oss" in result.reason else "ERR unknown"


def same(ours: str, theirs: str) -> bool:
    """Whether an outcome is the engine's, whose errors are whole sentences or short words."""
    if not theirs.startswith("ERR"):
        return ours == theirs
    words = {
        "mismatch": ("mismatch", "does not match"),
        "unknown": ("unknown",),
        "gpt-oss": ("gpt-oss",),
        "deprecated": ("deprecated",),
    }
    kind = ours.removeprefix("ERR ")
    return kind in words and any(word in theirs.lower() for word in words[kind])


@pytest.mark.skipif(
    not RECORDED.is_file(), reason="the recorded table is not beside this repository"
)
def test_every_cell_of_the_recorded_table_agrees() -> None:
    table: dict[str, dict[str, str]] = json.loads(RECORDED.read_text())
    assert set(table) == set(KINDS)
    assert all(len(row) == 25 for row in table.values())
    wrong = [
        (kind, flag, cell(kind, flag), theirs)
        for kind, row in table.items()
        for flag, theirs in row.items()
        if not same(cell(kind, flag), theirs)
    ]
    assert wrong == []


@pytest.mark.engine
def test_vllm_itself_agrees() -> None:
    flags = ["None", *sorted(METHODS | set(FLAGS) | {"bitsandbytes", "gguf", "torchao"})]
    kinds = {name: {"config": raw, "model_type": model_type(name)} for name, raw in KINDS.items()}
    said = said_by_vllm(
        Path(__file__).with_name("vllm_probe.py"), json.dumps({"kinds": kinds, "flags": flags})
    )
    assert set(said["methods"]) == METHODS
    wrong = [
        (kind, flag, cell(kind, flag), theirs)
        for kind, row in said["cells"].items()
        for flag, theirs in row.items()
        if not same(cell(kind, flag), theirs)
    ]
    assert wrong == []
    lowest = {name: round(10 * value) for name, value in MIN_CAPABILITY.items()}
    assert lowest == {name: said["capability"][name] for name in MIN_CAPABILITY}


@pytest.mark.parametrize(
    ("kind", "flag", "status", "method"),
    [
        ("none", "None", "accepted", None),
        ("none", "fp8", "accepted", "fp8"),
        ("none", "bitsandbytes", "plugin", None),
        ("none", "turbo", "rejected", None),
        ("awq", "marlin", "accepted", "auto_awq"),
        ("awq", "gptq", "rejected", None),
        ("auto-round(awq pack)", "awq_marlin", "ignored", "inc"),
        ("auto-round(awq pack)", "inc", "accepted", "inc"),
        ("modelopt NVFP4", "fp8", "ignored", "modelopt_fp4"),
        ("mxfp4(gpt_oss)", "humming", "rejected", None),
        ("gguf", "None", "plugin", None),
        ("hqq", "None", "rejected", None),
        ("fbgemm_fp8", "None", "rejected", None),
        ("compressed-tensors", "humming", "accepted", "humming"),
    ],
)
def test_outcomes(kind: str, flag: str, status: str, method: str | None) -> None:
    result = outcome(kind, flag)
    assert (result.status, result.method) == (status, method)
    assert result.reason or status in {"accepted", "ignored"}


def test_older_versions_differ() -> None:
    old = Version.parse("0.27.1")
    assert outcome("bitsandbytes", "None", version=old).status == "accepted"
    assert outcome("bitsandbytes", "None", version=Version.parse("0.27.2")).status == "plugin"
    before_inc = Version.parse("0.14.0")
    assert outcome("auto-round(gptq pack)", "None", version=before_inc).method == "auto-round"
    assert outcome("auto-round(gptq pack)", "awq_marlin", version=before_inc).status == "rejected"


def test_deprecated_methods_can_be_allowed() -> None:
    for kind in DEPRECATED:
        assert outcome(kind, "None", allow_deprecated=True).method == kind
