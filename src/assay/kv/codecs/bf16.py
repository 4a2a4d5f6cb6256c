"""Values rounded to bfloat16: what a cache holds today."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assay.kv.codec import BlockCoder, Codec, Parts, Samples
from assay.kv.payload import join_fields, split_fields, typed

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Bf16(Codec):
    """2 bytes a value."""

    name = "bf16"
    summary = "bfloat16, as a cache holds it today"

    def fit(self, samples: Samples) -> BlockCoder:
        return Bf16Coder(samples.site)


class Bf16Coder(BlockCoder):
    """Codes are the rounded values."""

    def quantise(self, x: torch.Tensor, side: torch.Tensor | None = None) -> Parts:
        import torch

        # The largest float32 round to infinity: they stop at the largest bfloat16.
        top = torch.finfo(torch.bfloat16).max
        return (x.float().clamp(-top, top).bfloat16(),)

    def dequantise(self, parts: Parts, side: torch.Tensor | None = None) -> torch.Tensor:
        return parts[0].float()

    def pack(self, parts: Parts) -> list[bytes]:
        return join_fields(parts)

    def unpack(self, payloads: Sequence[bytes], tokens: int) -> Parts:
        import torch

        shape = (self.site.heads, tokens, self.site.head_dim)
        (raw,) = split_fields(payloads, [2 * tokens * self.site.width])
        return (typed(raw, torch.bfloat16).reshape(len(payloads), *shape),)
