"""FP8, ModelOpt and MX formats: scaled floats with ignore lists."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from assay.checkpoint.quantization import packing
from assay.checkpoint.quantization.declared import Declared, Found, integer, matches, strings
from assay.checkpoint.quantization.fused import listed
from assay.checkpoint.quantization.stored import Kind, stored_kind
from assay.checkpoint.tensors import Params

_PLAIN = frozenset({Kind.PLAIN})
_FP8 = frozenset({Kind.FP8})


def fp8(found: Found) -> Declared:
    """FP8 as DeepSeek and Qwen ship it: weight with weight_scale_inv per tile, or weight_scale."""
    raw = found.raw
    excluded = strings(raw.get("modules_to_not_convert")) + strings(raw.get("ignored_layers"))
    tile = raw.get("weight_block_size")
    block = (tile[0], tile[1]) if isinstance(tile, list) and _pair(tile) else None

    static = raw.get("activation_scheme") == "static"

    def hits(module: str) -> bool:
        return any(module == e or module.startswith(e + ".") or module.endswith("." + e) for e in excluded)

    def accepts(module: str) -> frozenset[Kind] | None:
        if module.endswith("lm_head"):
            return None
        return _PLAIN if listed(module, hits) else _FP8

    def geometry(module: str, params: Params) -> str | None:
        if stored_kind(params) is not Kind.FP8:
            return None
        if block:
            return packing.blocks(params, block)
        if "weight_scale_inv" in params:
            return "it has scales for tiles (weight_scale_inv), and no weight_block_size is declared"
        scale = params.get("weight_scale")
        if found.method == "fp8" and scale is not None and scale.elements > 1:
            return f"weight_scale has {scale.elements} values; this method has one for the whole tensor"
        return None

    return Declared(
        found.method, found.source, raw, accepts, geometry, 8, needs=lambda module: ("input_scale",) if static else (),
    )  # fmt: skip


def _pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(v) is int and v > 0 for v in value)


_MODELOPT = {
    "FP8": _FP8, "FP8_PER_CHANNEL_PER_TOKEN": _FP8, "FP8_PB_WO": _FP8, "NVFP4": frozenset({Kind.NVFP4}),
    "W4A16_NVFP4": frozenset({Kind.NVFP4}), "NVFP4_AWQ": frozenset({Kind.NVFP4}), "MXFP8": frozenset({Kind.MXFP8}),
}  # fmt: skip


def modelopt(found: Found) -> Declared:
    """NVIDIA ModelOpt: one `quant_algo` for all but `exclude_modules`; MIXED_PRECISION names it per layer."""
    raw = found.raw
    inner = raw.get("quantization")
    settings: Mapping[str, Any] = inner if isinstance(inner, Mapping) else raw
    algorithm = str(settings.get("quant_algo") or "").upper()
    globs = strings(settings.get("exclude_modules")) + strings(settings.get("ignore"))
    layers = settings.get("quantized_layers")
    layers = layers if isinstance(layers, Mapping) else {}

    def hits(module: str) -> bool:
        return any(_excluded(module, pattern) for pattern in globs)

    def algorithm_of(module: str) -> str:
        own = layers.get(module)
        return str(own.get("quant_algo") or "").upper() if isinstance(own, Mapping) else algorithm

    def accepts(module: str) -> frozenset[Kind] | None:
        if listed(module, hits):
            return _PLAIN
        if layers and module not in layers:
            return None if module.endswith("lm_head") else _PLAIN
        if layers:
            return _MODELOPT.get(algorithm_of(module))
        return None if module.endswith("lm_head") else _MODELOPT.get(algorithm)

    def geometry(module: str, params: Params) -> str | None:
        own = layers.get(module)
        group = (integer(own, "group_size") if isinstance(own, Mapping) else None) or integer(
            settings, "group_size"
        )
        return packing.halves(params, group or 16) if stored_kind(params) is Kind.NVFP4 else None

    groups = settings.get("config_groups")
    groups = groups.values() if isinstance(groups, Mapping) else ()
    weight_only = any(isinstance(g, Mapping) and not g.get("input_activations") for g in groups)

    def needs(module: str) -> tuple[str, ...]:
        if weight_only:
            return ()
        return ("input_scale",) if algorithm_of(module) in {"FP8", "NVFP4", "NVFP4_AWQ"} else ()

    return Declared(
        "modelopt", found.source, settings, accepts, geometry, algorithm=algorithm or None, needs=needs
    )


def _excluded(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return matches(pattern[3:], module)
    return fnmatch.fnmatchcase(module, pattern) or module.startswith(pattern.rstrip("*") + ".")


def mxfp4(found: Found) -> Declared:
    """MXFP4 of gpt-oss: the routed experts only, stored as blocks and scales."""
    excluded = strings(found.raw.get("modules_to_not_convert"))

    def accepts(module: str) -> frozenset[Kind] | None:
        if ".experts" not in module or any(part in module for part in excluded if "experts" in part):
            return _PLAIN
        return frozenset({Kind.MXFP4})

    return Declared("mxfp4", found.source, found.raw, accepts, bits=4, group_size=32)


def mxfp8(found: Found) -> Declared:
    """MXFP8 as MiniMax ships it: FP8 weights with one power of two for 32 inputs."""
    excluded = strings(found.raw.get("modules_to_not_convert")) + strings(found.raw.get("ignored_layers"))

    def hits(module: str) -> bool:
        return any(module == e or module.startswith(e + ".") or module.endswith("." + e) for e in excluded)

    def accepts(module: str) -> frozenset[Kind] | None:
        if module.endswith("lm_head"):
            return None
        return _PLAIN if listed(module, hits) else frozenset({Kind.MXFP8})

    return Declared("mxfp8", found.source, found.raw, accepts, bits=8, group_size=32)
