"""compressed-tensors (llm-compressor): groups of targets with a scheme each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from assay.checkpoint.declaration import Found
from assay.checkpoint.declared import Declared
from assay.checkpoint.matching import integer, listed, pattern, strings
from assay.checkpoint.schemes.floats import FP8_KINDS, MXFP8_KINDS
from assay.checkpoint.schemes.shapes import blocks, compressed, halves
from assay.checkpoint.storage import PLAIN, Kind, stored_kind
from assay.checkpoint.tensors import Params

_FORMATS: Mapping[str, frozenset[Kind]] = {
    "pack-quantized": frozenset({Kind.PACKED}),
    "marlin-24": frozenset({Kind.PACKED, Kind.OTHER}),
    "float-quantized": FP8_KINDS,
    "naive-quantized": frozenset({Kind.FP8, Kind.INT8}),
    "int-quantized": frozenset({Kind.INT8}),
    "nvfp4-pack-quantized": frozenset({Kind.NVFP4_PACKED}),
    "mxfp4-pack-quantized": frozenset({Kind.MXFP4}),
    "mxfp8-quantized": MXFP8_KINDS,
    "dense": PLAIN,
}


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
