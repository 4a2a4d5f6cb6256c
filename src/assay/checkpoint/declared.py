"""What a checkpoint declares about its quantisation, and how a module's own tensors say that it is
stored.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from assay.checkpoint.documents import SIDECARS
from assay.checkpoint.safetensors import FLOATS, FP8, Params
from assay.checkpoint.subject import Checkpoint

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
    """Whether a list names a module: itself, the whole that it is a part of, or all the parts that
    it is made of.

    `hits(name)` is the list's own way of matching one name.
    """
    if hits(module):
        return True
    parent, dot, last = module.rpartition(".")
    if last in _WHOLE and hits(f"{parent}{dot}{_WHOLE[last]}"):
        return True
    parts = FUSED.get(last)
    return parts is not None and all(hits(f"{parent}{dot}{part}") for part in parts)


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


UNQUANTISED = re.compile(
    r"(^|\.)(eh_proj|weights_proj|mtp_linear_proj\.\d+|mtp_layers\.\d+\.input_proj|compressor\.w(kv|gate)|\w+_res_proj)$"
)
"""Modules that engines build in full precision whatever is declared (vLLM 0.32: a plain Linear, or
no quant_config): the entry of a draft head, the weighting of a sparse indexer, compressors.
Official FP8 releases of DeepSeek V3 and GLM-5 store them as bfloat16 and list them nowhere."""

Accepts = Callable[[str], "frozenset[Kind] | None"]
Geometry = Callable[[str, Params], "str | None"]
BitsOf = Callable[[str], "int | None"]
Names = Callable[[str], tuple[str, ...]]


@dataclass(frozen=True)
class Declared:
    """A quantisation as the checkpoint declares it.

    `accepts(module)` gives the storage kinds that agree with the declaration, `{PLAIN}` for a
    module that it leaves out, or None where it does not say. `geometry(module, params)` is a
    complaint about packed shapes, or None. `bits_of(module)` is the width of its packed integers,
    `needs(module)` and `unwanted(module)` name parameters that a quantised module must, or must
    not, have beside its weight. `unexamined` says what of it assay does not know.
    """

    method: str
    source: str
    raw: Mapping[str, Any]
    accepts: Accepts
    geometry: Geometry = lambda module, params: None
    bits: float | None = None
    group_size: int | None = None
    algorithm: str | None = None
    bits_of: BitsOf = lambda module: None
    needs: Names = lambda module: ()
    unwanted: Names = lambda module: ()
    unexamined: str = ""

    def kinds(self, module: str) -> frozenset[Kind] | None:
        """What `accepts` says, and plain for modules that engines never quantise."""
        accepted = self.accepts(module)
        return accepted | {Kind.PLAIN} if accepted and UNQUANTISED.search(module) else accepted


@dataclass(frozen=True)
class Found:
    """A raw declaration, its method in normal form and the file that holds it."""

    method: str
    raw: Mapping[str, Any]
    source: str


def find(checkpoint: Checkpoint) -> Found | None:
    """The declaration that an engine reads: config.json (either level, either key), else a sidecar
    file.
    """
    config = checkpoint.config
    for settings, where in (
        (config, "config.json"),
        (checkpoint.text_config, "config.json: text_config"),
    ):
        for key in ("quantization_config", "compression_config"):
            if raw := settings.get(key):
                method = _method(raw, key)
                by_mlx = config.get("quantization") or "mode" in raw or _mlx_stored(checkpoint)
                if by_mlx and not raw.get("quant_method") and method in {"gptq", ""}:
                    method = "mlx"  # mlx-lm writes both keys, and no method
                return Found(method, raw, where)
    for name in SIDECARS:
        if raw := checkpoint.object(name):
            return Found(_method(raw, name), raw, name)
    if mlx := config.get("quantization"):
        return Found("mlx", mlx, "config.json: quantization")
    if "polar_config.json" in checkpoint.files:
        return Found("polar", checkpoint.object("polar_config.json"), "polar_config.json")
    return None


def _mlx_stored(checkpoint: Checkpoint) -> bool:
    return any(stored_kind(params) is Kind.MLX for params in checkpoint.modules.values())


def _method(raw: Mapping[str, Any], key: str) -> str:
    """`quant_method` as vLLM normalises it: lower case, dashes; ModelOpt is known by its producer."""
    method = (raw.get("quant_method") or "").lower().replace("_", "-")
    if ((raw.get("producer") or {}).get("name") or "").lower() == "modelopt":
        return "modelopt"
    if not method:
        if key == "compression_config" or "config_groups" in raw:
            return "compressed-tensors"
        if "quant_algo" in raw or "quantization" in raw:
            return "modelopt"
        if raw.get("load_in_4bit") or raw.get("load_in_8bit") or raw.get("_load_in_4bit"):
            return "bitsandbytes"
        if "w_bit" in raw or (raw.get("version") or "").lower() == "gemm":
            return "awq"
        return "gptq" if "bits" in raw else ""
    if method in {"fbgemm-fp8", "fp-quant", "modelopt-fp4", "modelopt-mixed", "gpt-oss-mxfp4"}:
        return method.replace("-", "_")
    return {"autoround": "auto-round", "intel/auto-round": "auto-round"}.get(method, method)


def integer(raw: Mapping[str, Any], *keys: str) -> int | None:
    """The first of several keys that holds a whole number."""
    return next((raw[key] for key in keys if type(raw.get(key)) is int), None)


def strings(value: Any) -> tuple[str, ...]:
    """A list of strings, one string, or nothing, as a tuple."""
    if isinstance(value, str):
        return (value,)
    return tuple(v for v in value if isinstance(v, str)) if isinstance(value, list) else ()


@cache
def pattern(text: str) -> re.Pattern[str] | None:
    """A regular expression from a config; one that does not compile is read as a glob.

    None for one that could take for ever: a repeated group with a repetition inside, or more than
    six of them.
    """
    if (
        re.search(r"[*+}][^()]*\)[*+{]", text)
        or len(re.findall(r"[*+]|,\}", text)) > 6
        or len(text) > 2000
    ):
        return None
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return re.compile(re.escape(text).replace(r"\*", ".*"))


def named(names: tuple[str, ...]) -> Callable[[str], bool]:
    """Whether a module is on a list: by its name, below it, by the end of its name, by a glob or an
    `re:` pattern.

    Official lists have hundreds of names and models 100,000 modules, so that plain names are looked
    up by parts.
    """
    patterns = [p for n in names if n.startswith("re:") and (p := pattern(n[3:])) is not None]
    globs = [n for n in names if "*" in n and not n.startswith("re:")]
    exact, below = set(names), {n.rstrip("*") for n in names}

    def hits(module: str) -> bool:
        if module in exact:
            return True
        at = module.find(".")
        while at >= 0:
            if module[at + 1 :] in exact or module[:at] in below:
                return True
            at = module.find(".", at + 1)
        return any(fnmatch.fnmatchcase(module, g) for g in globs) or any(
            p.match(module) for p in patterns
        )

    return hits


def accepting(
    kinds: frozenset[Kind] | None, hits: Callable[[str], bool], head: frozenset[Kind] | None = None
) -> Accepts:
    """Plain for what an ignore list hits, `head` for the output head, and `kinds` for all the rest."""

    def accepts(module: str) -> frozenset[Kind] | None:
        if module.endswith("lm_head") and not hits(module):
            return head
        return PLAIN if listed(module, hits) else kinds

    return accepts
