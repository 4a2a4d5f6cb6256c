"""Integer schemes: GPTQ, AWQ, AutoRound and MLX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from assay.checkpoint.declaration import Found
from assay.checkpoint.declared import Declared, Geometry, accepting
from assay.checkpoint.matching import integer, listed, pattern, strings
from assay.checkpoint.schemes.shapes import awq_shapes, gptq_shapes, mlx_shapes
from assay.checkpoint.storage import PLAIN, Kind, stored_kind
from assay.checkpoint.tensors import Params

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

    settings = _overridden(raw, entry)

    def needs(module: str) -> tuple[str, ...]:
        """With `desc_act` the inputs are ordered by `g_idx`; with one group the order is free."""
        own = (entry(module) or {}).get("desc_act", raw.get("desc_act"))
        grouped = (settings(module)[1] or -1) > 0
        return ("g_idx",) if own is True and grouped else ()

    return _declared(found, accepts, settings, needs=needs)


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

    A checkpoint without `packing_format` is decoded in GPTQ's layout, even if
    its tensors have another.
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
    """Look up `extra_config`: by exact name, else by the first pattern that is found in the
    name.
    """
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
    """mlx-lm: what has scales is packed, the rest is plain; a module may have bits and group
    size of its own.

    Only the packing is compared with the declaration: engines other than MLX do not read this
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
