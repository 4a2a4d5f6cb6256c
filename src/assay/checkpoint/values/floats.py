"""Bit patterns of stored floats: NaN, Inf, zeros and the largest value by integer comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class FloatFormat:
    """`magnitude` masks the sign off; patterns above `finite` are Inf or NaN, `infinity` is Inf
    itself (0: none).

    Nonzero magnitudes below `normal` are denormal. Magnitudes order like the values, so integers
    can be compared.
    """

    word: str
    magnitude: int
    finite: int
    infinity: int
    normal: int


FLOAT_FORMATS: Mapping[str, FloatFormat] = {
    "F64": FloatFormat(
        "<u8", (1 << 63) - 1, 0x7FEF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000, 0x0010_0000_0000_0000
    ),
    "F32": FloatFormat("<u4", 0x7FFF_FFFF, 0x7F7F_FFFF, 0x7F80_0000, 0x0080_0000),
    "BF16": FloatFormat("<u2", 0x7FFF, 0x7F7F, 0x7F80, 0x0080),
    "F16": FloatFormat("<u2", 0x7FFF, 0x7BFF, 0x7C00, 0x0400),
    "F8_E4M3": FloatFormat("u1", 0x7F, 0x7E, 0, 0x08),
    "F8_E5M2": FloatFormat("u1", 0x7F, 0x7B, 0x7C, 0x04),
    "F8_E8M0": FloatFormat("u1", 0xFF, 0xFE, 0, 0),
}


def largest_magnitude(words: np.ndarray[Any, Any], form: FloatFormat) -> int:
    """The largest pattern without its sign among unsigned words, which must not be none.

    Read as unsigned, negative floats come last and order by magnitude; read as signed, the others
    do. Two maxima of integers run several times as fast as any operation that writes a result.
    """
    highest, top = int(words.max()), 1 << (8 * words.itemsize - 1)
    if form.magnitude >= top:  # a type without a sign
        return highest
    negative = highest - top if highest >= top else 0
    return max(negative, int(words.view(f"<i{words.itemsize}").max()), 0)


INTEGER_WORDS: Mapping[str, str] = {
    "I8": "i1",
    "U8": "u1",
    "I16": "<i2",
    "U16": "<u2",
    "I32": "<i4",
    "U32": "<u4",
    "I64": "<i8",
    "U64": "<u8",
}


def to_float(words: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Stored words as float64 (for samples; Inf and NaN stay what they are)."""
    if dtype == "BF16":
        return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype in _VIEWS:
        return words.view(_VIEWS[dtype]).astype(np.float64)
    if dtype == "F8_E8M0":
        powers: np.ndarray[Any, Any] = np.exp2(words.astype(np.float64) - 127)
        return powers
    return _small_float(words, *((3, 7) if dtype == "F8_E4M3" else (2, 15)))


_VIEWS = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}


def _small_float(words: np.ndarray[Any, Any], mantissa: int, bias: int) -> np.ndarray[Any, Any]:
    """Eight-bit floats: value = ± (1 + m/2^mantissa) · 2^(e − bias), without the hidden one where e
    is zero.
    """
    word = words.astype(np.int64)
    exponent, fraction = (word & 0x7F) >> mantissa, (word & ((1 << mantissa) - 1)) / (1 << mantissa)
    value = np.where(
        exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * np.exp2(exponent - bias)
    )
    special = (word & 0x7F) == 0x7F if mantissa == 3 else exponent == 31
    result: np.ndarray[Any, Any] = np.where(special, np.nan, np.where(word & 0x80, -value, value))
    return result
