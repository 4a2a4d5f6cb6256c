"""The KV cache of a model of transformers, in the type that its engine was asked for, and an
attention that reads it fast.

Keys and values are rounded once, when they come, are held in the narrow type, and are cast back
when attention reads them, with a scale of 1. Every token reads what the cache holds, itself and the
tokens of its own block included: so do the kernels of vLLM, prefill too, which write to the cache
first.
"""

from __future__ import annotations

from functools import cache
from inspect import signature
from typing import Any, Literal

import torch
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from assay.errors import AssayError

Format = Literal["e4m3", "e5m2"]
"""`e4m3` (4 bits of exponent, up to 448, no infinities) or `e5m2` (up to 57,344)."""

_KINDS = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer"})
"""Layers whose whole state is keys and values."""


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """Keyword arguments that hand `cache` to `model`, named `cache` from transformers 5.24 on,
    before `past_key_values`.
    """
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    return {name: cache}


# 8-bit floating point (Micikevicius et al., arXiv:2209.05433): rounding to nearest, saturating.


def fp8_dtype(form: Format) -> torch.dtype:
    """The type of torch that holds a format; `e4m3` is the one without infinities."""
    return {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[form]


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` (float32 or narrower, any shape) in a floating type, each value the nearest there is,
    ties to even.

    8-bit floats saturate: what lies beyond the largest value, infinities too, becomes that value,
    and NaN stays NaN. So does NVIDIA's conversion with `__NV_SATFINITE`. Without the bound torch
    would make infinities of them in e5m2, and NaN or 448 in e4m3, as its release has it. Other
    types are a plain cast, as float16 is anywhere: 70,000 is infinite.
    """
    if dtype.itemsize > 1:
        return x.to(dtype)
    top = torch.finfo(dtype).max
    return x.clamp(-top, top).to(dtype)


def widen(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x`, any floating type, in a wider one, exactly.

    8-bit floats on a CPU go through a table of their 256 values, which takes a quarter of the time
    of torch's cast.
    """
    if x.dtype.itemsize > 1 or x.device.type != "cpu":
        return x.to(dtype)
    table = torch.arange(256, dtype=torch.uint8).view(x.dtype).to(dtype)
    return table.index_select(0, x.view(torch.uint8).reshape(-1).int()).reshape(x.shape)


def set_cache_dtype(model: Any, name: str) -> None:
    """Make `new_cache` hold keys and values of `model` in `kv_cache_dtype=name` (see
    `KV_CACHE_DTYPES`).

    It is noted on the model, which is all that hooks and tools have of an engine. AssayError for a
    model that keeps more than keys and values.
    """
    if name == "auto":
        model.assay_cache_dtype = None
        return
    kinds = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
    if other := sorted(kinds - _KINDS):
        raise AssayError(
            f"kv_cache_dtype={name} cannot be had with {type(model).__name__}, whose cache has"
            f" layers of the kind {other[0]}",
            finding_id="fidelity.engine_load",
            remedy=(
                "leave kv_cache_dtype out: it takes models whose every layer is full or sliding"
                " attention"
            ),
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
    held = DynamicCache(config=model.config)
    dtype = getattr(model, "assay_cache_dtype", None)
    if dtype is not None:
        for layer in held.layers:
            layer.__class__ = _narrow(type(layer))  # type: ignore[arg-type, unused-ignore]
            layer.assay_dtype = dtype
    return held


@cache
def _narrow(base: type) -> type:
    """A subclass of a cache layer, full or sliding, that holds what it is given in
    `assay_dtype`.
    """

    class Narrow(base):  # type: ignore[misc]
        assay_dtype: torch.dtype

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            new = (cast(x, self.assay_dtype) for x in (key_states, value_states))
            return tuple(widen(x, key_states.dtype) for x in super().update(*new, *args, **kwargs))

    Narrow.__name__ = f"Narrow{base.__name__}"
    return Narrow


def token_bytes(model: Any) -> int | None:
    """Bytes of keys and values of one token in all layers, None where the configuration does not
    say.
    """
    config = model.config.get_text_config()
    query_heads = getattr(config, "num_attention_heads", None)
    if not query_heads:
        return None
    heads = getattr(config, "num_key_value_heads", None) or query_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    return int(2 * heads * width * config.num_hidden_layers * cache_dtype(model).itemsize)


ATTENTION = "assay"
"""`?attention=assay`: one new token reads the cache without a copy of keys and values for every
query head.

transformers' `sdpa` copies them where there is a mask or torch's kernel takes no groups, which on a
CPU costs more than the attention itself. Here the query heads of a group share their keys in one
matrix product, and the softmax is in float32; more than one new token is transformers' own `sdpa`.
What it differs by and saves: benchmarks/compare/hf_attention.py.
"""


def register_attention() -> str:
    """Make `attention=assay` known to transformers; returns its name for `attn_implementation`."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, one_token_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)
    return ATTENTION


def one_token_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """Softmax(q kᵀ · scaling) v in the calling convention of transformers.

    `query` (B, H, Q, D), `key` and `value` (B, G, T, D) with H a multiple of G; returns (B, Q, H,
    D).
    """
    batch, heads, new, width = query.shape
    if new != 1:
        output: tuple[Any, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output
    groups = key.shape[1]
    grouped = query.reshape(batch, groups, heads // groups, width)
    scores = grouped @ key.transpose(2, 3) * (width**-0.5 if scaling is None else scaling)
    if attention_mask is not None:
        mask = attention_mask[..., : key.shape[2]]
        scores = (
            scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        )
    shares = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return (shares @ value).reshape(batch, 1, heads, width), None
