"""The codec `bf16`: values rounded to bfloat16, as a cache holds them today."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from assay_lab.kv.codecs.base import BlockCoder, Capabilities, Codec, Parts
from assay_lab.kv.codecs.fields import Field
from assay_lab.kv.codecs.samples import Samples


@dataclass(frozen=True)
class Bf16(Codec):
    """2 bytes a value."""

    name = "bf16"
    single_heads = True
    summary = "bfloat16, as a cache holds it today"

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, token_by_token=True)

    def fit(self, samples: Samples) -> BlockCoder:
        return Bf16Coder(samples.site)


class Bf16Coder(BlockCoder):
    """Codes are the rounded values."""

    def quantise(self, x: torch.Tensor, predictors: torch.Tensor | None = None) -> Parts:
        # The largest float32 round to infinity: they stop at the largest bfloat16.
        top = torch.finfo(torch.bfloat16).max
        return (x.float().clamp(-top, top).bfloat16(),)

    def dequantise(self, parts: Parts, predictors: torch.Tensor | None = None) -> torch.Tensor:
        return parts[0].float()

    def layout(self, tokens: int) -> list[Field]:
        return [Field((self.site.heads, tokens, self.site.head_dim), torch.bfloat16)]
