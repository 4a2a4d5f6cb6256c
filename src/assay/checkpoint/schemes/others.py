"""bitsandbytes, torchao, HQQ, and formats that assay knows by name only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assay.checkpoint.declaration import Found
from assay.checkpoint.declared import Declared
from assay.checkpoint.matching import integer, strings
from assay.checkpoint.schemes.shapes import four_bit_blocks, grouped
from assay.checkpoint.storage import PLAIN, Kind
from assay.checkpoint.tensors import FP8, Params


def bitsandbytes(found: Found) -> Declared:
    """bitsandbytes: every Linear but `llm_int8_skip_modules` (the output head by default), 4 or 8
    bits.
    """
    raw = found.raw
    four = bool(raw.get("load_in_4bit") or raw.get("_load_in_4bit"))
    skipped = strings(raw.get("llm_int8_skip_modules"))

    def accepts(module: str) -> frozenset[Kind] | None:
        if module.endswith("lm_head"):
            return None
        if any(part in module.split(".") or module.startswith(part) for part in skipped):
            return PLAIN
        return frozenset({Kind.BNB4 if four else Kind.BNB8})

    def geometry(module: str, params: Params) -> str | None:
        return (
            four_bit_blocks(params)
            if four and {"weight", "weight.absmax"} <= params.keys()
            else None
        )

    return Declared("bitsandbytes", found.source, raw, accepts, geometry, 4 if four else 8)


def torchao(found: Found) -> Declared:
    """torchao: tensors of its own, flattened into parts; the recipe of `quant_type.default` holds
    for all.
    """
    raw = found.raw
    recipes = raw.get("quant_type")
    recipe = (
        recipes.get("default")
        if isinstance(recipes, dict) and set(recipes) == {"default"}
        else None
    )
    settings = recipe.get("_data") if isinstance(recipe, dict) else None
    group = _granularity(settings) if isinstance(settings, dict) else 0
    excluded = strings(raw.get("modules_to_not_convert"))

    def accepts(module: str) -> frozenset[Kind] | None:
        return (
            None if module.endswith("lm_head") or module in excluded else frozenset({Kind.TORCHAO})
        )

    def geometry(module: str, params: Params) -> str | None:
        data, scale = params.get("_weight_qdata"), params.get("_weight_scale")
        if (
            group == 0
            or data is None
            or scale is None
            or len(data.shape) != 2
            or data.dtype not in {"I8", *FP8}
        ):
            return None  # other types are packed for one kernel, whose layout is its own
        return grouped(data.shape[0], data.shape[1], scale.shape, group)

    unexamined = (
        "" if isinstance(settings, dict) else "the torchao recipe is not one for all modules"
    )
    return Declared(
        "torchao", found.source, raw, accepts, geometry, None, group or None, unexamined=unexamined
    )


def _granularity(settings: Mapping[str, Any]) -> int | None:
    """Group size of a recipe: a number, None for one scale a row, 0 where it does not say."""
    granularity = settings.get("granularity")
    if not isinstance(granularity, dict):
        return integer(settings, "group_size") or 0
    inner, form = granularity.get("_data"), granularity.get("_type")
    if form == "PerGroup" and isinstance(inner, dict):
        return integer(inner, "group_size") or 0
    return None if form in ("PerRow", "PerAxis") else 0


def hqq(found: Found) -> Declared:
    """HQQ: W_q with its metadata beside it, but for `skip_modules`; `quant_config` may differ from
    layer to layer.
    """
    skipped = strings(found.raw.get("skip_modules"))
    weights = (found.raw.get("quant_config") or {}).get("weight_quant_params") or {}
    bits = integer(weights, "nbits")

    def accepts(module: str) -> frozenset[Kind] | None:
        return (
            PLAIN if any(part in module.split(".") for part in skipped) else frozenset({Kind.HQQ})
        )

    return Declared("hqq", found.source, found.raw, accepts, bits=bits, bits_of=lambda module: bits)


def modelslim(found: Found) -> Declared:
    """ModelSlim (Ascend): one description a tensor, `FLOAT` or such as `W8A8_DYNAMIC`."""
    described = {k: v for k, v in found.raw.items() if isinstance(v, str)}
    strange = sorted(
        {v for k, v in described.items() if k.endswith(".weight") and v != "FLOAT"}
        - {v for v in described.values() if v.startswith(_EIGHT_BITS)}
    )

    def accepts(module: str) -> frozenset[Kind] | None:
        kind = described.get(f"{module}.weight")
        if kind == "FLOAT":
            return PLAIN
        return frozenset({Kind.INT8}) if kind and kind.startswith(_EIGHT_BITS) else None

    unexamined = f"the ModelSlim types {', '.join(strange)[:80]} are not known" if strange else ""
    return Declared("ascend", found.source, found.raw, accepts, unexamined=unexamined)


_EIGHT_BITS = ("W8A8", "W8A16")

KNOWN_BY_NAME = frozenset(
    {
        "quark",
        "aqlm",
        "eetq",
        "bitnet",
        "exl2",
        "exl3",
        "polar",
        "fp_quant",
        "spqr",
        "vptq",
        "higgs",
        "quanto",
        "gguf",
        "sinq",
        "paroquant",
    }
)


def unopened(found: Found) -> Declared:
    """A method that assay knows by name only, or not at all: nothing is said about single
    modules.
    """
    known = "known by name only" if found.method in KNOWN_BY_NAME else "not known"
    text = f"the quantisation method {found.method or '(unnamed)'} is {known}"
    return Declared(found.method, found.source, found.raw, lambda module: None, unexamined=text)
