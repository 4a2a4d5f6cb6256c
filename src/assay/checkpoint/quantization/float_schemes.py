"""FP8, ModelOpt, MX formats and compressed-tensors: scaled floats (and CT's packed integers) with ignore lists."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

from assay.checkpoint.quantization import packing
from assay.checkpoint.quantization.declared import Declared, Found, integer, no_geometry, strings
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

    def accepts(module: str) -> frozenset[Kind] | None:
        if module.endswith("lm_head"):
            return None
        if any(module == e or module.startswith(e + ".") or module.endswith("." + e) for e in excluded):
            return _PLAIN
        return _FP8

    def geometry(module: str, params: Params) -> str | None:
        return packing.blocks(params, block) if block and stored_kind(params) is Kind.FP8 else None

    return Declared(found.method, found.source, raw, accepts, geometry, 8)


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
    kinds = _MODELOPT.get(algorithm)

    def accepts(module: str) -> frozenset[Kind] | None:
        if any(_excluded(module, pattern) for pattern in globs):
            return _PLAIN
        return None if module.endswith("lm_head") else kinds

    def geometry(module: str, params: Params) -> str | None:
        group = integer(settings, "group_size") or 16
        return packing.halves(params, group) if stored_kind(params) is Kind.NVFP4 else None

    return Declared("modelopt", found.source, settings, accepts, geometry, algorithm=algorithm or None)


def _excluded(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return _matches(pattern[3:], module)
    return fnmatch.fnmatchcase(module, pattern) or module.startswith(pattern.rstrip("*") + ".")


def mxfp4(found: Found) -> Declared:
    """MXFP4 of gpt-oss: the routed experts only, stored as blocks and scales."""
    excluded = strings(found.raw.get("modules_to_not_convert"))

    def accepts(module: str) -> frozenset[Kind] | None:
        if ".experts" not in module or any(part in module for part in excluded if "experts" in part):
            return _PLAIN
        return frozenset({Kind.MXFP4})

    return Declared("mxfp4", found.source, found.raw, accepts, bits=4, group_size=32)


_FORMATS: Mapping[str, frozenset[Kind]] = {
    "pack-quantized": frozenset({Kind.PACKED}), "marlin-24": frozenset({Kind.PACKED, Kind.OTHER}),
    "float-quantized": _FP8, "naive-quantized": frozenset({Kind.FP8, Kind.INT8}),
    "int-quantized": frozenset({Kind.INT8}), "nvfp4-pack-quantized": frozenset({Kind.NVFP4_PACKED}),
    "mxfp4-pack-quantized": frozenset({Kind.MXFP4}), "mxfp8-quantized": frozenset({Kind.MXFP8}),
    "dense": _PLAIN,
}  # fmt: skip

Targets = Callable[[str], bool]


def compressed_tensors(found: Found) -> Declared:
    """compressed-tensors: groups of targets, each with its own format; `ignore` by exact name or `re:` pattern."""
    raw = found.raw
    ignored = strings(raw.get("ignore"))
    overall = str(raw.get("format") or "")
    groups: list[tuple[Targets, frozenset[Kind] | None, Mapping[str, Any]]] = []
    listed = raw.get("config_groups")
    for group in listed.values() if isinstance(listed, Mapping) else ():
        if isinstance(group, Mapping):
            weights = group.get("weights")
            weights = weights if isinstance(weights, Mapping) else {}
            kinds = _FORMATS.get(str(group.get("format") or overall)) if weights else _PLAIN
            groups.append((_targets(strings(group.get("targets"))), kinds, weights))

    def group_of(module: str) -> tuple[frozenset[Kind] | None, Mapping[str, Any]]:
        return next(((kinds, weights) for hits, kinds, weights in groups if hits(module)), (_PLAIN, {}))

    def accepts(module: str) -> frozenset[Kind] | None:
        if any(i == module or (i.startswith("re:") and _matches(i[3:], module)) for i in ignored):
            return _PLAIN
        return group_of(module)[0]

    def geometry(module: str, params: Params) -> str | None:
        weights = group_of(module)[1]
        bits, size = integer(weights, "num_bits"), integer(weights, "group_size")
        kind = stored_kind(params)
        if "weight_scale" not in params:
            return None
        if kind is Kind.PACKED and bits in {2, 4, 8}:
            return packing.compressed(params, bits, size)
        return packing.halves(params, size, "weight_packed") if kind is Kind.NVFP4_PACKED and size else None

    return Declared("compressed-tensors", found.source, raw, accepts, geometry if groups else no_geometry)


def _targets(names: tuple[str, ...]) -> Targets:
    """Whether a group's targets hit a Linear: by class name, by module name, or by `re:` pattern."""

    def hits(module: str) -> bool:
        return any(
            n in {"Linear", "FusedMoE"} or module == n or module.endswith("." + n)
            or (n.startswith("re:") and _matches(n[3:], module))
            for n in names
        )  # fmt: skip

    return hits


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.match(pattern, module) is not None
    except re.error:
        return False
