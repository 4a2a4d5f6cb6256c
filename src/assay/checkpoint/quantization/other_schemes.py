"""bitsandbytes, torchao, HQQ, and the formats that assay recognises without opening them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assay.checkpoint.quantization import packing
from assay.checkpoint.quantization.declared import Declared, Found, integer, strings
from assay.checkpoint.quantization.stored import Kind
from assay.checkpoint.tensors import FP8, Params

_PLAIN = frozenset({Kind.PLAIN})


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
            return packing.four_bit_blocks(params)
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
        return packing.grouped(data.shape[0], data.shape[1], scale.shape, group)

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
