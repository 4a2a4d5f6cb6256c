"""The largest values of every block kept beside the codes, so that they do not stretch the levels of the rest.

Of each head and token the `n` values farthest from zero are stored as 16-bit floats with their channel, and the codec
inside sees zeros in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from assay.errors import UsageError
from assay.kv.codec import BlockCoder, Codec, Parts, Samples, Site, Tables
from assay.kv.codecs.around import Around
from assay.kv.payload import as_bytes, from_halves, to_halves, typed
from assay.kv.wrapper import Wrapper, inner_tables
from assay.quant.packing import pack, packed_bytes, unpack

if TYPE_CHECKING:
    import torch


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

    def rewrap(self, inner: Codec, site: Site, tables: Tables) -> BlockCoder:
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
        kept = from_halves(half, exponent).to(values.device)
        return values.scatter(-1, channels.to(values.device).long(), kept)

    def own_fields(self, own: Parts) -> list[torch.Tensor]:
        return [pack(own[0].flatten(1), self._width), as_bytes(own[1]), own[2]]

    def own_sizes(self, tokens: int) -> list[int]:
        count = self.site.heads * tokens * self._n
        return [packed_bytes(count, self._width), 2 * count, 1]

    def own_from(self, fields: Sequence[torch.Tensor], tokens: int) -> Parts:
        import torch

        shape = (fields[0].shape[0], self.site.heads, tokens, self._n)
        channels = unpack(fields[0], self._width, shape[1] * shape[2] * shape[3]).reshape(shape)
        # A damaged index must not point outside.
        return (
            channels.clamp_max(self.site.head_dim - 1),
            typed(fields[1], torch.float16).reshape(shape),
            typed(fields[2], torch.int8),
        )
