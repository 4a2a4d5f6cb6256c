"""What a checkpoint declares about its quantisation, whichever file it says it in."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from assay.checkpoint.quantization.stored import Kind
from assay.checkpoint.subject import Checkpoint
from assay.checkpoint.tensors import Params

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
