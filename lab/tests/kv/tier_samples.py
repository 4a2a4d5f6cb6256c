"""Small tables of stored blocks, fitted to drawn keys and values whose layers resemble each
other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from assay_lab.kv import blocks as kv_blocks
from assay_lab.kv.block_tables import BlockTables
from assay_lab.kv.cache_shape import CacheShape
from assay_lab.kv.calibration import Calibration
from assay_lab.kv.layer_coders import CoderSet, LayerCoders
from assay_lab.kv.rotary import Rotary, Rotation
from assay_lab.kv.spec import parse_spec

LAYERS, HEADS, DIM = 3, 2, 16
WIDTH = HEADS * DIM
SPEC = "prerope+sinks(n=4)+pca(bits=2.2, predict=all)"


@dataclass(frozen=True)
class Sample:
    """Fitted coders, their tables, and a source of [layers, 2, tokens, width] before RoPE."""

    coders: CoderSet
    tables: BlockTables

    def draw(self, tokens: int, seed: int) -> torch.Tensor:
        """Float32."""
        return drawn(tokens, seed)


def drawn(tokens: int, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    shape = torch.Generator().manual_seed(99)
    mix = torch.randn(WIDTH, WIDTH, generator=shape) * torch.logspace(0.5, -1.2, WIDTH)
    base, parts = torch.randn(tokens, WIDTH, generator=made), []
    for _ in range(2 * LAYERS):
        base = 0.8 * base + 0.6 * torch.randn(tokens, WIDTH, generator=made)
        loud = torch.exp(0.4 * torch.randn(tokens, 1, generator=made))
        parts.append(base @ mix * loud + 0.05 * torch.arange(WIDTH))
    return torch.stack(parts).view(LAYERS, 2, tokens, WIDTH)


@cache
def sample(spec: str = SPEC, model: str = "m", seed: int = 0) -> Sample:
    x = drawn(1500, seed).bfloat16()
    tensors = {"positions": torch.arange(1500, dtype=torch.int32)}
    for layer in range(LAYERS):
        for i, stream in enumerate("kv"):
            tensors[f"layer_{layer}_{stream}"] = (
                x[layer, i].view(-1, HEADS, DIM).transpose(0, 1).contiguous()
            )
    shape = CacheShape(LAYERS, HEADS, HEADS, DIM, (None,) * LAYERS, "Tiny")
    parsed = parse_spec(spec)
    # A codec after RoPE is fitted to keys that are not turned.
    rotary = Rotary.__new__(Rotary)
    rotary._by_type = {"all": Rotation(torch.ones(1500, DIM), torch.zeros(1500, DIM))}
    rotary._types = ["all"] * LAYERS
    coders = LayerCoders(shape, rotary, Calibration(tensors, {})).fit_all(
        lambda _, stream: parsed.of(stream)
    )
    inv_freq = 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
    return Sample(coders, BlockTables.of(parsed, coders, model, shape, inv_freq, 1.0))


def turned(
    codec: kv_blocks.BlockCodec, x: torch.Tensor, first: int, *, back: bool = False
) -> torch.Tensor:
    """Keys of [layers, 2, tokens, width] put through RoPE from position `first` on, or taken back;
    float32.
    """
    x = x.float().clone()
    cos, sin = codec._rotation([(first, x.shape[2])])
    for layer in range(x.shape[0]):
        kv_blocks._turn(x[layer, 0].numpy(), cos, sin, HEADS, back)
    return x
