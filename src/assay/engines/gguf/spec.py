"""How a model of llama.cpp is written: `gguf:FILE?kv=q8_0&threads=8`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from assay.engines.options import read_options
from assay.errors import UsageError

# Of ggml's types, those that a KV cache may have, and their numbers (ggml.h).
CACHE_TYPES = {
    "f32": 0, "f16": 1, "bf16": 30, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20,
}  # fmt: skip


@dataclass(frozen=True)
class GgufSpec:
    """One GGUF file and how llama.cpp runs it."""

    model: str
    k: str = "f16"
    """Type of the K cache."""
    v: str = "f16"
    """Type of the V cache."""
    threads: int = 0
    """Threads; 0: as many as there are cores."""
    ubatch: int = 512
    """Tokens that are computed at once."""
    gpu_layers: int = 0
    """Layers on the GPU; −1: all."""


def parse_spec(spec: str) -> GgufSpec:
    """Read `gguf:FILE?option=value&…`; `kv` sets `k` and `v`. UsageError on an unknown option or value."""
    known = ["kv", *(f.name for f in fields(GgufSpec)[1:])]
    model, given = read_options(
        spec, "gguf:", known, example="gguf:FILE, such as gguf:./model.Q4_K_M.gguf?kv=q8_0", what="file"
    )
    options: dict[str, str] = {}
    for name, value in given:
        options |= {"k": value, "v": value} if name == "kv" else {name: value}
    for name in ("k", "v"):
        if options.get(name, "f16") not in CACHE_TYPES:
            raise _usage(
                f"{spec!r}: unknown cache type {options[name]!r}", f"one of {', '.join(CACHE_TYPES)}"
            )
    return GgufSpec(
        model=model,
        k=options.get("k", "f16"),
        v=options.get("v", "f16"),
        threads=_number(spec, options, "threads", 0, 0),
        ubatch=_number(spec, options, "ubatch", 512, 1),
        gpu_layers=_number(spec, options, "gpu_layers", 0, -1),
    )


def _number(spec: str, options: dict[str, str], name: str, default: int, least: int) -> int:
    try:
        value = int(options.get(name, default))
    except ValueError:
        value = least - 1
    if value < least:
        raise _usage(f"{spec!r}: {name}={options[name]!r} is not a whole number", f"give {least} or more")
    return value


def _usage(message: str, remedy: str) -> UsageError:
    return UsageError(message, remedy=remedy, finding_id="fidelity.usage")
