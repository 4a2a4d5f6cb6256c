"""Tensor types of GGUF: elements a block, bytes a block, and the float16 scales of a block."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GgmlType:
    """`scales` are the byte offsets of float16 scales within a block."""

    name: str
    block: int
    nbytes: int
    scales: tuple[int, ...] = ()


TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    30: GgmlType("BF16", 1, 2),
    28: GgmlType("F64", 1, 8),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    2: GgmlType("Q4_0", 32, 18, (0,)),
    3: GgmlType("Q4_1", 32, 20, (0, 2)),
    6: GgmlType("Q5_0", 32, 22, (0,)),
    7: GgmlType("Q5_1", 32, 24, (0, 2)),
    8: GgmlType("Q8_0", 32, 34, (0,)),
    9: GgmlType("Q8_1", 32, 36, (0, 2)),
    10: GgmlType("Q2_K", 256, 84, (80, 82)),
    11: GgmlType("Q3_K", 256, 110, (108,)),
    12: GgmlType("Q4_K", 256, 144, (0, 2)),
    13: GgmlType("Q5_K", 256, 176, (0, 2)),
    14: GgmlType("Q6_K", 256, 210, (208,)),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66, (0,)),
    17: GgmlType("IQ2_XS", 256, 74, (0,)),
    18: GgmlType("IQ3_XXS", 256, 98, (0,)),
    19: GgmlType("IQ1_S", 256, 50, (0,)),
    20: GgmlType("IQ4_NL", 32, 18, (0,)),
    21: GgmlType("IQ3_S", 256, 110, (0,)),
    22: GgmlType("IQ2_S", 256, 82, (0,)),
    23: GgmlType("IQ4_XS", 256, 136, (0,)),
    29: GgmlType("IQ1_M", 256, 56),
    34: GgmlType("TQ1_0", 256, 54, (52,)),
    35: GgmlType("TQ2_0", 256, 66, (64,)),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18, (0,)),
}
"""By the number that a tensor table uses."""

FOREIGN = range(1024)
"""Other numbers up to here are another engine's types (ik_llama.cpp counts from 97), dropped or
newer ones.
"""
