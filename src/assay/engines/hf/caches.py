"""The KV cache of a model of transformers, in the type that its engine was asked for.

Keys and values are rounded once, when they come, are held in the narrow type, and are cast back when attention reads
them, with a scale of 1. Every token reads what the cache holds, itself and the tokens of its own block included: so do
the kernels of vLLM, prefill too, which write to the cache first.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from assay.errors import AssayError
from assay.quant.fp8 import cast, fp8_dtype, widen

if TYPE_CHECKING:
    import torch

_KINDS = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer"})
"""Layers whose whole state is keys and values."""


def set_cache_dtype(model: Any, name: str) -> None:
    """Make `new_cache` hold keys and values of `model` in `kv_cache_dtype=name` (see `KV_CACHE_DTYPES`).

    It is noted on the model, which is all that hooks and tools have of an engine. AssayError for a model that keeps
    more than keys and values.
    """
    import torch

    if name == "auto":
        model.assay_cache_dtype = None
        return
    from transformers import DynamicCache

    kinds = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
    if other := sorted(kinds - _KINDS):
        raise AssayError(
            f"kv_cache_dtype={name} cannot be had with {type(model).__name__}, whose cache has layers of the kind {other[0]}",
            finding_id="fidelity.engine_load",
            remedy="leave kv_cache_dtype out: it takes models whose every layer is full or sliding attention",
        )
    model.assay_cache_dtype = {
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "fp8_e4m3": fp8_dtype("e4m3"),
        "fp8_e5m2": fp8_dtype("e5m2"),
    }[name]


def cache_dtype(model: Any) -> torch.dtype:
    """What a cache of `model` holds its keys and values in."""
    dtype: torch.dtype = getattr(model, "assay_cache_dtype", None) or model.dtype
    return dtype


def new_cache(model: Any) -> Any:
    """An empty `DynamicCache` for `model`."""
    from transformers import DynamicCache

    held = DynamicCache(config=model.config)
    dtype = getattr(model, "assay_cache_dtype", None)
    if dtype is not None:
        for layer in held.layers:
            layer.__class__ = _narrow(type(layer))  # type: ignore[arg-type, unused-ignore]
            layer.assay_dtype = dtype
    return held


@cache
def _narrow(base: type) -> type:
    """A subclass of a cache layer, full or sliding, that holds what it is given in `assay_dtype`."""

    class Narrow(base):  # type: ignore[misc]
        assay_dtype: torch.dtype

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            new = (cast(x, self.assay_dtype) for x in (key_states, value_states))
            return tuple(widen(x, key_states.dtype) for x in super().update(*new, *args, **kwargs))

    Narrow.__name__ = f"Narrow{base.__name__}"
    return Narrow


def token_bytes(model: Any) -> int | None:
    """Bytes of keys and values of one token in all layers, None where the configuration does not say."""
    config = model.config.get_text_config()
    query_heads = getattr(config, "num_attention_heads", None)
    if not query_heads:
        return None
    heads = getattr(config, "num_key_value_heads", None) or query_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    return int(2 * heads * width * config.num_hidden_layers * cache_dtype(model).itemsize)
