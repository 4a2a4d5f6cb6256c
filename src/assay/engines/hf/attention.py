"""Attention of one new token, for grouped heads, without copying keys and values for every query head.

transformers repeats the KV heads before it calls torch whenever there is a mask, which a batch of unequal rows always
has. On a CPU that copy costs several times what the attention itself does. Here the query heads of a group share
their keys in one matrix product; for more than one query token it is torch's own kernel as before.
"""

from __future__ import annotations

from typing import Any

NAME = "assay_grouped"


def register() -> str:
    """Make the implementation known to transformers; returns its name for `attn_implementation`."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, grouped_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    return NAME


def grouped_attention(
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

    `query` (B, H, Q, D), `key` and `value` (B, G, T, D) with H a multiple of G; returns (B, Q, H, D).
    """
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

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
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    shares = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return (shares @ value).reshape(batch, 1, heads, width), None
