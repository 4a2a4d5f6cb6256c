"""Removes the mean of every channel before coding: keys have channels far from zero, which waste levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from assay.kv.codec import BlockCoder, Codec, Parts, Samples, Site, Tables, need_table
from assay.kv.codecs.around import Around
from assay.kv.payload import as_bytes, from_halves, to_halves
from assay.kv.wrapper import Wrapper, inner_tables

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Mean(Wrapper):
    """`of=calibration`: the mean of the samples, a table of fp16. `of=block`: of each block, fp16 in its payload."""

    name = "mean"
    summary = "channel means removed"
    of: Literal["calibration", "block"] = "calibration"

    def wrap(self, inner: Codec, samples: Samples) -> BlockCoder:
        from dataclasses import replace

        if self.of == "block":
            x = samples.x
            if x is not None:
                x = x.float() - x.float().mean(dim=1, keepdim=True)
            return BlockMeanCoder(inner.fit(replace(samples, x=x)))
        x = samples.need_x(str(self))
        half, exponent = to_halves(x.mean(dim=1)[None])
        mean = from_halves(half, exponent)[0].cpu()
        return MeanCoder(inner.fit(replace(samples, x=x - mean.to(x.device)[:, None])), mean)

    def rewrap(self, inner: Codec, site: Site, tables: Tables) -> BlockCoder:
        import torch

        coder = inner.restore(site, inner_tables(tables))
        if self.of == "block":
            return BlockMeanCoder(coder)
        mean = torch.from_numpy(need_table(tables, "mean", str(self), site).astype("float32"))
        return MeanCoder(coder, mean)


class MeanCoder(Around):
    """x − mean goes inside; mean [heads, head_dim]."""

    def __init__(self, inner: BlockCoder, mean: torch.Tensor) -> None:
        super().__init__(inner)
        self._mean = mean

    @property
    def tables(self) -> Tables:
        import numpy as np

        values = self._mean.numpy()
        small = values.astype(np.float16) if np.abs(values).max(initial=0) < 65504 else values
        return {**super().tables, "mean": small}

    def enter(self, x: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        return (), x - self._mean.to(x.device)[:, None]

    def leave(self, own: Parts, values: torch.Tensor) -> torch.Tensor:
        return values + self._mean.to(values.device)[:, None]


class BlockMeanCoder(Around):
    """The mean of each block [blocks, heads, head_dim], as halves, before the codes inside."""

    own_parts = 2

    def __init__(self, inner: BlockCoder) -> None:
        super().__init__(inner)
        self.granularity = self.block_tokens

    def enter(self, x: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        half, exponent = to_halves(x.mean(dim=2))
        return (half, exponent), x - from_halves(half, exponent)[:, :, None]

    def leave(self, own: Parts, values: torch.Tensor) -> torch.Tensor:
        return values + from_halves(*own)[:, :, None].to(values.device)

    def own_fields(self, own: Parts) -> list[torch.Tensor]:
        return [as_bytes(own[0]), own[1]]

    def own_sizes(self, tokens: int) -> list[int]:
        return [2 * self.site.width, 1]

    def own_from(self, fields: Sequence[torch.Tensor], tokens: int) -> Parts:
        import torch

        from assay.kv.payload import typed

        shape = (fields[0].shape[0], self.site.heads, self.site.head_dim)
        return typed(fields[0], torch.float16).reshape(shape), typed(fields[1], torch.int8)
