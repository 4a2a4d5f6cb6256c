"""The registry of quantisation schemes: a new scheme is one function and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from assay.checkpoint.declaration import Found, find
from assay.checkpoint.declared import Declared
from assay.checkpoint.schemes.compressed_tensors import compressed_tensors
from assay.checkpoint.schemes.floats import fp8, modelopt, mxfp4
from assay.checkpoint.schemes.integers import auto_round, awq, gptq, mlx
from assay.checkpoint.schemes.others import bitsandbytes, hqq, modelslim, torchao, unopened
from assay.checkpoint.subject import Checkpoint

SCHEMES: Mapping[str, Callable[[Found], Declared]] = {
    "gptq": gptq,
    "awq": awq,
    "auto-round": auto_round,
    "inc": auto_round,
    "mlx": mlx,
    "fp8": fp8,
    "fbgemm_fp8": fp8,
    "mxfp8": fp8,
    "modelopt": modelopt,
    "modelopt_fp4": modelopt,
    "modelopt_mixed": modelopt,
    "mxfp4": mxfp4,
    "compressed-tensors": compressed_tensors,
    "bitsandbytes": bitsandbytes,
    "torchao": torchao,
    "hqq": hqq,
    "ascend": modelslim,
}


def parse(checkpoint: Checkpoint) -> Declared | None:
    """The checkpoint's declaration, understood; None if it declares nothing."""
    found = find(checkpoint)
    return SCHEMES.get(found.method, unopened)(found) if found is not None else None
