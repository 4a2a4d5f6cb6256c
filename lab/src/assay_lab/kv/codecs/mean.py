"""The wrapper `mean`: the mean of every channel removed before coding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from assay_lab.kv.codecs.around import Around
from assay_lab.kv.codecs.base import BlockCoder, Capabilities, Codec, Parts
from assay_lab.kv.codecs.fields import EXPONENT, Field, from_halves, to_halves
from assay_lab.kv.codecs.placement import Wrapper, inner_tables
from assay_lab.kv.codecs.samples import LayerStream, Samples, Tables, need_table


@dataclass(frozen=True)
class Mean(Wrapper):
    """`of=calibration`: the mean of the samples, a table of fp16. `of=block`: of each block, fp16
    in its payload.
    """

    name = "mean"
    summary = "channel means removed"
    of: Literal["calibration", "block"] = "calibration"

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, token_by_token=self.of == "calibration")

    def wrap(self, inner: Codec, samples: Samples) -> BlockCoder:
        if self.of == "block":
            x = samples.x
            if x is not None:
                x = x.float() - x.float().mean(dim=1, keepdim=True)
            return BlockMeanCoder(inner.fit(replace(samples, x=x)))
        x = samples.need_x(str(self))
        half, exponent = to_halves(x.mean(dim=1)[None])
        mean = from_halves(half, exponent)[0].cpu()
        return MeanCoder(inner.fit(replace(samples, x=x - mean.to(x.device)[:, None])), mean)

    def rewrap(self, inner: Codec, site: LayerStream, tables: Tables) -> BlockCoder:
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

    def layout(self, tokens: int) -> list[Field]:
        return [Field((self.site.heads, self.site.head_dim), torch.float16), EXPONENT]
