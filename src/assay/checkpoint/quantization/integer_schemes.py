"""GPTQ, AWQ, AutoRound and MLX: integers packed into 32-bit words, and which modules they leave alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from assay.checkpoint.quantization.declared import (
    PLAIN,
    Declared,
    Found,
    Geometry,
    Kind,
    accepting,
    integer,
    listed,
    pattern,
    stored_kind,
    strings,
)
from assay.checkpoint.safetensors import Params

# -----------------------------------------------------------------------------
# Shapes of packed weights: do bits, group size and the tensors agree?


def gptq_shapes(params: Params, bits: int, group_size: int) -> str | None:
    """GPTQ: qweight [in·bits/32, out], scales [in/group, out], qzeros [in/group, out·bits/32], g_idx [in]."""
    qweight, scales, zeros = (params[k].shape for k in ("qweight", "scales", "qzeros"))
    if not len(qweight) == len(scales) == len(zeros) == 2:
        return "qweight, scales and qzeros are not all matrices"
    width, out = qweight[0] * 32 // bits, scales[1]
    if qweight[1] != out:
        return f"qweight has {qweight[1]} columns, scales {out}"
    groups = _groups(width, group_size)
    if scales[0] != groups:
        return f"{scales[0]} rows of scales; {width} inputs at {bits} bits in groups of {group_size} need {groups}"
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
    """MLX: weight [out, in·bits/32] of 32-bit words, scales [out, in/group]; experts have one axis more."""
    words, scales = params["weight"].shape, params["scales"].shape
    if not words or words[:-1] != scales[:-1]:
        return f"weight is {list(words)}, its scales are {list(scales)}"
    if words[-1] * 32 != scales[-1] * group_size * bits:
        stored = words[-1] * 32 / max(scales[-1] * group_size, 1)
        return f"{words[-1]} words and {scales[-1]} scales a row hold {stored:g} bits in groups of {group_size}, not {bits}"
    return None


def compressed(params: Params, bits: int, group_size: int | None) -> str | None:
    """compressed-tensors: weight_packed [out, in·bits/32] I32, weight_scale [out, in/group], weight_shape [2]."""
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
            return f"{scale[1]} scales a row; {width} inputs at {bits} bits in groups of {group_size} need {highest}"
    return None


def halves(params: Params, group_size: int, weight: str = "weight") -> str | None:
    """Two 4-bit values a byte along the inputs: weight [out, in/2] U8, weight_scale [out, in/group]."""
    packed, scale = params[weight].shape, params["weight_scale"].shape if "weight_scale" in params else ()
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
    scale = next((params[p] for p in ("weight_scale_inv", "weight_scale", "scale") if p in params), None)
    shape = params["weight"].shape
    if scale is None or len(shape) != 2 or len(scale.shape) != 2:
        return None
    wanted = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    if scale.shape == wanted:
        return None
    return f"scales are {list(scale.shape)}; a weight of {list(shape)} in tiles of {list(block)} needs {list(wanted)}"


def grouped(rows: int, width: int, scale: tuple[int, ...], group_size: int | None) -> str | None:
    """Scales of an unpacked weight [rows, width]: one a row, or one a group along the inputs."""
    groups = 1 if group_size is None else _groups(width, group_size)
    if len(scale) != 2 or scale == (rows, groups):
        return None
    per = f"groups of {group_size}" if group_size else "one scale a row"
    return f"scales are {list(scale)}; {rows} × {width} values with {per} need {[rows, groups]}"


def four_bit_blocks(params: Params) -> str | None:
    """bitsandbytes: two values a byte, one absmax a block of 32 to 4096 values, all blocks of one size."""
    packed, absmax = params["weight"].elements, params["weight.absmax"].elements
    if any(-(-2 * packed // size) == absmax for size in (32, 64, 128, 256, 512, 1024, 2048, 4096)):
        return None
    return f"{absmax} block scales for {2 * packed} values fit no block size"


def _groups(width: int, group_size: int) -> int:
    """Number of groups along the inputs; -1 means one for all."""
    return 1 if group_size <= 0 else -(-width // group_size)


# -----------------------------------------------------------------------------

Settings = Callable[[str], tuple[int | None, int | None]]
"""Module to (bits, group size)."""


def _word_geometry(settings: Settings) -> Geometry:
    """Checks packed shapes where the declaration gives bits and group size."""

    def check(module: str, params: Params) -> str | None:
        bits, group_size = settings(module)
        kind = stored_kind(params)
        if bits not in {2, 3, 4, 8} or group_size is None or not {"scales", "qzeros"} <= params.keys():
            return None  # a part that is missing is reported as missing, not as misshapen
        if kind is Kind.GPTQ:
            return gptq_shapes(params, bits, group_size)
        return awq_shapes(params, bits, group_size) if kind is Kind.AWQ else None

    return check


def _overridden(raw: Mapping[str, Any], entry: Callable[[str], Mapping[str, Any] | None]) -> Settings:
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
        found.method, found.source, found.raw, accepts, _word_geometry(settings), bits, group,
        bits_of=lambda module: settings(module)[0],
        unexamined="" if bits in {2, 3, 4, 8, None} else f"{found.method} with {bits} bits is not known", **rest,
    )  # fmt: skip


def gptq(found: Found) -> Declared:
    """GPTQ (AutoGPTQ, GPTQModel): every Linear of the layers, but for exclusion lists and `dynamic`.

    A `dynamic` key is a pattern: `-:` leaves the modules out, `+:` or nothing changes their bits or group size.
    """
    raw = found.raw
    excluded = strings(raw.get("modules_to_not_convert"))
    inside = tuple(n for names in raw.get("modules_in_block_to_quantize") or () for n in strings(names))
    rules = raw["dynamic"].items() if isinstance(raw.get("dynamic"), dict) else ()
    skip = [p for key, _ in rules if key.startswith("-:") and (p := pattern(key[2:]))]
    change = [
        (p, value) for key, value in rules
        if not key.startswith("-:") and isinstance(value, dict) and (p := pattern(key.removeprefix("+:")))
    ]  # fmt: skip

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
    accepts = accepting(frozenset({Kind.AWQ}), lambda module: any(p in module for p in excluded), PLAIN)
    return _declared(found, accepts, _overridden(found.raw, lambda module: None))


_LAYOUTS = {
    "auto_gptq": frozenset({Kind.GPTQ}), "gptq": frozenset({Kind.GPTQ}), "auto_awq": frozenset({Kind.AWQ}),
    "awq": frozenset({Kind.AWQ}), "fp8": frozenset({Kind.FP8}),
    "llm_compressor": frozenset({Kind.PACKED, Kind.NVFP4_PACKED, Kind.MXFP4, Kind.FP8, Kind.MXFP8, Kind.INT8}),
    "auto_round": frozenset({Kind.GPTQ}), "gptqmodel": frozenset({Kind.GPTQ}),
}  # fmt: skip


def auto_round(found: Found) -> Declared:
    """AutoRound: the blocks of `block_name_to_quantize`, but for `extra_config` entries of 16 bits and more.

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
        (p, v) for key, v in extra.items() if any(c in key for c in "*+?[(^$|") and (p := pattern(key))
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
    """mlx-lm: what has scales is packed, whatever else is plain; a module may have bits and group size of its own.

    Only the packing is held against the declaration: engines other than MLX do not read this format.
    """
    raw = found.raw
    settings = _overridden(raw, lambda module: own if isinstance(own := raw.get(module), dict) else None)

    def geometry(module: str, params: Params) -> str | None:
        bits, group_size = settings(module)
        known = stored_kind(params) is Kind.MLX and bits and group_size and group_size > 0
        return mlx_shapes(params, bits, group_size) if known and bits and group_size else None

    return Declared(
        "mlx", found.source, raw, lambda module: frozenset({Kind.MLX, Kind.PLAIN}), geometry, *settings(""),
        bits_of=lambda module: settings(module)[0], unexamined="the quantisation method mlx is known by its packing only",
    )  # fmt: skip
