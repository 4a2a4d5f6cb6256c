"""What vLLM's own code makes of checkpoints and flags; runs inside vLLM's environment, which needs
no GPU for it.

Reads `{"kinds": {name: {"config": …, "model_type": …}}, "flags": […]}` from stdin; prints
`{"cells": {name: {flag: outcome}}, "methods": […], "capability": {method: n}}`.
"""

from __future__ import annotations

import copy
import json
import sys
from types import SimpleNamespace

import vllm.config.model as model
import vllm.model_executor.layers.quantization as quantization
from vllm.platforms import current_platform as real
from vllm.platforms.interface import DeviceCapability, PlatformEnum

sys.stdin.reconfigure(encoding="utf-8")

# Everything is imported under the real (CPU) platform, because kernels are looked up on import;
# then it is told that this is an H100, because AWQ decides otherwise on a CPU.
METHODS = {
    name: quantization.get_quantization_config(name) for name in quantization.QUANTIZATION_METHODS
}
quantization.get_quantization_config = METHODS.__getitem__


class Hopper(type(real)):
    _enum = PlatformEnum.CUDA
    device_type = "cuda"
    supported_quantization = ()

    @classmethod
    def get_device_capability(cls, device_id=0):
        return DeviceCapability(9, 0)


hopper = Hopper()
for module in list(sys.modules.values()):
    if (
        getattr(module, "__name__", "").startswith("vllm")
        and getattr(module, "current_platform", None) is real
    ):
        module.current_platform = hopper


def normalised(config):
    """As vLLM's reader of config.json does it."""
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    holder = SimpleNamespace(quantization_config=copy.deepcopy(config))
    return ModelArchConfigConvertorBase._normalize_quantization_config(None, holder)


def cell(config, model_type, flag):
    asked = SimpleNamespace(
        quantization=flag, allow_deprecated_quantization=False,
        hf_config=SimpleNamespace(model_type=model_type, architectures=["LlamaForCausalLM"]),
        model_arch_config=SimpleNamespace(quantization_config=normalised(config)),
    )  # fmt: skip
    try:
        model.ModelConfig._verify_quantization(asked)
    except ValueError as error:
        return f"ERR {error}"
    return str(asked.quantization)


asked = json.load(sys.stdin)
print(
    json.dumps(
        {
            "cells": {
                name: {
                    flag: cell(kind["config"], kind["model_type"], None if flag == "None" else flag)
                    for flag in asked["flags"]
                }
                for name, kind in asked["kinds"].items()
            },
            "methods": sorted(METHODS),
            "capability": {name: method.get_min_capability() for name, method in METHODS.items()},
        }
    )
)
