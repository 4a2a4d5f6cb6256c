"""Draw the next token of every row of a batch, each row with its own temperature, top_p and random numbers.

A row draws from its own generator, so its text does not depend on which other rows share the batch (up to the
rounding of the logits themselves).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_HEAD = 512
"""How many of the likeliest tokens are looked at first; a sharp distribution needs no full sort."""


def draw_tokens(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """The next token of each row.

    `logits` is (B, V); `temperature`, `top_p` and `uniform` (in [0, 1)) are (B,). Temperature 0 takes the likeliest
    token. Otherwise the token is drawn by inverting the cumulative distribution of the nucleus: the smallest set of
    likeliest tokens whose probabilities at that temperature sum to at least top_p (Holtzman et al., 2020). A row
    whose logits hold a NaN gives token 0, as sampling from nothing does in the engines of the field.
    """
    import torch

    logits = logits.float()
    dead = logits.isnan().any(dim=-1)
    tokens = logits.argmax(dim=-1)
    sampled = (temperature > 0) & ~dead
    if sampled.any():
        rows = sampled.nonzero().squeeze(1)
        heat = temperature[rows, None].to(logits.dtype)
        tokens[rows] = _draw_nucleus(torch.softmax(logits[rows] / heat, dim=-1), top_p[rows], uniform[rows])
    tokens[dead] = 0
    return tokens


def _draw_nucleus(probs: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """`draw_tokens` for rows of probabilities (B, V) that sum to 1."""
    import torch

    tokens = torch.empty(len(probs), dtype=torch.long, device=probs.device)
    open_rows = torch.arange(len(probs), device=probs.device)
    size = min(_HEAD, probs.shape[-1])
    while len(open_rows):
        whole = size == probs.shape[-1]
        value, index = probs[open_rows].topk(size, dim=-1)
        total = value.double().cumsum(dim=-1)
        enough = total >= top_p[open_rows, None].double()
        if whole:
            enough[:, -1] = True  # rounding must not leave a row without a nucleus
        done = enough[:, -1]
        last = enough.int().argmax(dim=-1)  # the first position at which the sum is large enough
        mass = total.gather(1, last[:, None]).squeeze(1)
        point = (uniform[open_rows].double() * mass)[:, None]
        rank = torch.minimum(torch.searchsorted(total, point, right=True).squeeze(1), last)
        tokens[open_rows[done]] = index.gather(1, rank[:, None]).squeeze(1)[done]
        open_rows = open_rows[~done]
        size = probs.shape[-1] if size >= 8 * _HEAD else min(8 * size, probs.shape[-1])
    return tokens
