"""Which attention backend takes which KV-cache dtype, and on which GPU (vLLM 0.32)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

KV_DTYPES = frozenset(
    {
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
        "fp8_inc",
        "fp8_ds_mla",
        "nvfp4_ds_mla",
        "turboquant_k8v4",
        "turboquant_4bit_nc",
        "turboquant_k3v4_nc",
        "turboquant_3bit_nc",
        "ultraquant_4bit",
        "int4_per_token_head",
        "int8_per_token_head",
        "fp8_per_token_head",
        "nvfp4",
        "nvfp4_4over6",
    }
)
"""Values of --kv-cache-dtype. `fp8` means e4m3."""

Attention = Literal["ordinary", "latent", "sparse"]
"""What a model needs: keys and values per head, one latent vector (MLA), or the latter with an
indexer.
"""

_FULL = frozenset({"auto", "float16", "bfloat16"})

_E4M3 = frozenset({"fp8", "fp8_e4m3"})

_E5M2 = frozenset({"fp8_e5m2"})

_PER_HEAD = frozenset({"int4_per_token_head", "int8_per_token_head", "fp8_per_token_head"})

_TURBO = frozenset(d for d in KV_DTYPES if d.startswith("turboquant"))


@dataclass(frozen=True)
class Backend:
    """KV dtypes of one backend; `heads` are the head sizes it takes (None: any).

    `capability` is the lowest and highest CUDA compute capability, None where CUDA is not what it
    runs on.
    """

    dtypes: frozenset[str]
    heads: frozenset[int] | None = None
    attention: Attention = "ordinary"
    capability: tuple[float, float] | None = (0.0, 99.9)


_HOPPER, _BLACKWELL, _CONSUMER = (9.0, 9.9), (10.0, 10.9), (12.0, 12.9)

BACKENDS: Mapping[str, Backend] = {
    "FLASH_ATTN": Backend(_FULL | _E4M3, capability=(8.0, 99.9)),
    "FLASHINFER": Backend(
        _FULL | _E4M3 | _E5M2 | {"nvfp4", "nvfp4_4over6"},
        frozenset({64, 128, 256, 512}),
        capability=(8.0, 12.1),
    ),
    "TRITON_ATTN": Backend(_FULL | _E4M3 | _E5M2 | _PER_HEAD),
    "FLEX_ATTENTION": Backend(_FULL),
    "TURBOQUANT": Backend(_TURBO),
    "ULTRAQUANT": Backend(frozenset({"ultraquant_4bit"}), capability=None),
    "HPC_ATTN": Backend(
        frozenset({"auto", "bfloat16", "fp8_e4m3"}), frozenset({128}), capability=(9.0, 9.0)
    ),
    "B12X": Backend(
        frozenset({"auto", "bfloat16"}) | _E4M3,
        frozenset({64, 128, 192, 256}),
        capability=(12.0, 12.1),
    ),
    "CPU_ATTN": Backend(
        frozenset({"auto"}) | _E4M3 | _E5M2,
        frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512}),
        capability=None,
    ),
    "ROCM_ATTN": Backend(
        _FULL | _E4M3 | _E5M2, frozenset({32, 64, 80, 96, 128, 160, 192, 224, 256}), capability=None
    ),
    "ROCM_SEGMENTED_ATTN": Backend(_FULL | _E4M3, frozenset({64, 128, 256}), capability=None),
    "ROCM_AITER_FA": Backend(_FULL | _E4M3 | _E5M2, frozenset({64, 128, 256}), capability=None),
    "ROCM_AITER_UNIFIED_ATTN": Backend(_FULL | _E4M3 | _E5M2, capability=None),
    "FLASHMLA": Backend(_FULL | _E4M3, attention="latent", capability=(9.0, 10.9)),
    "CUTLASS_MLA": Backend(_FULL | _E4M3, attention="latent", capability=_BLACKWELL),
    "FLASHINFER_MLA": Backend(_FULL | _E4M3, attention="latent", capability=_BLACKWELL),
    "TOKENSPEED_MLA": Backend(_E4M3, attention="latent", capability=_BLACKWELL),
    "TRITON_MLA": Backend(_FULL | _E4M3, attention="latent"),
    "FLASH_ATTN_MLA": Backend(_FULL, attention="latent", capability=_HOPPER),
    "ROCM_AITER_MLA": Backend(_FULL | _E4M3 | _E5M2, attention="latent", capability=None),
    "CPU_MLA": Backend(frozenset({"auto"}), attention="latent", capability=None),
    "FLASHMLA_SPARSE": Backend(
        frozenset({"auto", "bfloat16", "fp8_ds_mla", "fp8", "nvfp4_ds_mla"}),
        attention="sparse",
        capability=(9.0, 10.9),
    ),
    "FLASHINFER_MLA_SPARSE": Backend(_FULL | _E4M3, attention="sparse", capability=_BLACKWELL),
    "FLASHINFER_MLA_SPARSE_SM90": Backend(
        frozenset({"auto", "bfloat16"}) | _E4M3, attention="sparse", capability=_HOPPER
    ),
    "FLASHINFER_MLA_SPARSE_SM120": Backend(
        frozenset({"auto", "fp8_ds_mla"}) | _E4M3, attention="sparse", capability=_CONSUMER
    ),
    "FLASH_ATTN_MLA_SPARSE": Backend(_FULL, attention="sparse", capability=_HOPPER),
    "ROCM_AITER_MLA_SPARSE": Backend(_FULL | _E4M3, attention="sparse", capability=None),
    "XPU_MLA_SPARSE": Backend(_FULL, attention="sparse", capability=None),
}

OTHER_NAMES = frozenset(
    {
        "FLASH_ATTN_DIFFKV",
        "TRITON_ATTN_DIFFKV",
        "TRITON_FLASH_ATTN",
        "ROCM_AITER_TRITON_MLA",
        "TORCH_SDPA",
        "TRITON_FLASHINFER",
        "FLASHMLA_SPARSE_DSV4",
        "FLASHINFER_MLA_SPARSE_DSV4",
        "ROCM_FLASHMLA_SPARSE_DSV4",
        "FLASHMLA_SPARSE_DSV41",
        "FLASHINFER_MLA_SPARSE_DSV41",
        "FLASHMLA_MEGA_ATTN_DSV41",
        "MINIMAX_M3_SPARSE",
        "CUTLASS_MSA",
        "TRITON_MSA",
        "NO_ATTENTION",
        "AMX_MLA",
        "CUSTOM",
    }
)
"""Backends that exist and are chosen by single models; nothing is said about them."""

_ORDINARY = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TURBOQUANT")


def preference(attention: Attention, capability: float) -> tuple[str, ...]:
    """The backends that vLLM tries on a CUDA GPU of this compute capability, in its order."""
    major = int(capability)
    if attention == "ordinary":
        return ("FLASHINFER", "FLASH_ATTN", *_ORDINARY[2:]) if major == 10 else _ORDINARY
    if attention == "latent":
        if major == 10:
            return ("FLASHINFER_MLA", "TOKENSPEED_MLA", "CUTLASS_MLA", "FLASHMLA", "TRITON_MLA")
        return ("TRITON_MLA",) if major == 12 else ("FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA")
    if major == 12:
        return ("FLASHINFER_MLA_SPARSE_SM120",)
    if major == 10:
        return ("FLASHINFER_MLA_SPARSE", "FLASHMLA_SPARSE")
    return ("FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM90")


def chosen(attention: Attention, dtype: str, capability: float, head: int | None) -> str | None:
    """The backend that vLLM picks when none is named, or None if none of them holds this KV
    dtype.
    """
    for name in preference(attention, capability):
        backend = BACKENDS[name]
        fits = attention != "ordinary" or not (backend.heads and head) or head in backend.heads
        if (
            dtype in backend.dtypes
            and fits
            and selection_problem(name, dtype, capability, head) is None
        ):
            return name
    return None


def is_fp8(dtype: str) -> bool:
    """Whether a KV dtype is one of the eight-bit floats."""
    return dtype.startswith("fp8")


def selection_problem(
    name: str, dtype: str, capability: float, head: int | None = None
) -> str | None:
    """Why vLLM does not select a backend for this KV dtype on a GPU of this compute capability, or
    None.
    """
    backend = BACKENDS[name]
    if backend.capability is None:
        return f"{name} does not run on CUDA"
    low, high = backend.capability
    if not low <= capability <= high:
        span = f"{low}" if low == high else f"{low} and above" if high > 99 else f"{low} to {high}"
        return f"{name} runs on compute capability {span}"
    if name == "FLASH_ATTN" and dtype in _E4M3 and not 9.0 <= capability < 11.0:
        return "FlashAttention holds fp8 KV only on compute capability 9.0 (FA3) and 10.x (FA4)"
    if name == "FLASHINFER" and dtype.startswith("nvfp4"):
        return _nvfp4_problem(dtype, int(capability), head)
    return None


def _nvfp4_problem(dtype: str, major: int, head: int | None) -> str | None:
    if major == 11:
        return "FlashInfer holds no nvfp4 KV on compute capability 11"
    if major != 10 and dtype != "nvfp4":
        return f"FlashInfer holds {dtype} KV only on compute capability 10"
    if major != 10 and head == 64:
        return "FlashInfer misreads nvfp4 KV at a head size of 64 there"
    return None


def construction_problem(name: str, dtype: str, capability: float) -> str | None:
    """What a backend that was selected then raises when it is built."""
    if name != "TRITON_ATTN":
        return None
    if is_fp8(dtype) and capability < 8.9:
        return "Triton attention raises for any fp8 KV cache below compute capability 8.9"
    if dtype == "bfloat16" and capability < 8.0:
        return "Triton attention raises for a bfloat16 KV cache below compute capability 8.0"
    return None
