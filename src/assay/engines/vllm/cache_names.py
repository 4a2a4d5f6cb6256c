"""Names of cache types that vLLM knows only after assay has prepared it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFIX = "turboquant_"


SKIP = "kv_cache_dtype_skip_layers"
"""vLLM's argument for the layers that keep the model's own type."""


def prepare(kv_cache_dtype: str, arguments: Mapping[str, Any]) -> None:
    """Get this process ready for an engine with this preset and these arguments of `vllm.LLM`."""
    name_caches(kv_cache_dtype)
    keep_boundary(SKIP not in arguments)


def name_caches(kv_cache_dtype: str) -> None:
    """Have TurboQuant's backend take `auto` for this preset, in this process; nothing where vLLM
    has no such backend.
    """
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


def keep_boundary(kept: bool) -> None:
    """Whether vLLM adds the first and the last layers to those that are left alone, in this
    process.
    """
    try:
        from vllm.model_executor.layers.quantization.turboquant.config import (
            TurboQuantConfig as Config,
        )
    except ImportError:
        return
    boundary = getattr(Config, "get_boundary_skip_layers", None)
    if boundary is None:
        return
    inner = getattr(boundary, "assay_inner", boundary)

    def get_boundary_skip_layers(*args: Any, **kwargs: Any) -> list[str]:
        return list(inner(*args, **kwargs)) if kept else []

    get_boundary_skip_layers.assay_inner = inner  # type: ignore[attr-defined]
    Config.get_boundary_skip_layers = staticmethod(get_boundary_skip_layers)
