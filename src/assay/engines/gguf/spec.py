"""`gguf:FILE?…`: a model that llama.cpp runs, as it is written on the command line."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from assay.engines import read_options
from assay.errors import UsageError

if TYPE_CHECKING:
    pass


# Of ggml's types, those that a KV cache may have, and their numbers (ggml.h).
CACHE_TYPES = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
}


@dataclass(frozen=True)
class GgufSpec:
    """One GGUF file and how llama.cpp runs it."""

    model: str
    k: str = "f16"
    """Type of the K cache."""
    v: str = "f16"
    """Type of the V cache."""
    threads: int = 0
    """Threads; 0: as many as there are free cores."""
    ubatch: int = 512
    """Tokens that are computed at once."""
    gpu_layers: int = -1
    """Layers on the GPU, where llama.cpp was built for one and finds it; −1: all."""


def parse_gguf(spec: str) -> GgufSpec:
    """Read `gguf:FILE?option=value&…`; `kv` sets `k` and `v`. UsageError on an unknown option or
    value.
    """
    known = ["kv", *(f.name for f in fields(GgufSpec)[1:])]
    model, given = read_options(
        spec,
        "gguf:",
        known,
        example="gguf:FILE, such as gguf:./model.Q4_K_M.gguf?kv=q8_0",
        what="file",
    )
    options: dict[str, str] = {}
    for name, value in given:
        options |= {"k": value, "v": value} if name == "kv" else {name: value}
    for name in ("k", "v"):
        if options.get(name, "f16") not in CACHE_TYPES:
            raise usage_error(
                f"{spec!r}: unknown cache type {options[name]!r}",
                f"one of {', '.join(CACHE_TYPES)}",
            )
    return GgufSpec(
        model=model,
        k=options.get("k", "f16"),
        v=options.get("v", "f16"),
        threads=_number(spec, options, "threads", 0, 0),
        ubatch=_number(spec, options, "ubatch", 512, 1),
        gpu_layers=_number(spec, options, "gpu_layers", -1, -1),
    )


def _number(spec: str, options: dict[str, str], name: str, default: int, least: int) -> int:
    try:
        value = int(options.get(name, default))
    except ValueError:
        value = least - 1
    if value < least:
        raise usage_error(
            f"{spec!r}: {name}={options[name]!r} is not a whole number", f"give {least} or more"
        )
    return value


def usage_error(message: str, remedy: str) -> UsageError:
    """The error for a wrong `gguf:` on the command line."""
    return UsageError(message, remedy=remedy, finding_id="fidelity.usage")
