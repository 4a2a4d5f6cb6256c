"""The codec `noise`: Gaussian noise of known size, a diagnostic that saves nothing.

x̂ = x + σ · rms(x) · n with n standard normal and rms(x) over all KV heads of the token. What is
stored is x in bf16 and, in the header's SPEC, σ and the seed: nothing becomes smaller. The noise
of a token is a function of its stored values, the seed, the layer and the stream, as a
quantiser's error is one of its values: batches, the order of calls and random access do not
change it, and two tokens with the same values get the same noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from assay.errors import UsageError
from assay_lab.kv.codecs.base import BlockCoder, Capabilities, Codec, Parts
from assay_lab.kv.codecs.bf16 import Bf16Coder
from assay_lab.kv.codecs.samples import LayerStream, Samples
from assay_lab.kv.klt import rows_of
from assay_lab.quantisation.randomness import normal_of_words, random_words, words_of_keys


@dataclass(frozen=True)
class Noise(Codec):
    """`sigma` is the deviation of the noise over the root mean square of a token's values."""

    name = "noise"
    summary = "Gaussian noise of known size, a diagnostic: it saves nothing"
    sigma: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.sigma < math.inf:
            raise UsageError(
                f"{self}: sigma is a finite number, not negative", finding_id="kv.spec"
            )

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, token_by_token=True)

    def fit(self, samples: Samples) -> BlockCoder:
        return NoiseCoder(samples.site, self)


class NoiseCoder(Bf16Coder):
    """Codes are the values in bf16; noise comes in on decoding."""

    def __init__(self, site: LayerStream, codec: Noise) -> None:
        super().__init__(site)
        self._sigma = codec.sigma
        place = int(
            random_words(codec.seed, 2 * site.layers)[2 * site.layer + (site.stream == "v")]
        )
        # Odd factors: a token's key changes with any bit of any of its values.
        factors = random_words(place, site.width).view("int64") | 1
        self._factors = torch.from_numpy(factors)

    def dequantise(self, parts: Parts, predictors: torch.Tensor | None = None) -> torch.Tensor:
        stored = rows_of(parts[0])
        keys = (stored.view(torch.int16).long() * self._factors.to(stored.device)).sum(dim=-1)
        noise = normal_of_words(words_of_keys(keys, 2 * -(-self.site.width // 2)))[
            ..., : self.site.width
        ]
        rows = stored.float()
        # Scaled by the largest value first: squares of huge values would overflow.
        top = rows.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30)
        rms = (rows / top).square().mean(dim=-1, keepdim=True).sqrt() * top
        limit = torch.finfo(torch.float32).max
        noisy = (rows + self._sigma * rms * noise).clamp(-limit, limit)
        return noisy.unflatten(-1, (self.site.heads, self.site.head_dim)).transpose(1, 2)
