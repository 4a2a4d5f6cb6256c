"""The 26 kinds of checkpoint whose flags are tabled: what each writes into its config.json."""

from __future__ import annotations

from typing import Any

Raw = dict[str, Any]


def _modelopt(algorithm: str) -> Raw:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "producer": {"name": "modelopt"}}


def _round(packing: str) -> Raw:
    return {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "data_type": "int",
        "packing_format": packing,
    }


KINDS: dict[str, Raw | None] = {
    "none": None,
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "auto-round(gptq pack)": _round("auto_round:auto_gptq"),
    "auto-round(awq pack)": _round("auto_round:auto_awq"),
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {},
    },
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "modelopt FP8": _modelopt("FP8"),
    "modelopt NVFP4": _modelopt("NVFP4"),
    "modelopt_fp4": {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"},
    "modelopt MIXED": _modelopt("MIXED_PRECISION"),
    "mxfp4(gpt_oss)": {"quant_method": "mxfp4"},
    "mxfp4(other)": {"quant_method": "mxfp4"},
    "mxfp8": {"quant_method": "mxfp8"},
    "quark": {"quant_method": "quark"},
    "torchao": {"quant_method": "torchao", "quant_type": {"default": {}}},
    "hqq": {"quant_method": "hqq"},
    "gguf": {"quant_method": "gguf"},
    "aqlm": {"quant_method": "aqlm"},
    "fbgemm_fp8": {"quant_method": "fbgemm_fp8"},
    "fp_quant": {"quant_method": "fp_quant"},
    "eetq": {"quant_method": "eetq"},
    "bitnet": {"quant_method": "bitnet"},
    "exl3": {"quant_method": "exl3"},
    "polar": {"quant_method": "polar"},
}


def model_type(kind: str) -> str:
    return "gpt_oss" if kind == "mxfp4(gpt_oss)" else "llama"
