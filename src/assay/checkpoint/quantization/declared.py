"""What a checkpoint declares about its quantisation, whichever file it says it in."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from assay.checkpoint.safetensors import FLOATS, FP8, Params
from assay.checkpoint.subject import Checkpoint

# -----------------------------------------------------------------------------
# Names of the matrices that engines fuse: an ignore list may use either the whole or its parts.

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Parts by the name of the whole. Engines build the whole, so its parts must be quantised alike."""

_WHOLE = {part: whole for whole, parts in FUSED.items() for part in parts}


def listed(module: str, hits: Callable[[str], bool]) -> bool:
    """Whether a list names a module: itself, the whole that it is a part of, or all the parts that it is made of.

    `hits(name)` is the list's own way of matching one name.
    """
    if hits(module):
        return True
    parent, dot, last = module.rpartition(".")
    if last in _WHOLE and hits(f"{parent}{dot}{_WHOLE[last]}"):
        return True
    parts = FUSED.get(last)
    return parts is not None and all(hits(f"{parent}{dot}{part}") for part in parts)


# -----------------------------------------------------------------------------
# Tell from a module's own tensors how its weight is stored.


class Kind(StrEnum):
    """How a weight is stored."""

    PLAIN = "plain"
    FP8 = "fp8"
    FP8_UNSCALED = "fp8 without a scale"
    INT8 = "int8"
    GPTQ = "gptq-packed int"
    AWQ = "awq-packed int"
    PACKED = "compressed-tensors packed int"
    NVFP4_PACKED = "nvfp4 (weight_packed)"
    NVFP4 = "nvfp4 (weight_scale_2)"
    MXFP4 = "mxfp4"
    MXFP8 = "mxfp8"
    BNB4 = "bitsandbytes 4-bit"
    BNB8 = "bitsandbytes 8-bit"
    TORCHAO = "torchao"
    HQQ = "hqq"
    OTHER = "a format of its own"


PACKED_KINDS = frozenset(Kind) - {Kind.PLAIN}

# Parameters that carry a weight; without one of them a module holds only side information.
CARRIERS = (
    "weight", "qweight", "weight_packed", "W_q", "_weight_qdata", "_weight_int_data", "q_weight", "trellis", "codes",
    "blocks", "tensor_q", "weight_qdata", "packed_weight",
)  # fmt: skip


def carrier(params: Params) -> str | None:
    """The parameter that carries the module's weight, or None."""
    return next((c for c in CARRIERS if c in params), None)


def stored_kind(params: Params) -> Kind | None:
    """How the module's weight is stored; None for a module without a weight (only biases or scales)."""
    if len(params) == 1 and "weight" in params and params["weight"].dtype in FLOATS:
        return Kind.PLAIN  # most modules of most checkpoints
    if "qweight" in params:
        return _gptq_or_awq(params)
    if "weight_packed" in params:
        return _compressed(params)
    if "_weight_qdata" in params or "_weight_int_data" in params or "weight_qdata" in params:
        return Kind.TORCHAO
    if "W_q" in params:
        return Kind.HQQ
    if any(p in params for p in ("q_weight", "trellis", "codes", "packed_weight")):
        return Kind.OTHER
    weight = params.get("weight")
    if weight is None:
        return None
    if any(p.startswith("weight.quant_state.") or p == "weight.absmax" for p in params):
        return Kind.BNB4
    if "SCB" in params:
        return Kind.BNB8
    scale = params.get("weight_scale")
    if weight.dtype in FP8:
        if scale is not None and scale.dtype in {"U8", "F8_E8M0"}:
            return Kind.MXFP8
        return (
            Kind.FP8
            if scale is not None or "weight_scale_inv" in params or "scale" in params
            else Kind.FP8_UNSCALED
        )
    if weight.dtype == "U8":
        if "weight_scale_2" in params or (scale is not None and scale.dtype in FP8):
            return Kind.NVFP4
        return Kind.MXFP4 if scale is not None and scale.dtype in {"U8", "F8_E8M0"} else Kind.OTHER
    if weight.dtype == "I8":
        return Kind.INT8
    if weight.dtype == "F4":
        return Kind.NVFP4 if "weight_scale_2" in params else Kind.MXFP4
    return Kind.PLAIN if weight.dtype in FLOATS else Kind.OTHER


def _gptq_or_awq(params: Params) -> Kind:
    """AWQ packs along the outputs ([in, out/8]), GPTQ along the inputs ([in/8, out]).

    `g_idx` exists only in GPTQ; otherwise the scales ([groups, out]) tell which axis of qweight is whole.
    """
    if "g_idx" in params:
        return Kind.GPTQ
    packed, scales = params["qweight"], params.get("scales")
    if packed.dtype not in {"I32", "U32"}:
        return Kind.OTHER
    if scales is not None and len(packed.shape) == 2 and len(scales.shape) == 2:
        return Kind.GPTQ if packed.shape[1] == scales.shape[1] else Kind.AWQ
    return Kind.GPTQ


def _compressed(params: Params) -> Kind:
    packed, scale = params["weight_packed"], params.get("weight_scale")
    if packed.dtype == "U8":
        return Kind.MXFP4 if scale is not None and scale.dtype in {"U8", "F8_E8M0"} else Kind.NVFP4_PACKED
    return Kind.PACKED


_FUSED_SUFFIXES = {"_blocks": Kind.MXFP4, "_packed": Kind.PACKED, "_qweight": Kind.GPTQ}


def fused_kind(params: Params, stem: str) -> Kind | None:
    """How one fused expert tensor is stored, e.g. `gate_up_proj` as `gate_up_proj_blocks` and `gate_up_proj_scales`."""
    if stem in params:
        tensor = params[stem]
        if tensor.dtype in FLOATS:
            return Kind.PLAIN
        return Kind.FP8 if tensor.dtype in FP8 else Kind.OTHER
    return next((kind for suffix, kind in _FUSED_SUFFIXES.items() if stem + suffix in params), None)


def weight_shape(params: Params) -> tuple[int, ...] | None:
    """[out, in] of a weight whose storage keeps that shape; None for packed ones."""
    kind = stored_kind(params)
    if kind in {Kind.PLAIN, Kind.FP8, Kind.FP8_UNSCALED, Kind.INT8, Kind.MXFP8}:
        return params["weight"].shape
    return None


# -----------------------------------------------------------------------------

SIDECARS = ("quantize_config.json", "quant_config.json", "quantization_config.json", "hf_quant_config.json")

Accepts = Callable[[str], "frozenset[Kind] | None"]
Geometry = Callable[[str, Params], "str | None"]
BitsOf = Callable[[str], "int | None"]
Names = Callable[[str], tuple[str, ...]]


def no_geometry(module: str, params: Params) -> str | None:
    """For schemes whose packed shapes carry nothing to check."""
    return None


def unknown_bits(module: str) -> int | None:
    """For schemes that do not pack integers."""
    return None


def no_names(module: str) -> tuple[str, ...]:
    """For schemes that ask for nothing more than their kind does."""
    return ()


@dataclass(frozen=True)
class Declared:
    """A quantisation as the checkpoint declares it.

    `accepts(module)` gives the storage kinds that agree with the declaration, `{PLAIN}` for a module that it leaves
    out, or None where it does not say. `geometry(module, params)` is a complaint about packed shapes, or None.
    `bits_of(module)` is the width of its packed integers, `needs(module)` and `unwanted(module)` name parameters that a
    quantised module must, or must not, have beside its weight.
    """

    method: str
    source: str
    raw: Mapping[str, Any]
    accepts: Accepts
    geometry: Geometry = no_geometry
    bits: int | None = None
    group_size: int | None = None
    algorithm: str | None = None
    bits_of: BitsOf = unknown_bits
    needs: Names = no_names
    unwanted: Names = no_names


@dataclass(frozen=True)
class Found:
    """A raw declaration, its method in normal form and the file that holds it."""

    method: str
    raw: Mapping[str, Any]
    source: str


def find(checkpoint: Checkpoint) -> Found | None:
    """The declaration that an engine reads: config.json (either level, either key), else a sidecar file."""
    for config, where in (
        (checkpoint.config, "config.json"),
        (checkpoint.text_config, "config.json: text_config"),
    ):
        for key in ("quantization_config", "compression_config"):
            raw = config.get(key)
            if isinstance(raw, Mapping) and raw:
                return Found(_method(raw, key), raw, where)
    for name in SIDECARS:
        raw = checkpoint.object(name)
        if raw:
            return Found(_method(raw, name), raw, name)
    mlx = checkpoint.config.get("quantization")
    if isinstance(mlx, Mapping) and mlx:
        return Found("mlx", mlx, "config.json: quantization")
    if "polar_config.json" in checkpoint.files:
        return Found("polar", checkpoint.object("polar_config.json"), "polar_config.json")
    return None


def _method(raw: Mapping[str, Any], key: str) -> str:
    """`quant_method` as vLLM normalises it: lower case, dashes; ModelOpt is known by its producer."""
    method = str(raw.get("quant_method") or "").lower().replace("_", "-")
    producer = raw.get("producer")
    if isinstance(producer, Mapping) and str(producer.get("name", "")).lower() == "modelopt":
        return "modelopt"
    if not method:
        if key == "compression_config" or "config_groups" in raw:
            return "compressed-tensors"
        if "quant_algo" in raw or isinstance(raw.get("quantization"), Mapping):
            return "modelopt"
        if raw.get("load_in_4bit") or raw.get("load_in_8bit") or raw.get("_load_in_4bit"):
            return "bitsandbytes"
        if "w_bit" in raw or str(raw.get("version", "")).lower() == "gemm":
            return "awq"
        return "gptq" if "bits" in raw else ""
    if method in {"fbgemm-fp8", "fp-quant", "modelopt-fp4", "modelopt-mixed", "gpt-oss-mxfp4"}:
        return method.replace("-", "_")
    return {"autoround": "auto-round", "intel/auto-round": "auto-round"}.get(method, method)


def integer(raw: Mapping[str, Any], *keys: str) -> int | None:
    """The first of several keys that holds an integer."""
    for key in keys:
        if type(raw.get(key)) is int:
            return int(raw[key])
    return None


def strings(value: Any) -> tuple[str, ...]:
    """A list of strings, one string, or nothing, as a tuple."""
    if isinstance(value, str):
        return (value,)
    return tuple(v for v in value if isinstance(v, str)) if isinstance(value, list | tuple) else ()


def matches(pattern: str, module: str) -> bool:
    """Whether a regular expression from a config matches a module from its beginning; a bad one matches nothing."""
    try:
        return re.match(pattern, module) is not None
    except re.error:
        return False
