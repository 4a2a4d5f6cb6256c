"""Options of an engine switched alone, outside the sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.errors import AssayError
from assay_lab.gap.configuration import Configuration
from assay_lab.gap.engine_steps import EngineName, Step, engine_name
from assay_lab.gap.run_cache import RunCache
from assay_lab.kv.measured import Measured


@dataclass(frozen=True)
class Switch:
    """One option of one engine, everything else as it was."""

    name: str
    base: str
    switched: str


def switches(
    reference: str, candidate: str, steps: Sequence[Step], facts: Mapping[str, Mapping[str, Any]]
) -> list[Switch]:
    """The attention kernels of both engines; for transformers in the number format in which the
    engines meet.
    """
    found: dict[str, Switch] = {}
    meeting = [reference, *(s.engine for s in steps)]
    for spec in (
        *[s for s in meeting if engine_name(s, codec=False).kind == "hf"][-1:],
        candidate,
        reference,
    ):
        engine = engine_name(spec, codec=False)
        option, value = _attention(engine, facts.get(spec, {}))
        if value and f"{engine.kind}.attention" not in found:
            name = f"{engine.kind}.attention"
            found[name] = Switch(name, spec, str(engine.with_option(option, value)))
    return list(found.values())


def _attention(engine: EngineName, facts: Mapping[str, Any]) -> tuple[str, str | None]:
    """The option that names the kernel, and another value for it; None where there is none to
    choose.
    """
    if engine.kind == "hf":
        return "attention", "sdpa" if engine.get("attention") == "eager" else "eager"
    if engine.kind != "vllm" or not str(facts.get("device", "")).startswith("cuda"):
        return "attention_backend", None  # vLLM has one kernel on a CPU, llama.cpp none to choose
    return "attention_backend", "FLASH_ATTN" if "TRITON" in str(
        facts.get("attention_backend")
    ) else "TRITON_ATTN"


def measure_switches(
    run_cache: RunCache,
    chosen: Sequence[Switch],
    found: dict[str, Measured],
    skipped: dict[str, str],
) -> None:
    """Each against the engine as it was; they are no part of the sum. `skipped` says what an engine
    refused.
    """
    for switch in chosen:
        base = Configuration(switch.base, run_cache.plan.base)
        if not run_cache.states(switch.base):
            continue
        try:
            found[switch.name] = run_cache.measure(
                Configuration(switch.switched, run_cache.plan.base), base
            )
        except AssayError as error:
            skipped[f"switch: {switch.name}"] = error.message
