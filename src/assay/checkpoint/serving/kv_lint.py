"""--kv-cache-dtype against checkpoint, backend and GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from assay.checkpoint.findings import found, warned
from assay.checkpoint.quantization.declared import Declared
from assay.checkpoint.quantization.kv import KvCache
from assay.checkpoint.serving.arguments import ServeArgs
from assay.checkpoint.serving.kv_backends import BACKENDS, KV_DTYPES, capability_problem, is_fp8
from assay.checkpoint.subject import Checkpoint
from assay.verdict import Finding

_SCALES = "https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache/"
_BACKENDS = "https://docs.vllm.ai/en/v0.32.0/design/attention_backends/"


@dataclass(frozen=True)
class KvChoice:
    """What the command line and the checkpoint decide together."""

    dtype: str
    backend: str | None
    capability: float | None


def choice(args: ServeArgs, capability: float | None) -> KvChoice:
    """The KV dtype and backend of a command line."""
    backend = args.get("--attention-backend")
    if backend is None:
        attention = args.structure("--attention-config") or {}
        named = attention.get("backend")
        backend = named if isinstance(named, str) else None
    dtype = (args.get("--kv-cache-dtype") or "auto").lower()
    return KvChoice(dtype, backend.upper() if backend else None, capability)


def lint_kv(
    checkpoint: Checkpoint, declared: Declared | None, cache: KvCache, kv: KvChoice
) -> Iterator[Finding]:
    """Combinations that the engine rejects, stores otherwise than it says, or runs without scales."""
    if kv.dtype not in KV_DTYPES:
        title = f"--kv-cache-dtype {kv.dtype} is not a KV-cache dtype of vLLM 0.32"
        yield found(
            "flag_rejected", title, flag="--kv-cache-dtype", value=kv.dtype, allowed=sorted(KV_DTYPES)
        )
        return
    latent = checkpoint.dims("kv_lora_rank") is not None
    if kv.backend is not None:
        yield from _backend(checkpoint, kv, kv.backend, latent)
    if kv.dtype == "fp8_e5m2":
        if (
            declared is not None and declared.method in {"fp8", "compressed-tensors", "modelopt"}
        ) or cache.layers:
            title = "--kv-cache-dtype fp8_e5m2 is refused for a checkpoint with fp8 weights or k/v scales"
            yield found("kv_dtype_conflict", title, remedies=["use fp8 (e4m3) or auto"], flag=kv.dtype)
        elif latent:
            title = "no backend for latent attention (MLA) holds fp8_e5m2"
            yield found(
                "kv_dtype_conflict",
                title,
                remedies=["use fp8 or auto"],
                references=[_BACKENDS],
                flag=kv.dtype,
            )
        elif kv.backend == "TRITON_ATTN":
            title = "Triton attention stores fp8_e5m2 as e4m3: the label does not say what is stored"
            yield warned("kv_dtype_conflict", title, flag=kv.dtype, backend=kv.backend)
    if kv.dtype in {"fp8", "fp8_e4m3"} and not cache.layers:
        title = (
            f"--kv-cache-dtype {kv.dtype} on a checkpoint without k/v scales: the engine uses a scale of 1.0"
        )
        remedies = ["measure what it costs (assay compare, assay check), calibrate scales, or use auto"]
        yield warned("kv_dtype_conflict", title, remedies=remedies, references=[_SCALES], flag=kv.dtype)
    if (
        cache.declared
        and kv.dtype not in {"auto", "float16", "bfloat16"}
        and not _same(cache.declared, kv.dtype)
    ):
        title = f"the checkpoint's KV scales are for {cache.declared}, the command line asks for {kv.dtype}"
        yield found("kv_dtype_conflict", title, remedies=["use auto"], declared=cache.declared, flag=kv.dtype)


def _same(declared: str, dtype: str) -> bool:
    return (declared.startswith("fp8") and is_fp8(dtype)) or (
        declared.startswith("nvfp4") and "nvfp4" in dtype
    )


def _backend(checkpoint: Checkpoint, kv: KvChoice, backend: str, latent: bool) -> Iterator[Finding]:
    known = BACKENDS.get(backend)
    if known is None:
        return
    if kv.dtype not in known.dtypes:
        title = f"the attention backend {backend} does not hold a {kv.dtype} KV cache"
        remedies = ["leave --attention-backend out, or choose another KV dtype"]
        evidence: dict[str, Any] = {"backend": backend, "flag": kv.dtype, "allowed": sorted(known.dtypes)}
        yield found("kv_dtype_conflict", title, remedies=remedies, references=[_BACKENDS], **evidence)
    elif kv.capability is not None and (problem := capability_problem(backend, kv.dtype, kv.capability)):
        yield found(
            "kv_dtype_conflict", problem, backend=backend, flag=kv.dtype, compute_capability=kv.capability
        )
    if known.latent != latent:
        needs = "latent attention (MLA)" if known.latent else "ordinary attention"
        yield found(
            "flag_rejected",
            f"the backend {backend} is for {needs}, which this model does not use",
            flag=backend,
        )
    head = checkpoint.dims("head_dim")
    if known.heads is not None and head and head not in known.heads and not latent:
        title = f"the backend {backend} takes heads of {sorted(known.heads)}, this model has {head}"
        yield found("flag_rejected", title, backend=backend, head_dim=head)
