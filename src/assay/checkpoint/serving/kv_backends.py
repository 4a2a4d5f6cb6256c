"""Which attention backend takes which KV-cache dtype, and on which GPU (vLLM 0.32)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KV_DTYPES = frozenset({
    "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4_ds_mla",
    "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc", "ultraquant_4bit",
    "int4_per_token_head", "int8_per_token_head", "fp8_per_token_head", "nvfp4", "nvfp4_4over6",
})  # fmt: skip
"""Values of --kv-cache-dtype. `fp8` means e4m3."""

_FULL = frozenset({"auto", "float16", "bfloat16"})
_E4M3 = frozenset({"fp8", "fp8_e4m3"})
_E5M2 = frozenset({"fp8_e5m2"})
_PER_HEAD = frozenset({"int4_per_token_head", "int8_per_token_head", "fp8_per_token_head"})
_TURBO = frozenset(d for d in KV_DTYPES if d.startswith("turboquant"))


@dataclass(frozen=True)
class Backend:
    """KV dtypes of one backend; `heads` are the head sizes it takes (None: any)."""

    dtypes: frozenset[str]
    heads: frozenset[int] | None = None
    latent: bool = False


BACKENDS: Mapping[str, Backend] = {
    "FLASH_ATTN": Backend(_FULL | _E4M3),
    "FLASHINFER": Backend(_FULL | _E4M3 | _E5M2 | {"nvfp4", "nvfp4_4over6"}, frozenset({64, 128, 256, 512})),
    "TRITON_ATTN": Backend(_FULL | _E4M3 | _E5M2 | _PER_HEAD),
    "FLEX_ATTENTION": Backend(_FULL),
    "TURBOQUANT": Backend(_TURBO),
    "ULTRAQUANT": Backend(frozenset({"ultraquant_4bit"})),
    "HPC_ATTN": Backend(frozenset({"auto", "bfloat16", "fp8_e4m3"}), frozenset({128})),
    "CPU_ATTN": Backend(frozenset({"auto"}) | _E4M3 | _E5M2),
    "FLASHMLA": Backend(_FULL | _E4M3, latent=True),
    "CUTLASS_MLA": Backend(_FULL | _E4M3, latent=True),
    "FLASHINFER_MLA": Backend(_FULL | _E4M3, latent=True),
    "TRITON_MLA": Backend(_FULL | _E4M3, latent=True),
    "FLASH_ATTN_MLA": Backend(_FULL, latent=True),
    "FLASH_ATTN_MLA_SPARSE": Backend(frozenset({"auto", "bfloat16"}), latent=True),
}


def is_fp8(dtype: str) -> bool:
    """Whether a KV dtype is one of the eight-bit floats."""
    return dtype.startswith("fp8")


def capability_problem(backend: str, dtype: str, capability: float) -> str | None:
    """Why a backend cannot hold this KV dtype on a GPU of this compute capability, or None."""
    if backend == "TRITON_ATTN" and is_fp8(dtype) and capability < 8.9:
        return "Triton attention raises for any fp8 KV cache below compute capability 8.9"
    if backend == "FLASH_ATTN":
        if capability < 8.0:
            return "FlashAttention needs compute capability 8.0"
        if dtype in _E4M3 and not (9.0 <= capability < 11.0):
            return "FlashAttention holds fp8 KV only on compute capability 9.0 (FA3) and 10.x (FA4)"
    if backend == "FLASHINFER" and not 8.0 <= capability <= 12.1:
        return "FlashInfer serves compute capabilities 8.0 to 12.1"
    if backend == "HPC_ATTN" and int(capability) != 9:
        return "HPC attention needs compute capability 9.0"
    return None
