"""The registry of quantisation schemes: a new one is one function and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from assay.checkpoint.quantization import (
    compressed_tensors,
    declared,
    float_schemes,
    integer_schemes,
    other_schemes,
)
from assay.checkpoint.quantization.declared import Declared, Found
from assay.checkpoint.subject import Checkpoint

SCHEMES: Mapping[str, Callable[[Found], Declared]] = {
    "gptq": integer_schemes.gptq,
    "awq": integer_schemes.awq,
    "auto-round": integer_schemes.auto_round,
    "inc": integer_schemes.auto_round,
    "fp8": float_schemes.fp8,
    "fbgemm_fp8": float_schemes.fp8,
    "modelopt": float_schemes.modelopt,
    "modelopt_fp4": float_schemes.modelopt,
    "modelopt_mixed": float_schemes.modelopt,
    "mxfp8": float_schemes.mxfp8,
    "mxfp4": float_schemes.mxfp4,
    "compressed-tensors": compressed_tensors.compressed_tensors,
    "bitsandbytes": other_schemes.bitsandbytes,
    "torchao": other_schemes.torchao,
    "hqq": other_schemes.hqq,
}

KNOWN_BY_NAME = frozenset({
    "quark", "aqlm", "eetq", "bitnet", "exl2", "exl3", "polar", "fp_quant", "spqr", "vptq", "higgs", "quanto",
    "gguf", "mlx", "sinq", "paroquant",
})  # fmt: skip


def parse(checkpoint: Checkpoint) -> Declared | None:
    """The checkpoint's declaration, understood; None if it declares nothing."""
    found = declared.find(checkpoint)
    if found is None:
        return None
    return SCHEMES.get(found.method, other_schemes.unopened)(found)
