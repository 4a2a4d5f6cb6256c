"""A coder that predicts, simple enough that what must come out is known bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from assay_lab.kv.codecs.base import BlockCoder
from assay_lab.kv.codecs.samples import LayerStream
from assay_lab.kv.stream_coder import FittedCodec


class Leaning(BlockCoder):
    """Rounds what is left of a value when half of each side's value of the same place is taken off
    it.

    Works value by value, so that neither the size of a call nor its layout changes a bit.
    """

    def __init__(self, site: LayerStream, step: float, block_tokens: int = 8) -> None:
        super().__init__(site)
        self._step = step
        self.block_tokens = block_tokens

    def _near(self, predictors: Any) -> Any:
        return (
            0.0
            if predictors is None
            else sum(0.5 * part for part in predictors.split(self.site.heads, dim=1))
        )

    def quantise(self, x: Any, predictors: Any = None) -> Any:
        return (((x.float() - self._near(predictors)) / self._step).round().to(torch.int32),)

    def dequantise(self, parts: Any, predictors: Any = None) -> Any:
        return parts[0].float() * self._step + self._near(predictors)

    def pack(self, parts: Any) -> list[bytes]:
        return [block.contiguous().numpy().tobytes() for block in parts[0]]

    def unpack(self, payloads: Sequence[bytes], tokens: int) -> Any:
        shape = (len(payloads), self.site.heads, tokens, self.site.head_dim)
        return (torch.frombuffer(bytearray(b"".join(payloads)), dtype=torch.int32).reshape(shape),)


def leaning(
    key: tuple[int, str],
    predictor_keys: tuple[tuple[int, str], ...] = (),
    *,
    first: int = 0,
    last: int = 0,
    before_rope: bool = False,
    heads: int = 2,
    width: int = 4,
) -> FittedCodec:
    """One for a stream, its step as odd as its place."""
    site = LayerStream(key[1], key[0], 4, heads, width)
    step = 0.25 + 0.0625 * key[0] + 0.03125 * (key[1] == "v")
    return FittedCodec(
        f"leaning{key}", Leaning(site, step), first, last, before_rope, predictor_keys
    )
