"""What vLLM makes of `--quantization` for each kind of checkpoint.

The rules were read off vLLM 0.32's own `ModelConfig._verify_quantization`. Older versions differ
where `resolve` says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from assay.checkpoint.flags.versions import TABLED, Version

METHODS = frozenset(
    {
        "awq",
        "auto_awq",
        "fp8",
        "fbgemm_fp8",
        "fp_quant",
        "modelopt",
        "modelopt_fp4",
        "modelopt_mxfp8",
        "modelopt_mixed",
        "auto_gptq",
        "gptq",
        "gptq_marlin",
        "awq_marlin",
        "humming",
        "compressed-tensors",
        "experts_int8",
        "quark",
        "moe_wna16",
        "torchao",
        "inc",
        "mxfp4",
        "gpt_oss_mxfp4",
        "deepseek_v4_fp8",
        "online",
        "fp8_per_tensor",
        "fp8_per_block",
        "fp8_per_channel",
        "int8_per_channel_weight_only",
        "nvfp4_per_token",
        "mxfp8",
    }
)

DEPRECATED = frozenset({"fbgemm_fp8", "fp_quant"})

ONLINE = frozenset(
    {
        "fp8",
        "fp8_per_tensor",
        "fp8_per_block",
        "fp8_per_channel",
        "mxfp8",
        "mxfp4",
        "int8_per_channel_weight_only",
        "nvfp4_per_token",
        "online",
        "experts_int8",
        "humming",
    }
)
"""Methods that quantise a plain checkpoint while it loads; the others need quantised tensors."""

_SYNONYMS = {
    "awq": ("auto_awq", frozenset({"awq", "awq_marlin", "auto_awq", "marlin"})),
    "gptq": ("auto_gptq", frozenset({"gptq", "gptq_marlin", "auto_gptq", "marlin"})),
}

_DEEPSEEK_V4 = frozenset({"deepseek_v4", "deepseek_v4_text", "deepseek_v41", "deepseek_v41_text"})

_PLUGINS = {"bitsandbytes": "vllm-bnb-plugin", "gguf": "vllm-gguf-plugin", "ascend": "vllm-ascend"}

_LAST_WITH_BNB = Version((0, 27, 1))

_FIRST_INC = Version((0, 15, 0))


@dataclass(frozen=True)
class Resolution:
    """`method` is what the engine will use; `status` what became of the flag."""

    status: Literal["accepted", "ignored", "rejected", "plugin"]
    method: str | None
    reason: str = ""


def modelopt_method(algorithm: str | None) -> str:
    """vLLM's name for a ModelOpt checkpoint by its `quant_algo`."""
    name = (algorithm or "").upper()
    if "MIXED" in name:
        return "modelopt_mixed"
    if "NVFP4" in name:
        return "modelopt_fp4"
    return "modelopt_mxfp8" if "MXFP8" in name else "modelopt"


def resolve(
    method: str | None,
    flag: str | None,
    *,
    algorithm: str | None = None,
    model_type: str | None = None,
    version: Version | None = None,
    allow_deprecated: bool = False,
) -> Resolution:
    """What becomes of `--quantization flag` on a checkpoint whose `quant_method` is `method` (None:
    plain).
    """
    version = version or TABLED
    flag = flag.lower() if flag and flag.lower() != "none" else None
    forced = _forced(method, algorithm, model_type, version)
    if method == "fp8" and flag == "deepseek_v4_fp8":
        return Resolution("accepted", flag)
    if flag == "humming" and method is not None:
        if forced == "gpt_oss_mxfp4":
            return Resolution(
                "rejected", None, "for gpt-oss the engine wants --moe-backend humming instead"
            )
        return Resolution("accepted", "humming")
    if forced is not None:
        aliases = {None, forced, method, "inc" if forced == "inc" else forced}
        return Resolution("accepted" if flag in aliases else "ignored", forced)
    chosen = method
    if method in _SYNONYMS:
        name, synonyms = _SYNONYMS[method]
        if flag == "moe_wna16":
            return Resolution("accepted", "moe_wna16")
        if flag is None or flag in synonyms:
            return Resolution("accepted", name)
    if method is None:
        chosen = flag
    elif flag is not None and flag != method:
        return Resolution(
            "rejected", None, f"the checkpoint is {method}; the engine stops on the mismatch"
        )
    return _final(chosen, version, allow_deprecated)


def _forced(
    method: str | None, algorithm: str | None, model_type: str | None, version: Version
) -> str | None:
    """The method that these checkpoints get with any flag."""
    if method in {"auto-round", "inc"}:
        return "inc" if version >= _FIRST_INC else None
    if method in {"modelopt", "modelopt_fp4", "modelopt_mixed"}:
        return method if method != "modelopt" else modelopt_method(algorithm)
    if method == "fp8" and model_type in _DEEPSEEK_V4:
        return "deepseek_v4_fp8"
    return "gpt_oss_mxfp4" if method == "mxfp4" and model_type == "gpt_oss" else None


def _final(method: str | None, version: Version, allow_deprecated: bool) -> Resolution:
    if method is None:
        return Resolution("accepted", None)
    if method == "bitsandbytes" and version <= _LAST_WITH_BNB:
        return Resolution("accepted", method)
    if method == "auto-round" and version < _FIRST_INC:
        return Resolution("accepted", method)
    if method in _PLUGINS:
        plugin = _PLUGINS[method]
        return Resolution(
            "plugin",
            None,
            f"vLLM {version} loads {method} only with {plugin}; without it the name is unknown",
        )
    if method not in METHODS:
        return Resolution(
            "rejected", None, f"vLLM {version} knows no quantisation method {method!r}"
        )
    if method in DEPRECATED and not allow_deprecated:
        return Resolution("rejected", None, f"{method} needs --allow-deprecated-quantization")
    return Resolution("accepted", method)


MIN_CAPABILITY: dict[str, float] = {
    "auto_gptq": 6.0,
    "inc": 6.0,
    "compressed-tensors": 7.0,
    "quark": 7.0,
    "moe_wna16": 7.0,
    "auto_awq": 7.5,
    "fp8": 7.5,
    "torchao": 7.5,
    "modelopt_fp4": 7.5,
    "humming": 7.5,
    "online": 7.5,
    "modelopt": 8.0,
    "mxfp8": 8.0,
    "mxfp4": 8.0,
    "gpt_oss_mxfp4": 8.0,
    "modelopt_mxfp8": 8.0,
    "experts_int8": 8.0,
    "fbgemm_fp8": 8.0,
    "fp_quant": 10.0,
}
"""Lowest CUDA compute capability by resolved method (class minima of 0.32)."""
