"""Faults of quantised checkpoints as edits of a config and renamed tensors, so that they fit
headers and files alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

Config = dict[str, Any]

MODULE = "model.layers.3.mlp.down_proj"
CARRIERS = ("qweight", "weight_packed", "W_q", "_weight_qdata", "weight")
SCALES = (
    "scales",
    "weight_scale",
    "weight_scale_inv",
    "_weight_scale",
    "weight.absmax",
    "SCB",
    "meta",
    "scale",
)


@dataclass(frozen=True)
class Edit:
    """What a fault changes: the config, and tensor names (a new name of the same length, so that
    headers keep theirs).
    """

    config: Config
    renamed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ExportFault:
    """`edit(config, names)` is None where the fault has no meaning for an export."""

    name: str
    finding: str
    edit: Callable[[Config, set[str]], Edit | None]
    serve_args: str | None = None
    severity: str = "error"


def _declared(config: Config) -> Config:
    return config.get("quantization_config", {})


def _first(names: set[str], parameters: Iterable[str]) -> str | None:
    return next((f"{MODULE}.{p}" for p in parameters if f"{MODULE}.{p}" in names), None)


def _mangled(name: str) -> dict[str, str]:
    return {name: name[:-1] + "~"}


def _integers(config: Config, key: str, nested: str, change: Callable[[int], int]) -> Edit | None:
    """Change an integer of the declaration, at its top or in the groups of compressed-tensors."""
    edited = copy.deepcopy(config)
    declared = _declared(edited)
    places = [declared] if isinstance(declared.get(key), int) else []
    for group in declared.get("config_groups", {}).values():
        weights = group.get("weights") or {}
        if isinstance(weights.get(nested), int) and weights.get("type") == "int":
            places.append(weights)
    for place in places:
        name = key if key in place else nested
        place[name] = change(place[name])
    return Edit(edited) if places else None


def wrong_bits(config: Config, names: set[str]) -> Edit | None:
    if _first(names, ("qweight", "weight_packed")) is None or "extra_config" in _declared(config):
        return None
    return _integers(config, "bits", "num_bits", lambda bits: 8 if bits != 8 else 4)


def wrong_group(config: Config, names: set[str]) -> Edit | None:
    if _first(names, ("qweight", "weight_packed")) is None:
        return None
    return _integers(config, "group_size", "group_size", lambda size: 2 * size)


def missing_scale(config: Config, names: set[str]) -> Edit | None:
    scale = _first(names, SCALES)
    return Edit(config, _mangled(scale)) if scale else None


def orphan_scale(config: Config, names: set[str]) -> Edit | None:
    carrier, scale = _first(names, CARRIERS), _first(names, SCALES)
    # What torchao and HQQ store beside a weight has no name of its own that only a scale has.
    if carrier is None or scale is None or scale.endswith(("_weight_scale", ".scale")):
        return None
    return Edit(config, _mangled(carrier))


def undeclared(config: Config, names: set[str]) -> Edit | None:
    if not _declared(config):
        return None  # HQQ's own format declares nothing
    return Edit({key: value for key, value in config.items() if key != "quantization_config"})


def declared_as(raw: Config) -> Callable[[Config, set[str]], Edit | None]:
    def edit(config: Config, names: set[str]) -> Edit | None:
        declared = _declared(config)
        layout = str(declared.get("packing_format") or "").rpartition("_")[2]
        if raw["quant_method"] in {declared.get("quant_method"), layout}:
            return None  # AutoRound's packings are those of GPTQ and AWQ
        return Edit(config | {"quantization_config": raw})

    return edit


def all_ignored(config: Config, names: set[str]) -> Edit | None:
    """The ignore list of compressed-tensors names a module that is quantised."""
    edited = copy.deepcopy(config)
    if "ignore" not in _declared(edited):
        return None
    _declared(edited)["ignore"].append(r"re:.*\.down_proj$")
    return Edit(edited)


def auto_round_flag(config: Config, names: set[str]) -> Edit | None:
    return Edit(config) if _declared(config).get("quant_method") == "auto-round" else None


def other_flag(config: Config, names: set[str]) -> Edit | None:
    return (
        Edit(config)
        if _declared(config).get("quant_method") in {"gptq", "awq", "compressed-tensors"}
        else None
    )


EXPORT_FAULTS = (
    ExportFault("declared with other bits", "quantization_conflict", wrong_bits),
    ExportFault("declared with groups twice as large", "quantization_conflict", wrong_group),
    ExportFault("one scale lost", "quantization_conflict", missing_scale),
    ExportFault("one weight lost, its scale left", "orphan_scale", orphan_scale),
    ExportFault("declaration lost", "quantization_conflict", undeclared),
    ExportFault(
        "declared AWQ",
        "quantization_conflict",
        declared_as(
            {
                "quant_method": "awq",
                "bits": 4,
                "group_size": 64,
                "zero_point": True,
                "version": "gemm",
            }
        ),
    ),
    ExportFault(
        "declared GPTQ",
        "quantization_conflict",
        declared_as(
            {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
        ),
    ),
    ExportFault("declared FP8", "quantization_conflict", declared_as({"quant_method": "fp8"})),
    ExportFault("ignored and yet quantised", "quantization_conflict", all_ignored),
    ExportFault(
        "awq_marlin on AutoRound",
        "flag_ignored",
        auto_round_flag,
        "--quantization awq_marlin",
        "warning",
    ),
    ExportFault("fp8 flag on integers", "flag_rejected", other_flag, "--quantization fp8"),
)
