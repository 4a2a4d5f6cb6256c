"""vLLM's TurboQuant caches on model runner V1, the one whose steps assay follows.

vLLM 0.25's V1 asks a layer's backend for its cache as of type `auto` unless the layer's cache names a quantisation, which
TurboQuant's does not; its backend then stops with "Unknown TurboQuant cache dtype: 'auto'". Runner V2 makes an
exception for these caches; here the backend takes `auto` for the preset of the engine. Layers that the preset leaves
alone have another backend.
"""

from __future__ import annotations

from typing import Any

PREFIX = "turboquant_"


def name_caches(kv_cache_dtype: str) -> None:
    """Have TurboQuant's backend take `auto` for this preset, in this process; nothing where vLLM has no such backend."""
    try:
        from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend as Backend
    except ImportError:  # an older vLLM, or one for CPUs: it says itself what it lacks
        return
    shape = getattr(Backend, "get_kv_cache_shape", None)
    if shape is None:  # later releases have another way to it
        return
    inner = getattr(shape, "assay_inner", shape)

    def get_kv_cache_shape(*args: Any, cache_dtype_str: str = "auto", **kwargs: Any) -> Any:
        named = kv_cache_dtype if cache_dtype_str == "auto" else cache_dtype_str
        return inner(*args, cache_dtype_str=named, **kwargs)

    get_kv_cache_shape.assay_inner = inner  # type: ignore[attr-defined]
    Backend.get_kv_cache_shape = staticmethod(get_kv_cache_shape)
