"""8-bit floating point (Micikevicius et al., arXiv:2209.05433), saturating, with scales known before the first token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from assay.kv.codec import BlockCoder, Codec, Parts, Samples, Site, Tables, need_table
from assay.kv.payload import join_fields, split_fields
from assay.quant.fp8 import Format, cast, fp8_dtype

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Fp8(Codec):
    """1 byte a value. Scales map the largest calibrated value to the largest of the format; `one` is no scale."""

    name = "fp8"
    summary = "8-bit floats"
    format: Format = "e4m3"
    scale: Literal["one", "tensor", "head"] = "one"

    def fit(self, samples: Samples) -> BlockCoder:
        import torch

        site = samples.site
        if self.scale == "one":
            return Fp8Coder(site, self.format, torch.ones(site.heads))
        top = samples.need_x(str(self)).abs().amax(dim=(1, 2)).cpu().clamp_min(2.0**-100)
        if self.scale == "tensor":
            top = top.max().expand(site.heads)
        return Fp8Coder(site, self.format, top / torch.finfo(fp8_dtype(self.format)).max)

    def restore(self, site: Site, tables: Tables) -> BlockCoder:
        import torch

        if self.scale == "one":
            return self.fit(Samples(site))
        return Fp8Coder(site, self.format, torch.from_numpy(need_table(tables, "scale", str(self), site)))


class Fp8Coder(BlockCoder):
    """Codes are 8-bit floats of x / scale; `scale` [heads]."""

    def __init__(self, site: Site, form: Format, scale: torch.Tensor) -> None:
        super().__init__(site)
        self._form = form
        self._scale = scale.float().clone()

    @property
    def tables(self) -> Tables:
        return {} if bool((self._scale == 1).all()) else {"scale": self._scale.numpy()}

    def quantise(self, x: torch.Tensor, side: torch.Tensor | None = None) -> Parts:
        import torch

        scaled = x.float() / self._scale.to(x.device)[:, None, None]
        return (cast(scaled, fp8_dtype(self._form)).view(torch.uint8),)

    def dequantise(self, parts: Parts, side: torch.Tensor | None = None) -> torch.Tensor:
        values = parts[0].view(fp8_dtype(self._form)).float()
        return values * self._scale.to(values.device)[:, None, None]

    def pack(self, parts: Parts) -> list[bytes]:
        return join_fields(parts)

    def unpack(self, payloads: Sequence[bytes], tokens: int) -> Parts:
        (raw,) = split_fields(payloads, [tokens * self.site.width])
        return (raw.reshape(len(payloads), self.site.heads, tokens, self.site.head_dim).contiguous(),)
