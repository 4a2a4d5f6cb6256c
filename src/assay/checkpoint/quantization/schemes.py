"""The registry of quantisation schemes: a new one is one function and one line here."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from assay.checkpoint.quantization import declared, integer_schemes
from assay.checkpoint.quantization.declared import (
    Declared,
    Found,
    Kind,
    integer,
    listed,
    matches,
    no_geometry,
    stored_kind,
    strings,
)
from assay.checkpoint.safetensors import FP8, Params
from assay.checkpoint.subject import Checkpoint

# -----------------------------------------------------------------------------
# FP8, ModelOpt and MX formats: scaled floats with ignore lists.

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
            return integer_schemes.blocks(params, block)
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
        return integer_schemes.halves(params, group or 16) if stored_kind(params) is Kind.NVFP4 else None

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


# -----------------------------------------------------------------------------
# compressed-tensors (llm-compressor): groups of targets, each with a scheme and a format of its own.

_FORMATS: Mapping[str, frozenset[Kind]] = {
    "pack-quantized": frozenset({Kind.PACKED}), "marlin-24": frozenset({Kind.PACKED, Kind.OTHER}),
    "float-quantized": frozenset({Kind.FP8}), "naive-quantized": frozenset({Kind.FP8, Kind.INT8}),
    "int-quantized": frozenset({Kind.INT8}), "nvfp4-pack-quantized": frozenset({Kind.NVFP4_PACKED}),
    "mxfp4-pack-quantized": frozenset({Kind.MXFP4}), "mxfp8-quantized": frozenset({Kind.MXFP8}),
    "dense": _PLAIN,
}  # fmt: skip

Targets = Callable[[str], bool]


@dataclass(frozen=True)
class _Group:
    hits: Targets
    kinds: frozenset[Kind] | None
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any]


_NOTHING = _Group(lambda module: True, _PLAIN, {}, {})


def compressed_tensors(found: Found) -> Declared:
    """compressed-tensors: groups of targets, each with its own format; `ignore` by exact name or `re:` pattern."""
    raw = found.raw
    ignored = strings(raw.get("ignore"))
    overall = str(raw.get("format") or "")
    groups: list[_Group] = []
    listed_groups = raw.get("config_groups")
    for group in listed_groups.values() if isinstance(listed_groups, Mapping) else ():
        if isinstance(group, Mapping):
            weights, inputs = _object(group.get("weights")), _object(group.get("input_activations"))
            kinds = _FORMATS.get(str(group.get("format") or overall)) if weights else _PLAIN
            groups.append(_Group(_targets(strings(group.get("targets"))), kinds, weights, inputs))

    def ignores(module: str) -> bool:
        return any(i == module or (i.startswith("re:") and matches(i[3:], module)) for i in ignored)

    def group_of(module: str) -> _Group:
        return next((g for g in groups if g.hits(module)), _NOTHING)

    def accepts(module: str) -> frozenset[Kind] | None:
        return _PLAIN if listed(module, ignores) else group_of(module).kinds

    def geometry(module: str, params: Params) -> str | None:
        weights, kind = group_of(module).weights, stored_kind(params)
        bits, size = integer(weights, "num_bits"), integer(weights, "group_size")
        if "weight_scale" not in params:
            return None
        if kind is Kind.PACKED and bits is not None and 1 <= bits <= 8:
            return integer_schemes.compressed(params, bits, size)
        if kind in {Kind.NVFP4_PACKED, Kind.MXFP4} and size and "weight_packed" in params:
            return integer_schemes.halves(params, size, "weight_packed")
        if kind in {Kind.FP8, Kind.INT8}:
            return _scales(params, weights)
        return None

    def needs(module: str) -> tuple[str, ...]:
        group = group_of(module)
        names = (
            ("weight_zero_point",)
            if _integers(group.weights) and group.weights.get("symmetric") is False
            else ()
        )
        if not group.inputs:
            return names
        if group.inputs.get("dynamic") == "local":
            return (*names, "input_global_scale")
        return (*names, "input_scale") if group.inputs.get("dynamic") is False else names

    def unwanted(module: str) -> tuple[str, ...]:
        return ("weight_zero_point",) if group_of(module).weights.get("symmetric") is True else ()

    return Declared(
        "compressed-tensors", found.source, raw, accepts, geometry if groups else no_geometry,
        bits_of=lambda module: integer(group_of(module).weights, "num_bits"), needs=needs, unwanted=unwanted,
    )  # fmt: skip


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _integers(weights: Mapping[str, Any]) -> bool:
    return weights.get("type") == "int"


def _scales(params: Params, weights: Mapping[str, Any]) -> str | None:
    """Scales of an unpacked weight by strategy: one for all, one a row, one a tile."""
    shape, scale = params["weight"].shape, params["weight_scale"]
    if len(shape) != 2:
        return None
    strategy, block = weights.get("strategy"), weights.get("block_structure")
    if strategy == "tensor" and scale.elements != 1:
        return f"weight_scale has {scale.elements} values, one for the whole tensor is declared"
    if strategy == "channel" and scale.elements != shape[0]:
        return f"weight_scale has {scale.elements} values, one a row needs {shape[0]}"
    if (
        strategy == "block"
        and isinstance(block, list)
        and len(block) == 2
        and all(type(b) is int and b > 0 for b in block)
    ):
        return integer_schemes.blocks(params, (block[0], block[1]))
    return None


def _targets(names: tuple[str, ...]) -> Targets:
    """Whether a group's targets hit a Linear: by class name, by module name, or by `re:` pattern."""

    def hits(module: str) -> bool:
        return any(
            n in {"Linear", "FusedMoE"} or module == n or module.endswith("." + n)
            or (n.startswith("re:") and matches(n[3:], module))
            for n in names
        )  # fmt: skip

    return hits


# -----------------------------------------------------------------------------
# bitsandbytes, torchao, HQQ, and the formats that assay recognises without opening them.


def bitsandbytes(found: Found) -> Declared:
    """bitsandbytes: every Linear but `llm_int8_skip_modules` (the output head by default), 4 or 8 bits."""
    raw = found.raw
    four = bool(raw.get("load_in_4bit") or raw.get("_load_in_4bit"))
    skipped = strings(raw.get("llm_int8_skip_modules"))

    def accepts(module: str) -> frozenset[Kind] | None:
        if module.endswith("lm_head"):
            return None
        if any(part in module.split(".") or module.startswith(part) for part in skipped):
            return _PLAIN
        return frozenset({Kind.BNB4 if four else Kind.BNB8})

    def geometry(module: str, params: Params) -> str | None:
        if four and "weight" in params and "weight.absmax" in params:
            return integer_schemes.four_bit_blocks(params)
        return None

    return Declared("bitsandbytes", found.source, raw, accepts, geometry, bits=4 if four else 8)


def torchao(found: Found) -> Declared:
    """torchao: tensors of its own, flattened into parts; the recipe of `quant_type.default` holds for all."""
    raw = found.raw
    recipes = raw.get("quant_type")
    recipe = recipes.get("default") if isinstance(recipes, Mapping) else None
    only = isinstance(recipes, Mapping) and set(recipes) == {"default"}
    settings = recipe.get("_data") if isinstance(recipe, Mapping) and only else None
    group = _granularity(settings) if isinstance(settings, Mapping) else 0

    def accepts(module: str) -> frozenset[Kind] | None:
        if module.endswith("lm_head") or module in strings(raw.get("modules_to_not_convert")):
            return None
        return frozenset({Kind.TORCHAO})

    def geometry(module: str, params: Params) -> str | None:
        data, scale = params.get("_weight_qdata"), params.get("_weight_scale")
        if group == 0 or data is None or scale is None or len(data.shape) != 2:
            return None
        if data.dtype not in {"I8", *FP8}:
            return None  # packed for one kernel, whose layout is its own
        return integer_schemes.grouped(data.shape[0], data.shape[1], scale.shape, group)

    return Declared("torchao", found.source, raw, accepts, geometry, group_size=group or None)


def _granularity(settings: Mapping[str, Any]) -> int | None:
    """Group size of a recipe: a number, None for one scale a row, 0 where it does not say."""
    granularity = settings.get("granularity")
    if not isinstance(granularity, Mapping):
        return integer(settings, "group_size") or 0
    inner = granularity.get("_data")
    if granularity.get("_type") == "PerGroup" and isinstance(inner, Mapping):
        return integer(inner, "group_size") or 0
    return None if granularity.get("_type") in {"PerRow", "PerAxis"} else 0


def hqq(found: Found) -> Declared:
    """HQQ: W_q with its metadata beside it, but for `skip_modules`; `quant_config` may differ from layer to layer."""
    skipped = strings(found.raw.get("skip_modules"))
    config = found.raw.get("quant_config")
    weights = config.get("weight_quant_params") if isinstance(config, Mapping) else None
    bits = integer(weights, "nbits") if isinstance(weights, Mapping) else None

    def accepts(module: str) -> frozenset[Kind] | None:
        if any(part in module.split(".") for part in skipped):
            return _PLAIN
        return frozenset({Kind.HQQ})

    return Declared("hqq", found.source, found.raw, accepts, bits=bits, bits_of=lambda module: bits)


def unopened(found: Found) -> Declared:
    """A method that assay knows by name only: nothing is said about single modules."""
    return Declared(found.method, found.source, found.raw, lambda module: None)


# -----------------------------------------------------------------------------

SCHEMES: Mapping[str, Callable[[Found], Declared]] = {
    "gptq": integer_schemes.gptq,
    "awq": integer_schemes.awq,
    "auto-round": integer_schemes.auto_round,
    "inc": integer_schemes.auto_round,
    "fp8": fp8,
    "fbgemm_fp8": fp8,
    "modelopt": modelopt,
    "modelopt_fp4": modelopt,
    "modelopt_mixed": modelopt,
    "mxfp8": mxfp8,
    "mxfp4": mxfp4,
    "compressed-tensors": compressed_tensors,
    "bitsandbytes": bitsandbytes,
    "torchao": torchao,
    "hqq": hqq,
}

KNOWN_BY_NAME = frozenset({
    "quark", "aqlm", "eetq", "bitnet", "exl2", "exl3", "polar", "fp_quant", "spqr", "vptq", "higgs", "quanto",
    "gguf", "mlx", "sinq", "paroquant",
})  # fmt: skip


def parse(checkpoint: Checkpoint) -> Declared | None:
    """The checkpoint's declaration, understood; None if it declares nothing."""
    found = declared.find(checkpoint)
    if found is None:
        return None
    return SCHEMES.get(found.method, unopened)(found)
