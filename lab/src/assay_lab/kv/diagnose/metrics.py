"""Errors of attention scores and outputs that coded keys and values cause.

Tensors are [windows, heads, tokens, head_dim]. Errors are squared and relative to the variance:
the squared distance of the values from the mean of their channel. An error of 1 is that of
storing nothing but the mean.

An error that moves all scores of a query alike does nothing. For keys the error of a score is δ =
q (k̂ − k)ᵀ · scale, and what counts is its variance under the exact attention p: KL(p ‖ p̂) ≈ ½
Var_p(δ). For values it is the change of Σ p v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Reads:
    """Queries after RoPE [windows, heads, n, head_dim], their positions [n], the scale of scores,
    the sliding window.
    """

    queries: torch.Tensor
    positions: torch.Tensor
    scale: float
    window: int | None = None

    def scores(self, keys: torch.Tensor) -> torch.Tensor:
        """[windows, KV heads, group, n, tokens] of keys after RoPE; −∞ where a query does not
        look.
        """
        import torch

        grouped = self.queries.float().unflatten(1, (keys.shape[1], -1))
        scores = torch.einsum("whgnd,whtd->whgnt", grouped, keys.float()) * self.scale
        token = torch.arange(keys.shape[2], device=keys.device)
        at = self.positions.to(keys.device)[:, None]
        hidden = token > at
        if self.window is not None:
            hidden |= token <= at - self.window
        return scores.masked_fill(hidden, -torch.inf)


@dataclass(frozen=True)
class ScoreError:
    """Of each KV head [heads]: root mean softmax-weighted squared error of scores, and mean KL(p ‖
    p̂) in nats.
    """

    rms: torch.Tensor
    kl: torch.Tensor


def score_error(reads: Reads, keys: torch.Tensor, back: torch.Tensor) -> ScoreError:
    """Of keys that became `back`, both after RoPE."""
    exact, coded = reads.scores(keys), reads.scores(back)
    log_p = exact.log_softmax(dim=-1)
    p = log_p.exp()
    seen = p > 0
    delta = (coded - exact).masked_fill(~seen, 0.0)
    mean = (p * delta).sum(dim=-1, keepdim=True)
    variance = (p * (delta - mean).square()).sum(dim=-1)
    gap = (log_p - coded.log_softmax(dim=-1)).masked_fill(~seen, 0.0)
    kl = (p * gap).sum(dim=-1)
    return ScoreError(variance.mean(dim=(0, 2, 3)).sqrt(), kl.mean(dim=(0, 2, 3)).clamp_min(0.0))


def output_error(
    reads: Reads, keys: torch.Tensor, values: torch.Tensor, back: torch.Tensor
) -> torch.Tensor:
    """Σ‖p (v̂ − v)‖² / Σ‖p v‖² of each KV head [heads], p of the exact keys."""
    import torch

    p = reads.scores(keys).softmax(dim=-1)

    def read(states: torch.Tensor) -> torch.Tensor:
        return torch.einsum("whgnt,whtd->whgnd", p, states.float())

    exact = read(values).square().sum(dim=(0, 2, 3, 4))
    return read(back - values).square().sum(dim=(0, 2, 3, 4)) / exact.clamp_min(1e-30)
