"""The wrapper `outliers`: the largest values of every block kept beside the codes.

Of each head and token the `n` values farthest from zero are stored as 16-bit floats with their
channel, and the codec inside sees zeros in their place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from assay.errors import UsageError
from assay_lab.kv.codecs.around import Around
from assay_lab.kv.codecs.base import BlockCoder, Codec, Parts
from assay_lab.kv.codecs.fields import EXPONENT, Field, from_halves, to_halves
from assay_lab.kv.codecs.placement import Wrapper, inner_tables
from assay_lab.kv.codecs.samples import LayerStream, Samples, Tables


@dataclass(frozen=True)
class Outliers(Wrapper):
    """`n` values of each vector, 16 bits and ⌈log₂ head_dim⌉ bits each."""

    name = "outliers"
    summary = "largest values of each vector apart"
    n: int = 1

    def __post_init__(self) -> None:
        if self.n < 1:
            raise UsageError(f"outliers(n={self.n}): n is at least 1", finding_id="kv.spec")

    def wrap(self, inner: Codec, samples: Samples) -> BlockCoder:
        x = samples.x
        if x is not None:
            x = x.float()
            x = x.scatter(-1, x.abs().topk(min(self.n, x.shape[-1]), dim=-1).indices, 0.0)
        return OutlierCoder(inner.fit(replace(samples, x=x)), self.n)

    def rewrap(self, inner: Codec, site: LayerStream, tables: Tables) -> BlockCoder:
        return OutlierCoder(inner.restore(site, inner_tables(tables)), self.n)


class OutlierCoder(Around):
    """Own codes: channels and halves [blocks, heads, tokens, n], exponents [blocks]."""

    own_parts = 3

    def __init__(self, inner: BlockCoder, n: int) -> None:
        super().__init__(inner)
        self._n = min(n, self.site.head_dim)
        self._width = max(1, (self.site.head_dim - 1).bit_length())

    def enter(self, x: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        channels = x.abs().topk(self._n, dim=-1).indices
        return (channels, *to_halves(x.gather(-1, channels))), x.scatter(-1, channels, 0.0)

    def leave(self, own: Parts, values: torch.Tensor) -> torch.Tensor:
        channels, half, exponent = own
        # A damaged index must not point outside.
        places = channels.to(values.device).long().clamp_max(self.site.head_dim - 1)
        return values.scatter(-1, places, from_halves(half, exponent).to(values.device))

    def layout(self, tokens: int) -> list[Field]:
        shape = (self.site.heads, tokens, self._n)
        return [Field(shape, self._width), Field(shape, torch.float16), EXPONENT]
