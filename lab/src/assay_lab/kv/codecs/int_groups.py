"""The codec `int`: integers with a scale and a smallest value for each group, as KIVI
(arXiv:2402.02750).

x̂ = lo + s · q with q = round((x − lo) / s) in 0 … 2^b − 1 and s = (max − min) / (2^b − 1); lo
and s are fp16. Keys have outlying channels, so their groups are `group` tokens of one channel;
values are grouped by `group` channels of one token. The last `residual` tokens stay exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from assay.errors import UsageError
from assay_lab.kv.codecs.base import BLOCK_TOKENS, BlockCoder, Capabilities, Codec, Parts
from assay_lab.kv.codecs.fields import EXPONENT, Field, from_halves, to_halves
from assay_lab.kv.codecs.samples import LayerStream, Samples


@dataclass(frozen=True)
class IntGroups(Codec):
    """`bits` 1 to 8; `axis` auto is channel for keys and token for values."""

    name = "int"
    single_heads = True
    summary = "integers by group, as KIVI"
    bits: int = 4
    group: int = 32
    axis: Literal["auto", "channel", "token"] = "auto"
    residual: int = 32

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8 or self.group < 1 or self.residual < 0:
            raise UsageError(
                f"{self}: bits is 1 to 8, group at least 1, residual at least 0",
                finding_id="kv.spec",
            )

    @property
    def capabilities(self) -> Capabilities:
        alone = self.axis == "token" and not self.residual
        return replace(super().capabilities, token_by_token=alone)

    def fit(self, samples: Samples) -> BlockCoder:
        return IntCoder(samples.site, self)


class IntCoder(BlockCoder):
    """Codes: levels [blocks, heads, tokens, head_dim], lows and scales [blocks, *groups] as halves,
    exponents.
    """

    def __init__(self, site: LayerStream, codec: IntGroups) -> None:
        super().__init__(site)
        self._bits, self._group = codec.bits, codec.group
        self.exact_last = codec.residual
        self._by_channel = codec.axis == "channel" or (codec.axis == "auto" and site.stream == "k")
        if self._by_channel:
            self.granularity = codec.group
            self.block_tokens = max(1, BLOCK_TOKENS // codec.group) * codec.group

    def quantise(self, x: torch.Tensor, predictors: torch.Tensor | None = None) -> Parts:
        grouped, real = self._grouped(x.float())
        lo = torch.where(real, grouped, torch.inf).amin(-1)
        hi = torch.where(real, grouped, -torch.inf).amax(-1)
        levels = 2**self._bits - 1
        low, low_exponent = to_halves(lo)
        # Halves of the range: the difference of two huge values would overflow.
        scale, scale_exponent = to_halves((hi / levels - lo / levels).clamp_min(0))
        lo = from_halves(low, low_exponent)[..., None]
        step = from_halves(scale, scale_exponent)[..., None]
        offset = grouped / step.clamp_min(1e-30) - lo / step.clamp_min(1e-30)
        codes = torch.where(step > 0, offset.round().clamp(0, levels), 0).to(torch.uint8)
        return self._flat(codes, x.shape), low, scale, low_exponent, scale_exponent

    def dequantise(self, parts: Parts, predictors: torch.Tensor | None = None) -> torch.Tensor:
        codes, low, scale, low_exponent, scale_exponent = parts
        grouped, _ = self._grouped(codes.float())
        lo = from_halves(low, low_exponent)[..., None]
        return self._flat(lo + grouped * from_halves(scale, scale_exponent)[..., None], codes.shape)

    def layout(self, tokens: int) -> list[Field]:
        site = self.site
        groups = (site.heads, tokens, -(-site.head_dim // self._group))
        if self._by_channel:
            groups = (site.heads, site.head_dim, -(-tokens // self._group))
        codes = Field((site.heads, tokens, site.head_dim), self._bits)
        return [
            codes,
            Field(groups, torch.float16),
            Field(groups, torch.float16),
            EXPONENT,
            EXPONENT,
        ]

    def _grouped(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[blocks, heads, rows, groups, group] along the axis, and which of it is real."""
        rows = x.transpose(2, 3) if self._by_channel else x
        spare = -rows.shape[-1] % self._group
        real = torch.ones(rows.shape[-1], dtype=torch.bool, device=x.device)
        real = torch.nn.functional.pad(real, (0, spare)).unflatten(0, (-1, self._group))
        return torch.nn.functional.pad(rows, (0, spare)).unflatten(-1, (-1, self._group)), real

    def _flat(self, grouped: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        rows = grouped.flatten(-2)
        length = shape[2] if self._by_channel else shape[3]
        rows = rows[..., :length]
        return (rows.transpose(2, 3) if self._by_channel else rows).contiguous()
