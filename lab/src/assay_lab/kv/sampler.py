"""What a calibration collects: some keys and values of every window, second moments of the
queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from assay.errors import AssayError
from assay_lab.kv.cache_shape import CacheShape
from assay_lab.kv.rotary import Rotary

if TYPE_CHECKING:
    import torch
ALWAYS = 4


def gram(weight: torch.Tensor, groups: int, width: int) -> torch.Tensor:
    """Σ over the query heads of each of `groups` KV heads of Wₕᵀ Wₕ, for the output projection
    [hidden, H·d], float32.
    """
    parts = weight.detach().float().cpu()
    grouped = parts.reshape(parts.shape[0], groups, -1, width).permute(1, 2, 0, 3).flatten(1, 2)
    return grouped.mT @ grouped


# What a calibration collects: some keys and values of every window, second moments of the queries,
# output projections.

DISTANCES = 64
"""Relative positions over which the queries' metric is averaged."""


class Sampler:
    """Collects from windows of `length` tokens, `keep` of each. The engine says when a batch begins
    (`begin`).
    """

    def __init__(self, shape: CacheShape, length: int, keep: int, seed: int = 0) -> None:
        import torch

        self.shape = shape
        self.length = length
        self.keep = keep
        self._generator = torch.Generator().manual_seed(seed)
        self.positions: list[torch.Tensor] = []
        self.kept: dict[tuple[int, str], list[torch.Tensor]] = {}
        self.moments: dict[int, torch.Tensor] = {}
        self.tokens = 0
        self.chosen = torch.empty(0, dtype=torch.long)

    def begin(self, batch: int) -> None:
        """A batch of so many windows comes: sorted random positions are drawn, the same in each of
        them.

        Of many the first ones are always there: attention rests on them, and they are unlike all
        others.
        """
        import torch

        always = min(ALWAYS, self.keep // 8)
        order = torch.randperm(self.length - 1, generator=self._generator)
        order = torch.cat([torch.arange(always), order[order >= always]])
        self.chosen = order[: self.keep].sort().values
        self.positions += [self.chosen] * batch
        self.tokens += batch * (self.length - 1)

    def on_states(self, layer: int, stream: str, states: torch.Tensor) -> None:
        """Keep the chosen of keys (before RoPE) or values [B, h, length − 1, d]."""
        import torch

        some = states[..., self.chosen.to(states.device), :].to(torch.bfloat16).cpu()
        # [B, h, n, d] → [h, B·n, d]
        self.kept.setdefault((layer, stream), []).append(some.transpose(0, 1).flatten(1, 2))

    def on_queries(self, layer: int, queries: torch.Tensor) -> None:
        """Add the second moment of queries [B, H, T, d] before RoPE, over the group of each KV
        head.
        """
        grouped = (
            queries.float().unflatten(1, (self.shape.kv_heads, -1)).transpose(0, 1).flatten(1, 3)
        )
        moment = (grouped.mT @ grouped).double().cpu()
        before = self.moments.get(layer)
        self.moments[layer] = moment if before is None else before + moment

    def tensors(self, rotary: Rotary, output: dict[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the calibration file holds; `output` are the weights [hidden, H·d] of the output
        projections.
        """
        import torch

        found: dict[str, torch.Tensor] = {"positions": torch.cat(self.positions).to(torch.int32)}
        per_head = self.tokens * (self.shape.query_heads // self.shape.kv_heads)
        for layer in range(self.shape.layers):
            for stream in ("k", "v"):
                states = found[f"layer_{layer}_{stream}"] = torch.cat(
                    self.kept[layer, stream], dim=1
                )
                if not bool(torch.isfinite(states).all()):
                    raise AssayError(
                        f"{stream.upper()} of layer {layer} holds NaN or infinity on the"
                        " calibration text",
                        finding_id="kv.not_finite",
                        remedy="look for NaN in the checkpoint: assay verify --values",
                    )
            sigma = (self.moments[layer] / per_head).float()
            found[f"layer_{layer}_sigma_rope"] = averaged(sigma, rotary, layer, self.length)
            found[f"layer_{layer}_gram"] = gram(
                output[layer], self.shape.kv_heads, self.shape.head_dim
            )
        return found


def averaged(sigma: torch.Tensor, rotary: Rotary, layer: int, length: int) -> torch.Tensor:
    """Mean over relative positions δ of R(δ)ᵀ Σ R(δ): what a query at any distance makes of an
    error in a key.

    q R(i) · (k R(j))ᵀ depends on q R(i − j) kᵀ, so in the frame of the key before RoPE the query's
    moment is turned back.
    """
    import torch

    width = sigma.shape[-1]
    total = torch.zeros_like(sigma)
    picked = torch.linspace(0, length - 1, DISTANCES).round().long().tolist()
    for distance in picked:
        rotation = rotary.at(layer, distance, distance + 1)
        # Rows are the images of the unit vectors: x R = x @ matrix.
        eye = torch.eye(width).unsqueeze(1)
        matrix = type(rotation)(rotation.cos.cpu(), rotation.sin.cpu()).apply(eye).squeeze(1)
        total += matrix.T @ sigma @ matrix
    return total / len(picked)


def kept_per_window(tokens: int, windows: int, length: int) -> int:
    """Tokens of each window that give about `tokens` in all."""
    return min(length - 1, max(1, tokens // windows))
