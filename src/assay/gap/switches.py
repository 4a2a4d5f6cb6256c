"""Phase 1: what an engine allows to switch alone, beside the path. Switches are no buckets: they are not part of the sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.errors import AssayError
from assay.gap.bench import Bench, Measured
from assay.gap.configuration import Configuration
from assay.gap.path import EngineName, Step, engine_name


@dataclass(frozen=True)
class Switch:
    """One option of one engine, everything else as it was."""

    name: str
    base: str
    switched: str


def switches(
    reference: str, candidate: str, steps: Sequence[Step], facts: Mapping[str, Mapping[str, Any]]
) -> list[Switch]:
    """The attention kernels of both engines; for transformers in the number format in which the engines meet."""
    found: dict[str, Switch] = {}
    meeting = [reference, *(s.engine for s in steps)]
    for spec in (*[s for s in meeting if engine_name(s).kind == "hf"][-1:], candidate, reference):
        engine = engine_name(spec)
        option, value = _attention(engine, facts.get(spec, {}))
        if value and f"{engine.kind}.attention" not in found:
            name = f"{engine.kind}.attention"
            found[name] = Switch(name, spec, str(engine.with_option(option, value)))
    return list(found.values())


def _attention(engine: EngineName, facts: Mapping[str, Any]) -> tuple[str, str | None]:
    """The option that names the kernel, and another value for it; None where there is none to choose."""
    if engine.kind == "hf":
        return "attention", "sdpa" if engine.get("attention") == "eager" else "eager"
    if not str(facts.get("device", "")).startswith("cuda"):
        return "attention_backend", None  # vLLM has one kernel on a CPU
    return "attention_backend", "FLASH_ATTN" if "TRITON" in str(
        facts.get("attention_backend")
    ) else "TRITON_ATTN"


def measure_switches(
    bench: Bench, mode: str, found: Sequence[Switch]
) -> tuple[dict[str, Measured], dict[str, str]]:
    """Each against the engine as it was; the second object says what an engine refused."""
    measured: dict[str, Measured] = {}
    refused: dict[str, str] = {}
    for switch in found:
        try:
            measured[switch.name] = bench.measure(
                Configuration(switch.switched, mode), Configuration(switch.base, mode)
            )
        except AssayError as error:
            refused[switch.name] = error.message
    return measured, refused
