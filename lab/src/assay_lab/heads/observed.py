"""What the target says about a text: its hidden states and its next tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Observed:
    """A batch of texts and the target's states on it: ids and mask [B, T], aux [B, T, 3H], last [B,
    T, H] after its norm.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor


@torch.no_grad()  # type: ignore[untyped-decorator]
def observe(
    target: Any, ids: torch.Tensor, mask: torch.Tensor, aux_layers: tuple[int, ...]
) -> Observed:
    """One pass of the target over texts that are padded on the right; states are used at once and
    never stored.
    """
    before_norm: list[torch.Tensor] = []
    hook = target.base_model.norm.register_forward_pre_hook(
        lambda module, given: before_norm.append(given[0])
    )
    try:
        out = target.base_model(input_ids=ids, output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    states = (
        *out.hidden_states[:-1],
        before_norm[-1],
    )  # transformers gives the last of them after the norm
    return Observed(
        ids, mask, torch.cat([states[i] for i in aux_layers], -1), out.last_hidden_state
    )


def shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Row p becomes row p + `by`; zeros come in at the end of dimension 1."""
    return torch.cat([x[:, by:], torch.zeros_like(x[:, :by])], 1) if by else x
