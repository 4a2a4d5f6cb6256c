"""The codec `fp8`: 8-bit floats, as vLLM's own cache keeps them.

8-bit floating point (Micikevicius et al., arXiv:2209.05433), saturating, with scales known before
the first token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from assay.engines.hf.cache import Format, cast, fp8_dtype
from assay.errors import UsageError
from assay_lab.kv.codecs.base import BlockCoder, Capabilities, Codec, Parts
from assay_lab.kv.codecs.fields import Field
from assay_lab.kv.codecs.samples import LayerStream, Samples, Tables, need_table


@dataclass(frozen=True)
class Fp8(Codec):
    """1 byte a value. Scales map the largest calibrated value to `top`; `one` is no scale.

    `top` 0 is the largest of the format, as llm-compressor scales; vLLM's `calculate_kv_scales`
    takes 200 for keys and 100 for values. A float's relative precision is the same everywhere, so a
    scale saves only values outside its range.
    """

    name = "fp8"
    single_heads = True
    summary = "8-bit floats"
    format: Format = "e4m3"
    scale: Literal["one", "tensor", "head"] = "one"
    top: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.top <= torch.finfo(fp8_dtype(self.format)).max:
            raise UsageError(
                f"{self}: top is at most the largest of {self.format}", finding_id="kv.spec"
            )

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, token_by_token=True)

    @property
    def joins_heads(self) -> bool:
        return self.scale == "tensor"

    def fit(self, samples: Samples) -> BlockCoder:
        site = samples.site
        if self.scale == "one":
            return Fp8Coder(site, self.format, torch.ones(site.heads))
        top = samples.need_x(str(self)).abs().amax(dim=(1, 2)).cpu().clamp_min(2.0**-100)
        if self.scale == "tensor":
            top = top.max().expand(site.heads)
        return Fp8Coder(
            site, self.format, top / (self.top or torch.finfo(fp8_dtype(self.format)).max)
        )

    def restore(self, site: LayerStream, tables: Tables) -> BlockCoder:
        if self.scale == "one":
            return self.fit(Samples(site))
        return Fp8Coder(
            site, self.format, torch.from_numpy(need_table(tables, "scale", str(self), site))
        )


class Fp8Coder(BlockCoder):
    """Codes are 8-bit floats of x / scale; `scale` [heads]."""

    def __init__(self, site: LayerStream, form: Format, scale: torch.Tensor) -> None:
        super().__init__(site)
        self._form = form
        self._scale = scale.float().clone()

    @property
    def tables(self) -> Tables:
        return {} if bool((self._scale == 1).all()) else {"scale": self._scale.numpy()}

    def quantise(self, x: torch.Tensor, predictors: torch.Tensor | None = None) -> Parts:
        scaled = x.float() / self._scale.to(x.device)[:, None, None]
        return (cast(scaled, fp8_dtype(self._form)).view(torch.uint8),)

    def dequantise(self, parts: Parts, predictors: torch.Tensor | None = None) -> torch.Tensor:
        values = parts[0].view(fp8_dtype(self._form)).float()
        return values * self._scale.to(values.device)[:, None, None]

    def layout(self, tokens: int) -> list[Field]:
        return [Field((self.site.heads, tokens, self.site.head_dim), torch.uint8)]
