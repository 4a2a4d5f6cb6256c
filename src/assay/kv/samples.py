"""Calibration data of one layer: what a codec may learn from before it sees the text that is evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Samples:
    """Keys and values of calibration text in one layer, and how much their channels matter.

    `states` [KV heads, tokens, head_dim] of the stream, before RoPE for keys where `before_rope`. `metric` [KV heads,
    head_dim, head_dim] is the quadratic form in which an error hurts: for keys the second moment of the queries that
    read the head (averaged over the rotations of RoPE), for values the Gram matrix of the output projection of those
    heads. Everything float32 on the CPU.
    """

    states: torch.Tensor
    metric: torch.Tensor | None = None
    before_rope: bool = False
