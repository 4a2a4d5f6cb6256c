"""GPTQ, AWQ and AutoRound: integers packed into 32-bit words, and which modules they leave alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from assay.checkpoint.quantization import packing
from assay.checkpoint.quantization.declared import Accepts, Declared, Found, Geometry, integer, strings
from assay.checkpoint.quantization.stored import Kind, stored_kind
from assay.checkpoint.tensors import Params

_PLAIN = frozenset({Kind.PLAIN})


def _word_geometry(bits: int | None, group_size: int | None) -> Geometry:
    """Checks packed shapes if the declaration gives bits and group size."""

    def check(module: str, params: Params) -> str | None:
        kind = stored_kind(params)
        if bits not in {2, 3, 4, 8} or group_size is None or kind not in {Kind.GPTQ, Kind.AWQ}:
            return None
        if "scales" not in params or "qzeros" not in params:
            return None  # reported as missing, not as misshapen
        if kind is Kind.GPTQ:
            return packing.gptq(params, bits, group_size)
        return packing.awq(params, bits, group_size)

    return check


def gptq(found: Found) -> Declared:
    """GPTQ (AutoGPTQ, GPTQModel): every Linear of the layers, but for `dynamic` "-:" keys and exclusion lists."""
    raw = found.raw
    bits, group = integer(raw, "bits"), integer(raw, "group_size")
    excluded = strings(raw.get("modules_to_not_convert"))
    blocks = raw.get("modules_in_block_to_quantize")
    inside = tuple(n for g in blocks for n in strings(g)) if isinstance(blocks, list) else ()
    dynamic = raw.get("dynamic")
    rules = dynamic if isinstance(dynamic, Mapping) else {}
    skip = [p for key in rules if isinstance(key, str) and key.startswith("-:") and (p := _pattern(key[2:]))]
    mixed = any(isinstance(v, Mapping) and v for v in rules.values())

    def accepts(module: str) -> frozenset[Kind] | None:
        if any(part in module for part in excluded) or any(p.match(module) for p in skip):
            return _PLAIN
        if module.endswith("lm_head"):
            return frozenset({Kind.GPTQ}) if raw.get("lm_head") is True else _PLAIN
        if inside and not module.endswith(inside):
            return _PLAIN
        return frozenset({Kind.GPTQ})

    geometry = _word_geometry(None if mixed else bits, group)
    return Declared("gptq", found.source, raw, accepts, geometry, bits, group)


def awq(found: Found) -> Declared:
    """AWQ (AutoAWQ): every Linear of the layers, but for `modules_to_not_convert`."""
    raw = found.raw
    bits, group = integer(raw, "bits", "w_bit"), integer(raw, "group_size", "q_group_size")
    excluded = strings(raw.get("modules_to_not_convert"))

    def accepts(module: str) -> frozenset[Kind] | None:
        if module.endswith("lm_head") or any(part in module for part in excluded):
            return _PLAIN
        return frozenset({Kind.AWQ})

    return Declared("awq", found.source, raw, accepts, _word_geometry(bits, group), bits, group)


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
    bits, group = integer(raw, "bits"), integer(raw, "group_size")
    packing_format = str(raw.get("packing_format") or "auto_round:auto_gptq")
    layout = packing_format.rpartition(":")[2]
    kinds = _LAYOUTS.get(layout) or _LAYOUTS.get(packing_format.partition(":")[2])
    names = raw.get("block_name_to_quantize") or raw.get("to_quant_block_names")
    if isinstance(names, list):
        names = ",".join(n for n in names if isinstance(n, str))
    blocks = (
        tuple(b.strip().rstrip(".") for b in names.split(",") if b.strip()) if isinstance(names, str) else ()
    )
    extra = raw.get("extra_config") if isinstance(raw.get("extra_config"), Mapping) else {}
    accepts = _round_accepts(kinds, blocks, extra or {})
    mixed = any(
        isinstance(v, Mapping) and 0 < (integer(v, "bits") or 16) < 16 for v in (extra or {}).values()
    )
    geometry = _word_geometry(None if mixed else bits, group)
    return Declared("auto-round", found.source, raw, accepts, geometry, bits, group, layout)


def _round_accepts(
    kinds: frozenset[Kind] | None, blocks: tuple[str, ...], extra: Mapping[str, Any]
) -> Accepts:
    patterns = {key: p for key in extra if any(c in key for c in "*+?[(^$|") and (p := _pattern(key))}

    def accepts(module: str) -> frozenset[Kind] | None:
        entry = extra.get(module)
        if entry is None:
            entry = next((extra[k] for k, p in patterns.items() if p.search(module)), None)
        if isinstance(entry, Mapping):
            return _PLAIN if (integer(entry, "bits") or 16) >= 16 else kinds
        if blocks:
            return kinds if any(_in_block(module, b) for b in blocks) else _PLAIN
        if module.endswith("lm_head") or module.startswith("mtp"):
            return _PLAIN
        return kinds

    return accepts


def _in_block(module: str, block: str) -> bool:
    return module.startswith((f"{block}.", f"model.{block}.")) or f".{block}." in module


def _pattern(text: str) -> re.Pattern[str] | None:
    """A regular expression from a config; a bare leading `*` or a bad one is taken as a glob or left out."""
    try:
        return re.compile(text)
    except re.error:
        return re.compile(re.escape(text).replace(r"\*", ".*"))
