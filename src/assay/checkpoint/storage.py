"""Tell from a module's own tensors how its weight is stored."""

from __future__ import annotations

from enum import StrEnum

from assay.checkpoint.tensors import FLOATS, FP8, Params


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
    MLX = "mlx-packed int"
    OTHER = "a format of its own"


PLAIN = frozenset({Kind.PLAIN})

PACKED_KINDS = frozenset(Kind) - {Kind.PLAIN}

# Parameters that carry a weight; without one of them a module holds only side information.
CARRIERS = (
    "weight",
    "qweight",
    "weight_packed",
    "W_q",
    "_weight_qdata",
    "_weight_int_data",
    "q_weight",
    "trellis",
    "codes",
    "blocks",
    "tensor_q",
    "weight_qdata",
    "packed_weight",
)


def carrier(params: Params) -> str | None:
    """The parameter that carries the module's weight, or None."""
    return next((c for c in CARRIERS if c in params), None)


def stored_kind(params: Params) -> Kind | None:
    """How the module's weight is stored; None for a module without a weight (only biases or
    scales).
    """
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
    scale = next(
        (params[p] for p in ("weight_scale", "weight_scale_inv", "scale") if p in params), None
    )
    powers = scale is not None and scale.dtype in {"U8", "F8_E8M0"}
    if weight.dtype in FP8:
        if scale is None:
            return Kind.FP8_UNSCALED
        # MX formats have one power of two for 32 values; DeepSeek's tiles may be scaled by powers
        # of two as well.
        rows, width = weight.shape[:-1], weight.shape[-1] if weight.shape else 1
        return Kind.MXFP8 if powers and scale.shape == (*rows, -(-width // 32)) else Kind.FP8
    if weight.dtype == "U8":
        if "weight_scale_2" in params or (scale is not None and scale.dtype in FP8):
            return Kind.NVFP4
        return Kind.MXFP4 if powers else Kind.OTHER
    if weight.dtype == "U32" and "scales" in params:
        return Kind.MLX
    if weight.dtype == "I8":
        return Kind.INT8
    if weight.dtype == "F4":
        return Kind.NVFP4 if "weight_scale_2" in params else Kind.MXFP4
    return Kind.PLAIN if weight.dtype in FLOATS else Kind.OTHER


def _gptq_or_awq(params: Params) -> Kind:
    """AWQ packs along the outputs ([in, out/8]), GPTQ along the inputs ([in/8, out]).

    `g_idx` exists only in GPTQ; otherwise the scales ([groups, out]) tell which axis of qweight is
    whole.
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
        return (
            Kind.MXFP4
            if scale is not None and scale.dtype in {"U8", "F8_E8M0"}
            else Kind.NVFP4_PACKED
        )
    return Kind.PACKED


_FUSED_SUFFIXES = {"_blocks": Kind.MXFP4, "_packed": Kind.PACKED, "_qweight": Kind.GPTQ}


def fused_kind(params: Params, stem: str) -> Kind | None:
    """How one fused expert tensor is stored, e.g. `gate_up_proj` as `gate_up_proj_blocks` and
    `gate_up_proj_scales`.
    """
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
