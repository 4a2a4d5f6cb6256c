"""Every value as it is: the control. Its error is zero and its bytes are those of the values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assay.kv.codec import BlockCoder, Codec, Parts, Samples
from assay.kv.exact import exact_from_bytes, exact_to_bytes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Identity(Codec):
    """Lossless: 2 bytes a value where bf16 or fp16 hold it, else 4."""

    name = "identity"
    summary = "exact values, the control"

    def fit(self, samples: Samples) -> BlockCoder:
        return IdentityCoder(samples.site)


class IdentityCoder(BlockCoder):
    """The values themselves are the codes."""

    lossless = True

    def quantise(self, x: torch.Tensor, side: torch.Tensor | None = None) -> Parts:
        return (x,)

    def dequantise(self, parts: Parts, side: torch.Tensor | None = None) -> torch.Tensor:
        return parts[0].float()

    def pack(self, parts: Parts) -> list[bytes]:
        return [exact_to_bytes(block) for block in parts[0]]

    def unpack(self, payloads: Sequence[bytes], tokens: int) -> Parts:
        import torch

        shape = (self.site.heads, tokens, self.site.head_dim)
        return (torch.stack([exact_from_bytes(p, shape) for p in payloads]),)
