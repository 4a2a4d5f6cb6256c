"""The codec `identity`: nothing is lost, and nothing becomes smaller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from assay_lab.kv.codecs.base import BlockCoder, Capabilities, Codec, Parts
from assay_lab.kv.codecs.samples import Samples
from assay_lab.kv.codecs.stream import exact_from_bytes, exact_to_bytes


@dataclass(frozen=True)
class Identity(Codec):
    """Lossless: 2 bytes a value where bf16 or fp16 hold it, else 4."""

    name = "identity"
    single_heads = True
    summary = "exact values, the control"

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, token_by_token=True)

    def fit(self, samples: Samples) -> BlockCoder:
        return IdentityCoder(samples.site)


class IdentityCoder(BlockCoder):
    """The values themselves are the codes."""

    lossless = True

    def quantise(self, x: torch.Tensor, predictors: torch.Tensor | None = None) -> Parts:
        return (x,)

    def dequantise(self, parts: Parts, predictors: torch.Tensor | None = None) -> torch.Tensor:
        return parts[0].float()

    def pack(self, parts: Parts) -> list[bytes]:
        return [exact_to_bytes(block) for block in parts[0]]

    def unpack(self, payloads: Sequence[bytes], tokens: int) -> Parts:
        shape = (self.site.heads, tokens, self.site.head_dim)
        return (torch.stack([exact_from_bytes(p, shape) for p in payloads]),)
