"""The KV-cache dtype that a checkpoint declares, and the scales that it ships for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from assay.checkpoint.declared import Declared
from assay.checkpoint.findings import found, warned
from assay.checkpoint.subject import Checkpoint
from assay.checkpoint.tensors import layer_index
from assay.verdict import Finding

_SCALE = re.compile(r"\.(?:[kv]_scale|kv_scale|[kv]_proj\.output_scale|[kv]_proj\.[kv]_scale)$")

_NAMES = {"float8": "fp8", "float4": "nvfp4"}


@dataclass(frozen=True)
class KvCache:
    """`declared` is `fp8`, `nvfp4` … or None; `layers` are those with scales; `dynamic` needs
    none.
    """

    declared: str | None
    dynamic: bool
    layers: frozenset[int]


def kv_cache(checkpoint: Checkpoint, declared: Declared | None) -> KvCache:
    """What the checkpoint says about its KV cache."""
    layers = frozenset(
        i
        for name in checkpoint.tensors
        if _SCALE.search(name) and (i := layer_index(name)) is not None
    )
    raw = declared.raw if declared is not None else {}
    algorithm, scheme = (raw.get("kv_cache_quant_algo") or "").lower(), raw.get("kv_cache_scheme")
    if algorithm not in {"", "none"}:
        return KvCache(algorithm, False, layers)
    if scheme:
        kind = f"{scheme.get('type')}{scheme.get('num_bits')}"
        return KvCache(_NAMES.get(kind, kind), scheme.get("dynamic") in {True, "local"}, layers)
    return KvCache(None, False, layers)


def check_kv(checkpoint: Checkpoint, cache: KvCache) -> Iterator[Finding]:
    """A declared static KV cache needs scales in every layer that has a cache."""
    if cache.declared is None or cache.dynamic:
        return
    attending = {
        i
        for module in checkpoint.modules
        if module.endswith(("self_attn.k_proj", "self_attn.kv_b_proj", "self_attn.qkv_proj"))
        and module.startswith(checkpoint.prefix)
        and (i := layer_index(module + ".")) is not None
    }
    lacking = sorted(attending - cache.layers)
    if attending and not cache.layers:
        title = (
            f"a static {cache.declared} KV cache is declared, but the checkpoint has no k/v scales"
        )
        detail = (
            "Engines then use a scale of 1.0, which is safe only if keys and values stay within the"
            " type's range."
        )
        remedies = ["serve with --kv-cache-dtype auto, or calibrate the scales"]
        yield warned(
            "kv_dtype_conflict", title, detail=detail, remedies=remedies, declared=cache.declared
        )
    elif lacking:
        title = (
            f"{len(lacking)} of {len(attending)} layers lack the k/v scales that the others have"
        )
        yield found("kv_dtype_conflict", title, layers=lacking, declared=cache.declared)
