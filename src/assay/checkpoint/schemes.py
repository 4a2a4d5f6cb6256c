"""The registry of quantisation schemes: a new one is one function and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from assay.checkpoint import declared
from assay.checkpoint.declared import (
    PLAIN,
    Declared,
    Found,
    Geometry,
    Kind,
    accepting,
    integer,
    listed,
    named,
    pattern,
    stored_kind,
    strings,
)
from assay.checkpoint.safetensors import FP8, Params
from assay.checkpoint.subject import Checkpoint

# Shapes of packed weights: do bits, group size and the tensors agree?


def gptq_shapes(params: Params, bits: int, group_size: int) -> str | None:
    """GPTQ: qweight [in·bits/32, out], scales [in/group, out], qzeros [in/group, out·bits/32],
    g_idx [in].
    """
    qweight, scales, zeros = (params[k].shape for k in ("qweight", "scales", "qzeros"))
    if not len(qweight) == len(scales) == len(zeros) == 2:
        return "qweight, scales and qzeros are not all matrices"
    width, out = qweight[0] * 32 // bits, scales[1]
    if qweight[1] != out:
        return f"qweight has {qweight[1]} columns, scales {out}"
    groups = _groups(width, group_size)
    if scales[0] != groups:
        return (
            f"{scales[0]} rows of scales; {width} inputs at {bits} bits in groups of {group_size}"
            f" need {groups}"
        )
    if zeros != (groups, (out * bits + 31) // 32):
        return f"qzeros is {list(zeros)}, {bits} bits need {[groups, (out * bits + 31) // 32]}"
    index = params.get("g_idx")
    if index is not None and index.shape not in {(width,), (0,)}:
        return f"g_idx has {list(index.shape)} entries, qweight packs {width} inputs at {bits} bits"
    return None


def awq_shapes(params: Params, bits: int, group_size: int) -> str | None:
    """AWQ: qweight [in, out·bits/32], scales [in/group, out], qzeros [in/group, out·bits/32]."""
    qweight, scales, zeros = (params[k].shape for k in ("qweight", "scales", "qzeros"))
    if not len(qweight) == len(scales) == len(zeros) == 2:
        return "qweight, scales and qzeros are not all matrices"
    width, out = qweight[0], scales[1]
    if qweight[1] * 32 // bits != out:
        return f"qweight packs {qweight[1] * 32 // bits} outputs at {bits} bits, scales have {out}"
    groups = _groups(width, group_size)
    if scales[0] != groups:
        return f"{scales[0]} rows of scales; {width} inputs in groups of {group_size} need {groups}"
    if zeros != (groups, qweight[1]):
        return f"qzeros is {list(zeros)}, should be {[groups, qweight[1]]}"
    return None


def mlx_shapes(params: Params, bits: int, group_size: int) -> str | None:
    """MLX: weight [out, in·bits/32] of 32-bit words, scales [out, in/group]; experts have one axis
    more.
    """
    words, scales = params["weight"].shape, params["scales"].shape
    if not words or words[:-1] != scales[:-1]:
        return f"weight is {list(words)}, its scales are {list(scales)}"
    if words[-1] * 32 != scales[-1] * group_size * bits:
        stored = words[-1] * 32 / max(scales[-1] * group_size, 1)
        return (
            f"{words[-1]} words and {scales[-1]} scales a row hold {stored:g} bits in groups of"
            f" {group_size}, not {bits}"
        )
    return None


def compressed(params: Params, bits: int, group_size: int | None) -> str | None:
    """compressed-tensors: weight_packed [out, in·bits/32] I32, weight_scale [out, in/group],
    weight_shape [2].
    """
    packed, scale = params["weight_packed"].shape, params["weight_scale"].shape
    if len(packed) != 2 or len(scale) != 2:
        return "weight_packed and weight_scale are not matrices"
    per_word = 32 // bits
    if packed[0] != scale[0]:
        return f"weight_packed has {packed[0]} rows, weight_scale {scale[0]}"
    if group_size and group_size > 0:
        width = packed[1] * per_word
        lowest, highest = -(-(width - per_word + 1) // group_size), -(-width // group_size)
        if not lowest <= scale[1] <= highest:
            return (
                f"{scale[1]} scales a row; {width} inputs at {bits} bits in groups of {group_size}"
                f" need {highest}"
            )
    return None


def halves(params: Params, group_size: int, weight: str = "weight") -> str | None:
    """Two 4-bit values a byte along the inputs: weight [out, in/2] U8, weight_scale [out,
    in/group].
    """
    packed, scale = (
        params[weight].shape,
        params["weight_scale"].shape if "weight_scale" in params else (),
    )
    if len(packed) != 2 or len(scale) != 2 or group_size < 1:
        return None
    wanted = (packed[0], packed[1] * 2 // group_size)
    return (
        None
        if scale == wanted
        else f"weight_scale is {list(scale)}, groups of {group_size} need {list(wanted)}"
    )


def blocks(params: Params, block: tuple[int, int]) -> str | None:
    """Block-scaled FP8: one scale per tile of `block` = (rows, columns)."""
    scale = next(
        (params[p] for p in ("weight_scale_inv", "weight_scale", "scale") if p in params), None
    )
    shape = params["weight"].shape
    if scale is None or len(shape) != 2 or len(scale.shape) != 2:
        return None
    wanted = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    if scale.shape == wanted:
        return None
    return (
        f"scales are {list(scale.shape)}; a weight of {list(shape)} in tiles of {list(block)} needs"
        f" {list(wanted)}"
    )


def grouped(rows: int, width: int, scale: tuple[int, ...], group_size: int | None) -> str | None:
    """Scales of an unpacked weight [rows, width]: one a row, or one a group along the inputs."""
    groups = 1 if group_size is None else _groups(width, group_size)
    if len(scale) != 2 or scale == (rows, groups):
        return None
    per = f"groups of {group_size}" if group_size else "one scale a row"
    return f"scales are {list(scale)}; {rows} × {width} values with {per} need {[rows, groups]}"


def four_bit_blocks(params: Params) -> str | None:
    """bitsandbytes: two values a byte, one absmax a block of 32 to 4096 values, all blocks of one
    size.
    """
    packed, absmax = params["weight"].elements, params["weight.absmax"].elements
    if any(-(-2 * packed // size) == absmax for size in (32, 64, 128, 256, 512, 1024, 2048, 4096)):
        return None
    return f"{absmax} block scales for {2 * packed} values fit no block size"


def _groups(width: int, group_size: int) -> int:
    """Number of groups along the inputs; -1 means one for all."""
    return 1 if group_size <= 0 else -(-width // group_size)


Settings = Callable[[str], tuple[int | None, int | None]]
"""Module to (bits, group size)."""


def _word_geometry(settings: Settings) -> Geometry:
    """Checks packed shapes where the declaration gives bits and group size."""

    def check(module: str, params: Params) -> str | None:
        bits, group_size = settings(module)
        kind = stored_kind(params)
        if (
            bits not in {2, 3, 4, 8}
            or group_size is None
            or not {"scales", "qzeros"} <= params.keys()
        ):
            return None  # a part that is missing is reported as missing, not as misshapen
        if kind is Kind.GPTQ:
            return gptq_shapes(params, bits, group_size)
        return awq_shapes(params, bits, group_size) if kind is Kind.AWQ else None

    return check


def _overridden(
    raw: Mapping[str, Any], entry: Callable[[str], Mapping[str, Any] | None]
) -> Settings:
    """Settings of the whole, with what a module's own entry changes."""
    bits, group = integer(raw, "bits", "w_bit"), integer(raw, "group_size", "q_group_size")

    def settings(module: str) -> tuple[int | None, int | None]:
        own = entry(module) or {}
        own_bits, own_group = integer(own, "bits"), integer(own, "group_size")
        return bits if own_bits is None else own_bits, group if own_group is None else own_group

    return settings


def _declared(found: Found, accepts: Any, settings: Settings, **rest: Any) -> Declared:
    bits, group = settings("")
    return Declared(
        found.method,
        found.source,
        found.raw,
        accepts,
        _word_geometry(settings),
        bits,
        group,
        bits_of=lambda module: settings(module)[0],
        unexamined=(
            "" if bits in {2, 3, 4, 8, None} else f"{found.method} with {bits} bits is not known"
        ),
        **rest,
    )


def gptq(found: Found) -> Declared:
    """GPTQ (AutoGPTQ, GPTQModel): every Linear of the layers, but for exclusion lists and
    `dynamic`.

    A `dynamic` key is a pattern: `-:` leaves the modules out, `+:` or nothing changes their bits or
    group size.
    """
    raw = found.raw
    excluded = strings(raw.get("modules_to_not_convert"))
    inside = tuple(
        n for names in raw.get("modules_in_block_to_quantize") or () for n in strings(names)
    )
    rules = raw["dynamic"].items() if isinstance(raw.get("dynamic"), dict) else ()
    skip = [p for key, _ in rules if key.startswith("-:") and (p := pattern(key[2:]))]
    change = [
        (p, value)
        for key, value in rules
        if not key.startswith("-:")
        and isinstance(value, dict)
        and (p := pattern(key.removeprefix("+:")))
    ]

    def hits(module: str) -> bool:
        return any(part in module for part in excluded) or any(p.match(module) for p in skip)

    def accepts(module: str) -> frozenset[Kind] | None:
        if listed(module, hits):
            return PLAIN
        if module.endswith("lm_head"):
            return frozenset({Kind.GPTQ}) if raw.get("lm_head") else PLAIN
        return PLAIN if inside and not module.endswith(inside) else frozenset({Kind.GPTQ})

    def entry(module: str) -> Mapping[str, Any] | None:
        return next((value for p, value in change if p.match(module)), None)

    return _declared(found, accepts, _overridden(raw, entry))


def awq(found: Found) -> Declared:
    """AWQ (AutoAWQ): every Linear of the layers, but for `modules_to_not_convert`."""
    excluded = strings(found.raw.get("modules_to_not_convert"))
    accepts = accepting(
        frozenset({Kind.AWQ}), lambda module: any(p in module for p in excluded), PLAIN
    )
    return _declared(found, accepts, _overridden(found.raw, lambda module: None))


_LAYOUTS = {
    "auto_gptq": frozenset({Kind.GPTQ}),
    "gptq": frozenset({Kind.GPTQ}),
    "auto_awq": frozenset({Kind.AWQ}),
    "awq": frozenset({Kind.AWQ}),
    "fp8": frozenset({Kind.FP8}),
    "llm_compressor": frozenset(
        {Kind.PACKED, Kind.NVFP4_PACKED, Kind.MXFP4, Kind.FP8, Kind.MXFP8, Kind.INT8}
    ),
    "auto_round": frozenset({Kind.GPTQ}),
    "gptqmodel": frozenset({Kind.GPTQ}),
}


def auto_round(found: Found) -> Declared:
    """AutoRound: the blocks of `block_name_to_quantize`, but for `extra_config` entries of 16 bits
    and more.

    A checkpoint without `packing_format` is decoded in GPTQ's layout, whatever its tensors are.
    """
    raw = found.raw
    packing = raw.get("packing_format") or "auto_round:auto_gptq"
    layout = packing.rpartition(":")[2]
    kinds = _LAYOUTS.get(layout) or _LAYOUTS.get(packing.partition(":")[2])
    names = ",".join(strings(raw.get("block_name_to_quantize") or raw.get("to_quant_block_names")))
    inside = tuple(b.strip().rstrip(".") for b in names.split(",") if b.strip())
    entry = _entries(raw.get("extra_config") or {})

    def accepts(module: str) -> frozenset[Kind] | None:
        own = integer(entry(module) or {}, "bits")
        if own is not None:
            return PLAIN if own >= 16 else kinds
        if inside:
            return kinds if any(_in_block(module, b) for b in inside) else PLAIN
        return PLAIN if module.endswith("lm_head") or module.startswith("mtp") else kinds

    made = _declared(
        Found("auto-round", raw, found.source), accepts, _overridden(raw, entry), algorithm=layout
    )
    return made if kinds else replace(made, unexamined=f"the packing format {packing} is not known")


def _entries(extra: Mapping[str, Any]) -> Callable[[str], Mapping[str, Any] | None]:
    """Look up `extra_config`: by exact name, else by the first pattern that is found in the name."""
    patterns = [
        (p, v)
        for key, v in extra.items()
        if any(c in key for c in "*+?[(^$|") and (p := pattern(key))
    ]

    def entry(module: str) -> Mapping[str, Any] | None:
        own = extra.get(module)
        if own is None:
            own = next((v for p, v in patterns if p.search(module)), None)
        return own if isinstance(own, dict) else None

    return entry


def _in_block(module: str, block: str) -> bool:
    return module.startswith((f"{block}.", f"model.{block}.")) or f".{block}." in module


def mlx(found: Found) -> Declared:
    """mlx-lm: what has scales is packed, whatever else is plain; a module may have bits and group
    size of its own.

    Only the packing is held against the declaration: engines other than MLX do not read this
    format.
    """
    raw = found.raw
    settings = _overridden(
        raw, lambda module: own if isinstance(own := raw.get(module), dict) else None
    )

    def geometry(module: str, params: Params) -> str | None:
        bits, group_size = settings(module)
        known = stored_kind(params) is Kind.MLX and bits and group_size and group_size > 0
        return mlx_shapes(params, bits, group_size) if known and bits and group_size else None

    return Declared(
        "mlx",
        found.source,
        raw,
        lambda module: frozenset({Kind.MLX, Kind.PLAIN}),
        geometry,
        *settings(""),
        bits_of=lambda module: settings(module)[0],
        unexamined="the quantisation method mlx is known by its packing only",
    )


# FP8, ModelOpt and MX formats: scaled floats with ignore lists.

_FP8, _MXFP8, _NVFP4 = frozenset({Kind.FP8}), frozenset({Kind.MXFP8}), frozenset({Kind.NVFP4})
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
    accepts = accepting(_MXFP8 if block == _MX_BLOCK else _FP8, hits)
    group = 32 if found.method == "mxfp8" else None
    return Declared(
        found.method, found.source, raw, accepts, geometry, 8, group, needs=lambda module: needed
    )


_ALGORITHMS = {
    "FP8": _FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": _FP8,
    "FP8_PB_WO": _FP8,
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
    "NVFP4_AWQ": _NVFP4,
    "MXFP8": _MXFP8,
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


# compressed-tensors (llm-compressor): groups of targets, each with a scheme and a format of its
# own.

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
            t in {"Linear", "FusedMoE"}
            or module == t
            or module.endswith("." + t)
            or _matches(t, module)
            for t in self.targets
        )


_NOTHING = _Group((), "dense", {}, {})


def _matches(name: str, module: str) -> bool:
    found = pattern(name[3:]) if name.startswith("re:") else None
    return found is not None and found.match(module) is not None


def compressed_tensors(found: Found) -> Declared:
    """compressed-tensors: groups of targets, each with its own format; `ignore` by exact name or
    `re:` pattern.
    """
    raw = found.raw
    ignored = strings(raw.get("ignore"))
    groups = [
        _Group(
            strings(g.get("targets")),
            g.get("format") or raw.get("format") or "",
            g.get("weights") or {},
            g.get("input_activations") or {},
        )
        for g in (raw.get("config_groups") or {}).values()
    ]

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
        "compressed-tensors",
        found.source,
        raw,
        accepts,
        geometry,
        bits_of=lambda module: integer(group_of(module).weights, "num_bits"),
        needs=needs,
        unwanted=unwanted,
        unexamined=f"the compressed-tensors format {strange} is not known" if strange else "",
    )


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


# bitsandbytes, torchao, HQQ, and the formats that assay recognises without opening them.


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
    """A method that assay knows by name only, or not at all: nothing is said about single modules."""
    known = "known by name only" if found.method in KNOWN_BY_NAME else "not known"
    text = f"the quantisation method {found.method or '(unnamed)'} is {known}"
    return Declared(found.method, found.source, found.raw, lambda module: None, unexamined=text)


SCHEMES: Mapping[str, Callable[[Found], Declared]] = {
    "gptq": gptq,
    "awq": awq,
    "auto-round": auto_round,
    "inc": auto_round,
    "mlx": mlx,
    "fp8": fp8,
    "fbgemm_fp8": fp8,
    "mxfp8": fp8,
    "modelopt": modelopt,
    "modelopt_fp4": modelopt,
    "modelopt_mixed": modelopt,
    "mxfp4": mxfp4,
    "compressed-tensors": compressed_tensors,
    "bitsandbytes": bitsandbytes,
    "torchao": torchao,
    "hqq": hqq,
}


def parse(checkpoint: Checkpoint) -> Declared | None:
    """The checkpoint's declaration, understood; None if it declares nothing."""
    found = declared.find(checkpoint)
    return SCHEMES.get(found.method, unopened)(found) if found is not None else None
