"""`--kv-cache-dtype` against checkpoint, backend and GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from assay.checkpoint.declared import Declared
from assay.checkpoint.findings import found, warned
from assay.checkpoint.flags.command import ServeArgs
from assay.checkpoint.flags.kv_backends import (
    BACKENDS,
    KV_DTYPES,
    OTHER_NAMES,
    Attention,
    chosen,
    construction_problem,
    is_fp8,
    selection_problem,
)
from assay.checkpoint.kv_cache import KvCache
from assay.checkpoint.pieces import Dims
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
    """Combinations that the engine rejects, stores otherwise than it says, or runs without
    scales.
    """
    if kv.dtype not in KV_DTYPES:
        title = f"--kv-cache-dtype {kv.dtype} is not a KV-cache dtype of vLLM 0.32"
        yield found(
            "flag_rejected",
            title,
            flag="--kv-cache-dtype",
            value=kv.dtype,
            allowed=sorted(KV_DTYPES),
        )
        return
    attention = attention_of(checkpoint)
    head = None if attention != "ordinary" else Dims(checkpoint.text_config).head_dim or None
    backend = kv.backend
    if backend is not None:
        yield from _backend(kv, backend, attention, head)
    elif kv.capability is not None:
        backend = chosen(attention, kv.dtype, kv.capability, head)
        yield from _automatic(kv, backend, kv.capability, attention)
    yield from _e5m2(declared, cache, kv, attention, backend)
    yield from _scales(cache, kv)


def attention_of(checkpoint: Checkpoint) -> Attention:
    """Which kind of attention the config asks for."""
    if not checkpoint.dims("kv_lora_rank"):
        return "ordinary"
    return "sparse" if checkpoint.dims("index_topk") else "latent"


def _e5m2(
    declared: Declared | None,
    cache: KvCache,
    kv: KvChoice,
    attention: Attention,
    backend: str | None,
) -> Iterator[Finding]:
    if kv.dtype != "fp8_e5m2":
        return
    if declared is not None and _holds_kv_scales(declared, cache):
        title = (
            f"--kv-cache-dtype fp8_e5m2 is refused for a {declared.method} checkpoint, which has"
            " k/v scales of its own"
        )
        yield found("kv_dtype_conflict", title, remedies=["use fp8 (e4m3) or auto"], flag=kv.dtype)
    elif attention != "ordinary":
        title = "no CUDA backend for latent attention (MLA) holds fp8_e5m2"
        remedies = ["use fp8 or auto"]
        yield found(
            "kv_dtype_conflict", title, remedies=remedies, references=[_BACKENDS], flag=kv.dtype
        )
    elif backend == "TRITON_ATTN" and (kv.capability is None or kv.capability >= 8.9):
        title = "Triton attention stores fp8_e5m2 as e4m3: the label does not say what is stored"
        yield warned("kv_dtype_conflict", title, flag=kv.dtype, backend=backend)


def _holds_kv_scales(declared: Declared, cache: KvCache) -> bool:
    """Weight-only compressed-tensors checkpoints may take e5m2; those that declare a KV scheme may
    not.
    """
    if declared.method == "compressed-tensors":
        return cache.declared is not None
    return declared.method in {
        "fp8",
        "fbgemm_fp8",
        "modelopt",
        "modelopt_fp4",
        "modelopt_mixed",
        "quark",
    }


def _scales(cache: KvCache, kv: KvChoice) -> Iterator[Finding]:
    if kv.dtype in {"fp8", "fp8_e4m3"} and not cache.layers and not cache.dynamic:
        title = (
            f"--kv-cache-dtype {kv.dtype} on a checkpoint without k/v scales: the engine uses a"
            " scale of 1.0"
        )
        remedies = [
            "measure what it costs (assay compare, assay check), calibrate scales, or use auto"
        ]
        yield warned(
            "kv_dtype_conflict", title, remedies=remedies, references=[_SCALES], flag=kv.dtype
        )
    plain = kv.dtype in {"auto", "float16", "bfloat16"}
    if cache.declared and not plain and not _same(cache.declared, kv.dtype):
        title = (
            f"the checkpoint's KV scales are for {cache.declared}, the command line asks for"
            f" {kv.dtype}"
        )
        yield found(
            "kv_dtype_conflict",
            title,
            remedies=["use auto"],
            declared=cache.declared,
            flag=kv.dtype,
        )


def _same(declared: str, dtype: str) -> bool:
    return (declared.startswith("fp8") and is_fp8(dtype)) or (
        declared.startswith("nvfp4") and "nvfp4" in dtype
    )


def _automatic(
    kv: KvChoice, backend: str | None, capability: float, attention: Attention
) -> Iterator[Finding]:
    """No backend was named: is there one, and can it be built?"""
    evidence: dict[str, Any] = {
        "flag": kv.dtype,
        "compute_capability": capability,
        "chosen": backend,
    }
    if backend is None:
        kind = {
            "ordinary": "",
            "latent": " for latent attention",
            "sparse": " for sparse latent attention",
        }
        title = (
            f"no attention backend{kind[attention]} holds a {kv.dtype} KV cache on compute"
            f" capability {capability}"
        )
        yield found("kv_dtype_conflict", title, references=[_BACKENDS], **evidence)
    elif problem := construction_problem(backend, kv.dtype, capability):
        title = f"{problem}, and the engine would choose it here"
        yield found("kv_dtype_conflict", title, references=[_BACKENDS], **evidence)


def _backend(
    kv: KvChoice, backend: str, attention: Attention, head: int | None
) -> Iterator[Finding]:
    known = BACKENDS.get(backend)
    if known is None:
        if backend not in OTHER_NAMES:
            closest = get_close_matches(backend, sorted({*BACKENDS, *OTHER_NAMES}), n=1)
            title = f"{backend} is no attention backend of vLLM 0.32" + (
                f"; did you mean {closest[0]}?" if closest else ""
            )
            yield found("flag_rejected", title, flag="--attention-backend", references=[_BACKENDS])
        return
    if known.attention != attention:
        need = {
            "ordinary": "ordinary attention",
            "latent": "latent attention (MLA)",
            "sparse": "sparse latent attention",
        }
        title = (
            f"the backend {backend} is for {need[known.attention]}, this model uses"
            f" {need[attention]}"
        )
        yield found("flag_rejected", title, flag=backend)
        return
    if kv.dtype not in known.dtypes:
        title = f"the attention backend {backend} does not hold a {kv.dtype} KV cache"
        remedies = ["leave --attention-backend out, or choose another KV dtype"]
        evidence: dict[str, Any] = {
            "backend": backend,
            "flag": kv.dtype,
            "allowed": sorted(known.dtypes),
        }
        yield found(
            "kv_dtype_conflict", title, remedies=remedies, references=[_BACKENDS], **evidence
        )
    elif kv.capability is not None:
        problem = selection_problem(backend, kv.dtype, kv.capability, head)
        problem = problem or construction_problem(backend, kv.dtype, kv.capability)
        if problem:
            gpu: dict[str, Any] = {
                "backend": backend,
                "flag": kv.dtype,
                "compute_capability": kv.capability,
            }
            yield found("kv_dtype_conflict", problem, references=[_BACKENDS], **gpu)
    if known.heads is not None and head and head not in known.heads:
        title = f"the backend {backend} takes heads of {sorted(known.heads)}, this model has {head}"
        yield found("flag_rejected", title, backend=backend, head_dim=head)
