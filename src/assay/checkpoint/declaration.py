"""Find the quantisation that a checkpoint declares: in its config, or in a file beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from assay.checkpoint.documents import SIDECARS
from assay.checkpoint.storage import Kind, stored_kind
from assay.checkpoint.subject import Checkpoint

MODELSLIM = "quant_model_description.json"
"""File in which ModelSlim (Ascend) describes every tensor."""


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
    if described := checkpoint.object(MODELSLIM):
        return Found("ascend", described, MODELSLIM)
    if "polar_config.json" in checkpoint.files:
        return Found("polar", checkpoint.object("polar_config.json"), "polar_config.json")
    return None


def _mlx_stored(checkpoint: Checkpoint) -> bool:
    return any(stored_kind(params) is Kind.MLX for params in checkpoint.modules.values())


def _method(raw: Mapping[str, Any], key: str) -> str:
    """`quant_method` as vLLM normalises it: lower case, dashes; ModelOpt is known by its
    producer.
    """
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
