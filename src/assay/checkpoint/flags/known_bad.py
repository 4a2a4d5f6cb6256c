"""Combinations of model and flag that people found broken, each with its report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from assay.checkpoint.declared import Declared
from assay.checkpoint.findings import warned
from assay.checkpoint.flags.command import ServeArgs
from assay.checkpoint.flags.kv_dtype import KvChoice
from assay.checkpoint.subject import Checkpoint
from assay.verdict import Finding


@dataclass(frozen=True)
class Case:
    """What is known about one command line and checkpoint."""

    model_type: str
    method: str | None
    kv: str
    dtype: str | None
    hidden: int
    experts: int = 0
    connector: bool = False
    marlin_input: str | None = None


@dataclass(frozen=True)
class Report:
    """One combination: when it applies, what was seen, where."""

    name: str
    applies: Callable[[Case], bool]
    symptom: str
    reference: str
    finding: str = "kv_dtype_conflict"


_MODELOPT = frozenset({"modelopt", "modelopt_fp4"})

_INTEGERS = frozenset({"auto-round", "gptq", "awq", "compressed-tensors"})

_VLLM = "https://github.com/vllm-project/vllm/issues/"

REPORTS = (
    Report(
        "Qwen2-7B family with an fp8 KV cache",
        lambda c: c.model_type == "qwen2" and c.kv.startswith("fp8") and c.hidden in {3584, 4096},
        "repeats itself, then nonsense; auto cures it",
        "https://github.com/QwenLM/Qwen3/issues/840",
    ),
    Report(
        "Qwen2-VL or Qwen2.5-VL with an fp8_e5m2 KV cache",
        lambda c: c.model_type.startswith(("qwen2_vl", "qwen2_5_vl")) and c.kv == "fp8_e5m2",
        "silent corruption",
        f"{_VLLM}41343",
    ),
    Report(
        "GLM-4.7-Flash (MLA) with an fp8 KV cache",
        lambda c: c.model_type == "glm4_moe_lite" and c.kv.startswith("fp8"),
        "fine on the first turn, a flood of ! on later ones",
        f"{_VLLM}38652",
    ),
    Report(
        "GLM-5 FP8 with a bfloat16 KV cache",
        lambda c: c.model_type == "glm_moe_dsa" and c.method == "fp8" and c.kv == "bfloat16",
        "nonsense; an fp8 KV cache cures it",
        f"{_VLLM}44550",
    ),
    Report(
        "Qwen3.5 in NVFP4 with an fp8 KV cache that a connector moves to another server",
        lambda c: (
            c.model_type.startswith("qwen3_5")
            and c.method in _MODELOPT
            and c.kv.startswith("fp8")
            and c.connector
        ),
        "corrupt answers, though each server alone is right",
        f"{_VLLM}42179",
    ),
    Report(
        "an INT4 mixture of experts with VLLM_MARLIN_INPUT_DTYPE=fp8",
        lambda c: c.marlin_input == "fp8" and c.experts > 0 and c.method in _INTEGERS,
        "endless </think> at temperature 0, a little faster than before",
        f"{_VLLM}49546",
        "config_conflict",
    ),
    Report(
        "a bfloat16 model of the Qwen family, GPTQ or AWQ, served in float16",
        lambda c: (
            c.model_type.startswith("qwen")
            and c.method in {"gptq", "awq"}
            and c.dtype in {"float16", "half"}
        ),
        "overflow to inf and NaN, printed as a flood of !",
        f"{_VLLM}14126",
        "config_conflict",
    ),
)


def lint_known_bad(
    checkpoint: Checkpoint, declared: Declared | None, args: ServeArgs, kv: KvChoice
) -> Iterator[Finding]:
    """A warning for every reported combination that this command line repeats."""
    sizes = (
        checkpoint.dims(key) or 0
        for key in ("num_experts", "n_routed_experts", "num_local_experts")
    )
    case = Case(
        checkpoint.model_type,
        declared.method if declared else None,
        kv.dtype,
        args.get("--dtype"),
        checkpoint.dims("hidden_size") or 0,
        max(sizes),
        args.structure("--kv-transfer-config") is not None,
        args.environment.get("VLLM_MARLIN_INPUT_DTYPE"),
    )
    for report in REPORTS:
        if report.applies(case):
            title = f"reported as broken: {report.name} ({report.symptom})"
            remedies = ["check the running server with assay check before trusting it"]
            yield warned(report.finding, title, remedies=remedies, references=[report.reference])
