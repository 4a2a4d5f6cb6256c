"""Runs in a Python that has Triton: the kernel of the trellis is compiled for GPUs that are not
here.
"""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from assay_lab.trellis_kernel import _search

KINDS = {
    "costs_at": "*fp32",
    "words_at": "*i32",
    "out_at": "*i16",
    "rows": "i32",
    "count": "i32",
    "far": "fp32",
}
FIXED = {"half": 4, "quantisers": 0b11001100, "parities": 0b11111010, "block": 2, "lanes": 32}
source = ASTSource(
    fn=_search,
    signature={**KINDS, **dict.fromkeys(FIXED, "constexpr")},
    constexprs=FIXED,
    attrs={(i,): [["tt.divisibility", 16]] for i in (0, 1, 2)},
)
for capability in (80, 90, 100):
    found = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 1, "enable_fp_fusion": False},
    )
    code = found.asm["ptx"]
    assert "ld.global.v4" in code
    assert not any(word in code for word in ("shfl", ".shared.b", "fma")), capability
sys.stdout.write("compiled\n")
