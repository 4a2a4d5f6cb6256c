"""compressed-tensors (llm-compressor): groups of targets, each with a scheme and a format of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from assay.checkpoint.quantization import packing
from assay.checkpoint.quantization.declared import Declared, Found, integer, matches, no_geometry, strings
from assay.checkpoint.quantization.fused import listed
from assay.checkpoint.quantization.stored import Kind, stored_kind
from assay.checkpoint.tensors import Params

_PLAIN = frozenset({Kind.PLAIN})

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
            return packing.compressed(params, bits, size)
        if kind in {Kind.NVFP4_PACKED, Kind.MXFP4} and size and "weight_packed" in params:
            return packing.halves(params, size, "weight_packed")
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
        return packing.blocks(params, (block[0], block[1]))
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
