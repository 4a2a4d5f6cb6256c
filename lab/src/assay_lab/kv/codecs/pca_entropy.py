"""Coefficients in whole steps, range-coded under a distribution for each channel and token class.

A token's class (quiet … loud) is the one that makes its code shortest; it is coded with the token.
Channels are heavy-tailed because tokens differ in energy, and within a class they are not. Indices
minimise c-error² + rdo · bits over the nearest number and its neighbour towards zero, or, with the
two quantisers of a trellis, over all paths through it. Decoded values are the means of the samples
at ±1 and beyond, less than the number itself for peaked distributions. An escape is followed by its
coefficient in float32.

A block is the number of escapes (u32), their float32, then the words of the range coder.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from assay_lab.kv.codecs.base import Parts
from assay_lab.kv.codecs.cheapest_numbers import cheapest
from assay_lab.kv.codecs.distributions import (
    DISTRIBUTIONS,
    ESCAPE,
    RADIUS,
    Decoder,
    code_lengths,
    encode,
    lengths_on,
    radii,
)
from assay_lab.kv.codecs.samples import LayerStream, Tables
from assay_lab.kv.codecs.stream import damaged
from assay_lab.kv.klt import Klt, Predictor
from assay_lab.kv.transform_coder import TransformCoder
from assay_lab.trellis import Trellis, quantisers, trellis

COUNT = struct.Struct("<I")
SEARCHED = {"cpu": 512, "cuda": 16_384}
"""Tokens whose paths are searched at once."""


class RangeCoder(TransformCoder):
    """Codes: numbers [blocks, tokens, rank], token classes [blocks, tokens], escaped coefficients
    like numbers.

    Tables of distributions, radii and decoded values have one row for each quantiser: two with a
    trellis of `states`.
    """

    def __init__(
        self,
        site: LayerStream,
        transform: Klt,
        predictor: Predictor | None,
        own: Tables,
        rdo: float,
        states: int,
    ) -> None:
        super().__init__(site, transform, predictor, own)
        self._rdo = rdo
        self._trellis = trellis(states) if states else None
        count = 2 if states else 1
        first = np.arange(count)[:, None, None] * DISTRIBUTIONS
        self._distributions = own["laws"].reshape(count, -1, transform.rank) + first
        self._odds = own["odds"].astype("float64")
        self._lengths = lengths_on("cpu")
        # The place of the number 0 in `_lengths` under each distribution.
        self._zero = (
            torch.from_numpy(self._distributions.astype("int32")) * code_lengths().shape[1] + RADIUS
        )
        self._radius = torch.from_numpy(radii()[self._distributions])
        self._shrink = torch.from_numpy(own["shrink"].astype("float32")).view(count, 2, -1) / 256
        self._kind_bits = -torch.from_numpy(own["odds"]).float().log2()
        self.calibrated_bits = float("nan")

    def to(self, device: torch.device) -> None:
        """Move the tables of code lengths, which choosing indices reads."""
        self._lengths = lengths_on(str(device))
        for name in ("_zero", "_radius", "_shrink", "_kind_bits"):
            setattr(self, name, getattr(self, name).to(device))

    def choose(self, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers and classes [...] of coefficients [..., rank]; bank.ESCAPE marks an
        escape.
        """
        numbers = c.round().clamp(-ESCAPE, ESCAPE).long()
        numbers = torch.where(numbers == -ESCAPE, ESCAPE, numbers)
        kinds = self._kinds(numbers)
        if self._trellis is not None:
            return self._along(self._trellis, c, kinds), kinds
        if self._rdo:
            nearer = numbers - numbers.sign()
            saved = self._bits(numbers, kinds) - self._bits(nearer, kinds)
            worse = (c - nearer).square() - (c - numbers).square()
            take = (saved * self._rdo > worse) & (numbers != ESCAPE)
            numbers = torch.where(take, nearer, numbers)
            kinds = self._kinds(numbers)
        beyond = numbers.abs() > self._radius[0][kinds]
        return torch.where(beyond, ESCAPE, numbers), kinds

    def _along(self, code: Trellis, c: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        """Numbers of the cheapest path, a few tokens at a time: what is tried for them is large."""
        rows, kind = c.reshape(-1, c.shape[-1]), kinds.reshape(-1)
        most = SEARCHED.get(c.device.type, SEARCHED["cuda"])
        found = [
            cheapest(some, self._lengths, self._zero[:, of], self._radius[:, of], self._rdo, code)
            for some, of in zip(rows.split(most), kind.split(most), strict=True)
        ]
        return torch.cat(found).reshape(c.shape)

    def apart(self, coefficients: torch.Tensor) -> torch.Tensor:
        """Share of escapes."""
        numbers, _ = self.choose(coefficients)
        return (numbers == ESCAPE).float().mean(dim=(1, 2))

    def lengths(self, numbers: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        """Bits of each token."""
        bits = self._bits(numbers, kinds)
        if self._trellis is not None:
            second = quantisers(numbers, self._trellis) > 0
            bits = torch.where(second, self._bits(numbers, kinds, 1), bits)
        return bits.sum(-1) + self._kind_bits[kinds]

    def quantise(self, x: torch.Tensor, predictors: torch.Tensor | None = None) -> Parts:
        if self._lengths.device != x.device:
            self.to(x.device)
        c = self.coefficients(x, predictors)
        numbers, kinds = self.choose(c)
        return (
            numbers.to(torch.int16),
            kinds.to(torch.uint8),
            torch.where(numbers == ESCAPE, c, 0.0),
        )

    def dequantise(self, parts: Parts, predictors: torch.Tensor | None = None) -> torch.Tensor:
        numbers, _, escaped = parts
        value, sign = numbers.float(), numbers.sign()
        one = value.abs() == 1
        # By quantiser: how much nearer to 0 the value of a number, as samples have it, is than
        # the number.
        gaps = [torch.where(one, *shrink) for shrink in self._shrink.to(value.device)]
        gap = gaps[0]
        if self._trellis is not None:
            gap = torch.where(quantisers(numbers, self._trellis) > 0, gaps[1] + 0.5, gap)
        return self.tokens_of(
            torch.where(numbers == ESCAPE, escaped, value - gap * sign), predictors
        )

    def pack(self, parts: Parts) -> list[bytes]:
        numbers = parts[0].cpu().numpy().astype("int64")
        kinds = parts[1].cpu().numpy().astype("int64")
        raw = parts[2].cpu().numpy()
        payloads = []
        for k, kind, value in zip(numbers, kinds, raw, strict=True):
            escapes = value[k == ESCAPE].astype("<f4")
            distributions, columns = self._distributions[0][kind], None
            if self._trellis is not None:
                columns = self._trellis.apart()
                distributions = np.where(
                    self._trellis.takes_second(k), self._distributions[1][kind], distributions
                )
            words = encode(k, distributions, kind, self._odds, columns)
            payloads.append(COUNT.pack(escapes.size) + escapes.tobytes() + words)
        return payloads

    def unpack(self, payloads: Sequence[bytes], tokens: int) -> Parts:
        found = [self._unpack_one(payload, tokens) for payload in payloads]
        numbers, kinds, raw = (np.stack(column) for column in zip(*found, strict=True))
        return (
            torch.from_numpy(numbers.astype("int16")),
            torch.from_numpy(kinds.astype("uint8")),
            torch.from_numpy(raw),
        )

    def _unpack_one(self, payload: bytes, tokens: int) -> tuple[Any, Any, Any]:
        if len(payload) < COUNT.size:
            raise damaged("a block ends before its number of escapes")
        (count,) = COUNT.unpack_from(payload)
        start = COUNT.size + 4 * count
        if len(payload) < start:
            raise damaged("a block ends inside its escapes")
        decoder = Decoder(payload[start:])
        kinds = decoder.kinds(tokens, self._odds)
        numbers = self._read_numbers(decoder, kinds)
        escaped = numbers == ESCAPE
        if int(escaped.sum()) != count:
            raise damaged(f"a block has {count} escaped values and {int(escaped.sum())} escapes")
        raw = np.zeros(numbers.shape, dtype=np.float32)
        raw[escaped] = np.frombuffer(payload, dtype="<f4", count=count, offset=COUNT.size)
        return numbers, kinds, raw

    def _read_numbers(self, decoder: Decoder, kinds: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Numbers [tokens, rank], group by group where the quantiser of a number hangs on those
        before it.
        """
        if self._trellis is None:
            return decoder.numbers(self._distributions[0][kinds])
        width = self._trellis.apart()
        numbers = np.zeros((kinds.size, self.rank), np.int64)
        for first in range(0, self.rank, width):
            own = slice(first, min(first + width, self.rank))
            second = self._trellis.takes_second(numbers[:, :first], own)
            distributions = np.where(
                second, self._distributions[1][kinds, own], self._distributions[0][kinds, own]
            )
            numbers[:, own] = decoder.numbers(distributions)
        return numbers

    def _bits(self, numbers: torch.Tensor, kinds: torch.Tensor, quantiser: int = 0) -> torch.Tensor:
        return self._look_up(self._zero[quantiser][kinds] + numbers.int())

    def _kinds(self, numbers: torch.Tensor) -> torch.Tensor:
        # All classes in one go: on a GPU a token at a time costs as many calls as it has steps.
        places = numbers.int()[..., None, :] + self._zero[0]
        return (self._look_up(places).sum(-1) + self._kind_bits).argmin(dim=-1)

    def _look_up(self, places: torch.Tensor) -> torch.Tensor:
        return self._lengths.index_select(0, places.flatten()).view(places.shape)
