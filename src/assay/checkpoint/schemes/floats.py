"""Schemes of scaled floats: FP8, ModelOpt and the MX formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assay.checkpoint.declaration import Found
from assay.checkpoint.declared import Declared, accepting
from assay.checkpoint.matching import integer, listed, named, strings
from assay.checkpoint.schemes.shapes import blocks, halves
from assay.checkpoint.storage import PLAIN, Kind, stored_kind
from assay.checkpoint.tensors import Params

FP8_KINDS, MXFP8_KINDS, NVFP4_KINDS = (
    frozenset({Kind.FP8}),
    frozenset({Kind.MXFP8}),
    frozenset({Kind.NVFP4}),
)

_MX_BLOCK = (1, 32)


def fp8(found: Found) -> Declared:
    """FP8 with a scale for a tile (DeepSeek, Qwen) or a tensor; MXFP8 (MiniMax) has a power of two
    for 32 inputs.
    """
    raw = found.raw
    hits = named(strings(raw.get("modules_to_not_convert")) + strings(raw.get("ignored_layers")))
    tile = raw.get("weight_block_size") or (_MX_BLOCK if found.method == "mxfp8" else None)
    block = (tile[0], tile[1]) if tile else None

    def geometry(module: str, params: Params) -> str | None:
        if stored_kind(params) not in {Kind.FP8, Kind.MXFP8}:
            return None
        if block:
            return blocks(params, block)
        if "weight_scale_inv" in params:
            return (
                "it has scales for tiles (weight_scale_inv), and no weight_block_size is declared"
            )
        scale = params.get("weight_scale")
        if found.method == "fp8" and scale is not None and scale.elements > 1:
            return (
                f"weight_scale has {scale.elements} values; this method has one for the whole"
                " tensor"
            )
        return None

    needed = ("input_scale",) if raw.get("activation_scheme") == "static" else ()
    accepts = accepting(MXFP8_KINDS if block == _MX_BLOCK else FP8_KINDS, hits)
    group = 32 if found.method == "mxfp8" else None
    return Declared(
        found.method, found.source, raw, accepts, geometry, 8, group, needs=lambda module: needed
    )


_ALGORITHMS = {
    "FP8": FP8_KINDS,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8_KINDS,
    "FP8_PB_WO": FP8_KINDS,
    "NVFP4": NVFP4_KINDS,
    "W4A16_NVFP4": NVFP4_KINDS,
    "NVFP4_AWQ": NVFP4_KINDS,
    "MXFP8": MXFP8_KINDS,
}


def modelopt(found: Found) -> Declared:
    """NVIDIA ModelOpt: one `quant_algo` for all but `exclude_modules`; MIXED_PRECISION names it per
    layer.
    """
    settings: Mapping[str, Any] = found.raw.get("quantization") or found.raw
    algorithm = (settings.get("quant_algo") or "").upper()
    layers = settings.get("quantized_layers") or {}
    hits = named(strings(settings.get("exclude_modules")) + strings(settings.get("ignore")))

    def algorithm_of(module: str) -> str:
        return (layers[module].get("quant_algo") or "").upper() if module in layers else algorithm

    def accepts(module: str) -> frozenset[Kind] | None:
        if listed(module, hits):
            return PLAIN
        if layers and module in layers:
            return _ALGORITHMS.get(algorithm_of(module))
        if module.endswith("lm_head"):
            return None
        return PLAIN if layers else _ALGORITHMS.get(algorithm)

    def geometry(module: str, params: Params) -> str | None:
        group = (
            integer(layers.get(module, {}), "group_size") or integer(settings, "group_size") or 16
        )
        return halves(params, group) if stored_kind(params) is Kind.NVFP4 else None

    groups = (settings.get("config_groups") or {}).values()
    weight_only = any(not g.get("input_activations") for g in groups)

    def needs(module: str) -> tuple[str, ...]:
        static = algorithm_of(module) in {"FP8", "NVFP4", "NVFP4_AWQ"}
        return ("input_scale",) if static and not weight_only else ()

    used = {algorithm_of(m) for m in layers} if layers else {algorithm}
    strange = ", ".join(sorted(used - _ALGORITHMS.keys() - {""}))
    unexamined = f"the ModelOpt algorithm {strange} is not known" if strange else ""
    return Declared(
        "modelopt",
        found.source,
        settings,
        accepts,
        geometry,
        algorithm=algorithm or None,
        needs=needs,
        unexamined=unexamined,
    )


def mxfp4(found: Found) -> Declared:
    """MXFP4 of gpt-oss: the routed experts only, stored as blocks and scales."""
    excluded = [
        part for part in strings(found.raw.get("modules_to_not_convert")) if "experts" in part
    ]

    def accepts(module: str) -> frozenset[Kind] | None:
        left_out = ".experts" not in module or any(part in module for part in excluded)
        return PLAIN if left_out else frozenset({Kind.MXFP4})

    return Declared("mxfp4", found.source, found.raw, accepts, bits=4, group_size=32)
