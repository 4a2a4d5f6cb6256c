"""The registry of quantisation schemes: a new one is one function and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from assay.checkpoint.quantization import declared
from assay.checkpoint.quantization.declared import (
    PLAIN,
    Declared,
    Found,
    Kind,
    accepting,
    integer,
    listed,
    named,
    pattern,
    stored_kind,
    strings,
)
from assay.checkpoint.quantization.integer_schemes import (
    auto_round,
    awq,
    blocks,
    compressed,
    four_bit_blocks,
    gptq,
    grouped,
    halves,
    mlx,
)
from assay.checkpoint.safetensors import FP8, Params
from assay.checkpoint.subject import Checkpoint

# -----------------------------------------------------------------------------
# FP8, ModelOpt and MX formats: scaled floats with ignore lists.

_FP8, _MXFP8, _NVFP4 = frozenset({Kind.FP8}), frozenset({Kind.MXFP8}), frozenset({Kind.NVFP4})
_MX_BLOCK = (1, 32)


def fp8(found: Found) -> Declared:
    """FP8 with a scale for a tile (DeepSeek, Qwen) or a tensor; MXFP8 (MiniMax) has a power of two for 32 inputs."""
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
            return "it has scales for tiles (weight_scale_inv), and no weight_block_size is declared"
        scale = params.get("weight_scale")
        if found.method == "fp8" and scale is not None and scale.elements > 1:
            return f"weight_scale has {scale.elements} values; this method has one for the whole tensor"
        return None

    needed = ("input_scale",) if raw.get("activation_scheme") == "static" else ()
    accepts = accepting(_MXFP8 if block == _MX_BLOCK else _FP8, hits)
    group = 32 if found.method == "mxfp8" else None
    return Declared(found.method, found.source, raw, accepts, geometry, 8, group, needs=lambda module: needed)


_ALGORITHMS = {
    "FP8": _FP8, "FP8_PER_CHANNEL_PER_TOKEN": _FP8, "FP8_PB_WO": _FP8, "NVFP4": _NVFP4, "W4A16_NVFP4": _NVFP4,
    "NVFP4_AWQ": _NVFP4, "MXFP8": _MXFP8,
}  # fmt: skip


def modelopt(found: Found) -> Declared:
    """NVIDIA ModelOpt: one `quant_algo` for all but `exclude_modules`; MIXED_PRECISION names it per layer."""
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
        group = integer(layers.get(module, {}), "group_size") or integer(settings, "group_size") or 16
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
        "modelopt", found.source, settings, accepts, geometry, algorithm=algorithm or None, needs=needs,
        unexamined=unexamined,
    )  # fmt: skip


def mxfp4(found: Found) -> Declared:
    """MXFP4 of gpt-oss: the routed experts only, stored as blocks and scales."""
    excluded = [part for part in strings(found.raw.get("modules_to_not_convert")) if "experts" in part]

    def accepts(module: str) -> frozenset[Kind] | None:
        left_out = ".experts" not in module or any(part in module for part in excluded)
        return PLAIN if left_out else frozenset({Kind.MXFP4})

    return Declared("mxfp4", found.source, found.raw, accepts, bits=4, group_size=32)


# -----------------------------------------------------------------------------
# compressed-tensors (llm-compressor): groups of targets, each with a scheme and a format of its own.

_FORMATS: Mapping[str, frozenset[Kind]] = {
    "pack-quantized": frozenset({Kind.PACKED}), "marlin-24": frozenset({Kind.PACKED, Kind.OTHER}),
    "float-quantized": _FP8, "naive-quantized": frozenset({Kind.FP8, Kind.INT8}),
    "int-quantized": frozenset({Kind.INT8}), "nvfp4-pack-quantized": frozenset({Kind.NVFP4_PACKED}),
    "mxfp4-pack-quantized": frozenset({Kind.MXFP4}), "mxfp8-quantized": _MXFP8, "dense": PLAIN,
}  # fmt: skip


@dataclass(frozen=True)
class _Group:
    targets: tuple[str, ...]
    format: str
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any]

    @property
    def kinds(self) -> frozenset[Kind] | None:
        return _FORMATS.get(self.format) if self.weights else PLAIN

    def hits(self, module: str) -> bool:
        """Whether the targets name a Linear: by class name, by module name, or by `re:` pattern."""
        return any(
            t in {"Linear", "FusedMoE"} or module == t or module.endswith("." + t) or _matches(t, module)
            for t in self.targets
        )


_NOTHING = _Group((), "dense", {}, {})


def _matches(name: str, module: str) -> bool:
    found = pattern(name[3:]) if name.startswith("re:") else None
    return found is not None and found.match(module) is not None


def compressed_tensors(found: Found) -> Declared:
    """compressed-tensors: groups of targets, each with its own format; `ignore` by exact name or `re:` pattern."""
    raw = found.raw
    ignored = strings(raw.get("ignore"))
    groups = [
        _Group(
            strings(g.get("targets")), g.get("format") or raw.get("format") or "", g.get("weights") or {},
            g.get("input_activations") or {},
        )
        for g in (raw.get("config_groups") or {}).values()
    ]  # fmt: skip

    def group_of(module: str) -> _Group:
        return next((g for g in groups if g.hits(module)), _NOTHING)

    def accepts(module: str) -> frozenset[Kind] | None:
        ignores = listed(module, lambda name: any(i == name or _matches(i, name) for i in ignored))
        return PLAIN if ignores else group_of(module).kinds

    def geometry(module: str, params: Params) -> str | None:
        weights, kind = group_of(module).weights, stored_kind(params)
        bits, size = integer(weights, "num_bits"), integer(weights, "group_size")
        if "weight_scale" not in params:
            return None
        if kind is Kind.PACKED and bits is not None and bits <= 8:
            return compressed(params, bits, size)
        if kind in {Kind.NVFP4_PACKED, Kind.MXFP4} and size and "weight_packed" in params:
            return halves(params, size, "weight_packed")
        return _scales(params, weights) if kind in {Kind.FP8, Kind.INT8} else None

    def needs(module: str) -> tuple[str, ...]:
        group = group_of(module)
        asymmetric = group.weights.get("type") == "int" and group.weights.get("symmetric") is False
        names = ("weight_zero_point",) if asymmetric else ()
        if not group.inputs:
            return names
        if group.inputs.get("dynamic") == "local":
            return (*names, "input_global_scale")
        return (*names, "input_scale") if group.inputs.get("dynamic") is False else names

    def unwanted(module: str) -> tuple[str, ...]:
        return ("weight_zero_point",) if group_of(module).weights.get("symmetric") is True else ()

    strange = ", ".join(sorted({g.format or "(unnamed)" for g in groups if g.kinds is None}))
    return Declared(
        "compressed-tensors", found.source, raw, accepts, geometry,
        bits_of=lambda module: integer(group_of(module).weights, "num_bits"), needs=needs, unwanted=unwanted,
        unexamined=f"the compressed-tensors format {strange} is not known" if strange else "",
    )  # fmt: skip


def _scales(params: Params, weights: Mapping[str, Any]) -> str | None:
    """Scales of an unpacked weight by strategy: one for all, one a row, one a tile."""
    shape, scale = params["weight"].shape, params["weight_scale"]
    strategy, block = weights.get("strategy"), weights.get("block_structure")
    if len(shape) != 2:
        return None
    if strategy == "tensor" and scale.elements != 1:
        return f"weight_scale has {scale.elements} values, one for the whole tensor is declared"
    if strategy == "channel" and scale.elements != shape[0]:
        return f"weight_scale has {scale.elements} values, one a row needs {shape[0]}"
    return blocks(params, (block[0], block[1])) if strategy == "block" and block else None


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
            return PLAIN
        return frozenset({Kind.BNB4 if four else Kind.BNB8})

    def geometry(module: str, params: Params) -> str | None:
        return four_bit_blocks(params) if four and {"weight", "weight.absmax"} <= params.keys() else None

    return Declared("bitsandbytes", found.source, raw, accepts, geometry, 4 if four else 8)


def torchao(found: Found) -> Declared:
    """torchao: tensors of its own, flattened into parts; the recipe of `quant_type.default` holds for all."""
    raw = found.raw
    recipes = raw.get("quant_type")
    recipe = recipes.get("default") if isinstance(recipes, dict) and set(recipes) == {"default"} else None
    settings = recipe.get("_data") if isinstance(recipe, dict) else None
    group = _granularity(settings) if isinstance(settings, dict) else 0
    excluded = strings(raw.get("modules_to_not_convert"))

    def accepts(module: str) -> frozenset[Kind] | None:
        return None if module.endswith("lm_head") or module in excluded else frozenset({Kind.TORCHAO})

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

    unexamined = "" if isinstance(settings, dict) else "the torchao recipe is not one for all modules"
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
    """HQQ: W_q with its metadata beside it, but for `skip_modules`; `quant_config` may differ from layer to layer."""
    skipped = strings(found.raw.get("skip_modules"))
    weights = (found.raw.get("quant_config") or {}).get("weight_quant_params") or {}
    bits = integer(weights, "nbits")

    def accepts(module: str) -> frozenset[Kind] | None:
        return PLAIN if any(part in module.split(".") for part in skipped) else frozenset({Kind.HQQ})

    return Declared("hqq", found.source, found.raw, accepts, bits=bits, bits_of=lambda module: bits)


KNOWN_BY_NAME = frozenset({
    "quark", "aqlm", "eetq", "bitnet", "exl2", "exl3", "polar", "fp_quant", "spqr", "vptq", "higgs", "quanto",
    "gguf", "sinq", "paroquant",
})  # fmt: skip


def unopened(found: Found) -> Declared:
    """A method that assay knows by name only, or not at all: nothing is said about single modules."""
    known = "known by name only" if found.method in KNOWN_BY_NAME else "not known"
    text = f"the quantisation method {found.method or '(unnamed)'} is {known}"
    return Declared(found.method, found.source, found.raw, lambda module: None, unexamined=text)


# -----------------------------------------------------------------------------

SCHEMES: Mapping[str, Callable[[Found], Declared]] = {
    "gptq": gptq, "awq": awq, "auto-round": auto_round, "inc": auto_round, "mlx": mlx, "fp8": fp8, "fbgemm_fp8": fp8,
    "mxfp8": fp8, "modelopt": modelopt, "modelopt_fp4": modelopt, "modelopt_mixed": modelopt, "mxfp4": mxfp4,
    "compressed-tensors": compressed_tensors, "bitsandbytes": bitsandbytes, "torchao": torchao, "hqq": hqq,
}  # fmt: skip


def parse(checkpoint: Checkpoint) -> Declared | None:
    """The checkpoint's declaration, understood; None if it declares nothing."""
    found = declared.find(checkpoint)
    return SCHEMES.get(found.method, unopened)(found) if found is not None else None
