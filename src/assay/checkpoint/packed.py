"""How many values a packed weight holds, compared with the matrix that the config promises."""

from __future__ import annotations

import math

from assay.checkpoint.storage import CARRIERS, Kind
from assay.checkpoint.tensors import Params

_HALF_BYTE = frozenset({Kind.NVFP4, Kind.NVFP4_PACKED, Kind.MXFP4, Kind.BNB4})

_WORDS = frozenset({Kind.GPTQ, Kind.AWQ, Kind.PACKED})


def values(kind: Kind, params: Params, bits: int | None) -> int | None:
    """Number of values that the packed weight holds; None where the kind or its width does not
    tell.

    Words of 32 bits hold `32 / bits` values, GPTQ's three-bit words 32 in three.
    """
    name = next((c for c in CARRIERS if c in params), None)
    if name is None:
        return None
    stored = math.prod(params[name].shape)
    if kind in _HALF_BYTE and params[name].dtype == "U8":
        return 2 * stored
    if kind is Kind.HQQ and bits in {1, 2, 4, 8} and params[name].dtype == "U8":
        return stored * 8 // bits
    if kind not in _WORDS or not bits or bits > 8:
        return None
    if kind is Kind.GPTQ and bits == 3:
        return stored * 32 // 3
    return stored * (32 // bits)


def disagreement(
    kind: Kind, params: Params, bits: int | None, promised: tuple[int, ...]
) -> str | None:
    """A complaint if a packed weight cannot be the matrix [out, in] that the config promises."""
    held = values(kind, params, bits)
    if held is None or len(promised) != 2:
        return None
    out, width = promised
    per_word = 32 // bits if kind is Kind.PACKED and bits else 1
    wanted = (
        out * -(-width // per_word) * per_word
    )  # compressed-tensors fills up each row's last word
    if held == wanted:
        return None
    packed = f" at {bits} bits" if bits else ""
    return f"it packs {held} values{packed}; the config needs {out} × {width} = {out * width}"
