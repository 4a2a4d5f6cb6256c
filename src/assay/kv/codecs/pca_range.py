"""Coefficients in whole steps, range-coded: each under the law that calibration chose for its channel and token class.

A token's class (quiet … loud) is what makes its code shortest; it is coded with the token. Channels are heavy-tailed
because tokens differ in energy, and within a class they are not. Indices minimise c-error² + rdo · bits over the
nearest number and its neighbour towards zero, or, with the two quantisers of a trellis, over all paths through it. Decoded values are the means of the samples at ±1 and beyond, less than
the number itself for peaked laws. An escape is followed by its coefficient in float32.

A block is the number of escapes (u32), their float32, then the words of the range coder.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from assay.kv import bank
from assay.kv.codec import Parts, Site, Tables, damaged
from assay.kv.codecs.pca_base import TransformCoder
from assay.kv.codecs.pca_trellis import cheapest, nearest
from assay.kv.klt import Klt, Predictor, Spectrum
from assay.quant.trellis import Trellis, quantisers, trellis

if TYPE_CHECKING:
    import numpy as np
    import torch

_COUNT = struct.Struct("<I")
_FIT_TOKENS = 4096
_FIRST_TOKENS = 1024
_SEARCH_TOKENS = 1024
_SEARCHED = {"cpu": 512, "cuda": 16_384}
"""Tokens whose paths are searched at once."""


@dataclass(frozen=True)
class RangeSettings:
    """How numbers are chosen: token classes, bits weighed against squared steps, the smallest deviation that is coded in
    steps, states of the trellis (0: one quantiser)."""

    classes: int
    rdo: float
    smallest: float
    states: int = 0


def fit_range(
    site: Site,
    found: Spectrum,
    rows: torch.Tensor,
    step: float,
    settings: RangeSettings,
    predictor: Predictor | None,
) -> RangeCoder:
    """Laws, classes and decoded values from sampled rows [n, width]."""
    import numpy as np

    classes, states = settings.classes, settings.states
    transform = found.with_step(step, settings.smallest)
    stride = max(1, rows.shape[0] // _FIT_TOKENS)
    whole = transform.forward(rows[::stride].float())
    # Laws and classes find each other on some of the tokens; the last turn takes all.
    c = whole[:: max(1, whole.shape[0] // _FIRST_TOKENS)]
    numbers = c.round().clamp(-bank.RADIUS, bank.RADIUS).long()
    if states:
        numbers = nearest(c, bank.RADIUS, trellis(states))
    loudness = c.abs().clamp_max(64).sum(dim=-1)
    kinds = (loudness.argsort().argsort() * classes // max(1, c.shape[0])).clamp_max(classes - 1)
    for turn in range(3):
        odds = (np.bincount(kinds.numpy(), minlength=classes) + 1.0).astype(np.float32)
        own = {
            "laws": _learnt_laws(numbers, kinds, settings),
            "odds": odds / odds.sum(),
            "shrink": np.zeros((4 if states else 2, transform.rank), np.int8),
        }
        coder = RangeCoder(site, transform, predictor, own, settings.rdo if turn else 0.0, states)
        c = whole if turn else c
        numbers, kinds = coder.choose(c)
    own["shrink"] = _shrinkage(c, numbers, settings)
    fitted = RangeCoder(site, transform, predictor, own, settings.rdo, states)
    fitted.calibrated_bits = float(fitted.lengths(numbers, kinds).mean()) / site.width
    return fitted


def step_for_bits(found: Spectrum, rows: torch.Tensor, bits: float, unit: float) -> float:
    """The step whose nearest numbers take `bits` a value under one law per channel: secant steps in log₂ step."""
    import numpy as np

    transform = found.with_step(unit, 0.0)
    c = transform.forward(rows[:: max(1, rows.shape[0] // _SEARCH_TOKENS)].float())
    lengths = bank.code_lengths().astype(np.float64).T

    def spent(step: float) -> float:
        numbers = (c * (unit / step)).round().clamp(-bank.RADIUS, bank.RADIUS).long().numpy()
        total = float((bank.histogram(numbers) @ lengths).min(axis=1).sum())
        return total / int(c.shape[0] * found.mean.numel())

    step, slope = float(unit * 2.0 ** (2.0 - bits)), -0.8
    last: tuple[float, float] | None = None
    for _ in range(10):
        excess = spent(step) - bits
        if abs(excess) < 0.003 * bits:
            break
        at = float(np.log2(step))
        if last is not None and at != last[0]:
            slope = min(-0.05, max(-1.1, (excess - last[1]) / (at - last[0])))
        last = (at, excess)
        step *= float(2.0 ** max(-2.0, min(2.0, -excess / slope)))
    return step


def _learnt_laws(numbers: torch.Tensor, kinds: torch.Tensor, settings: RangeSettings) -> np.ndarray[Any, Any]:
    """The law of each channel, by quantiser and token class, for numbers [n, rank]: uint8
    [quantisers · classes, rank]."""
    import numpy as np

    k, kind = numbers.numpy(), kinds.numpy()
    found = []
    for quantiser, own in enumerate(_by_quantiser(numbers, settings)):
        taken = own.numpy()
        prior = bank.histogram(k, taken) / np.maximum(1, taken.sum(axis=0))[:, None]
        # A class borrows from all: a channel it hardly saw keeps a law.
        counts = [bank.histogram(k[kind == i], taken[kind == i]) + 2 * prior for i in range(settings.classes)]
        found += [bank.best_laws(c, quantiser) for c in counts]
    return np.stack(found)


def _by_quantiser(numbers: torch.Tensor, settings: RangeSettings) -> list[torch.Tensor]:
    """Which of the numbers [n, rank] each quantiser gave."""
    import torch

    if not settings.states:
        return [torch.ones_like(numbers, dtype=torch.bool)]
    second = quantisers(numbers, trellis(settings.states)) > 0
    return [~second, second]


def _shrinkage(c: torch.Tensor, numbers: torch.Tensor, settings: RangeSettings) -> np.ndarray[Any, Any]:
    """How far below what |k| stands for the mean of |c| lies, for |k| = 1 and beyond, in 1/256: int8
    [2 · quantisers, rank]."""
    import torch

    size = numbers.abs()
    rows = []
    for quantiser, own in enumerate(_by_quantiser(numbers, settings)):
        for chosen in (size == 1, (size > 1) & (size < bank.ESCAPE)):
            taken = chosen & own
            gap = (size - 0.5 * quantiser - c * numbers.sign()) * taken
            # A few pretended samples without a gap hold rare cells at 0.
            rows.append(gap.sum(dim=0) / (taken.sum(dim=0) + 8))
    result: np.ndarray[Any, Any] = (torch.stack(rows) * 256).round().clamp(-127, 127).to(torch.int8).numpy()
    return result


class RangeCoder(TransformCoder):
    """Codes: numbers [blocks, tokens, rank], token classes [blocks, tokens], escaped coefficients like numbers.

    Tables of laws, radii and decoded values have one row for each quantiser: two with a trellis of `states`.
    """

    def __init__(
        self,
        site: Site,
        transform: Klt,
        predictor: Predictor | None,
        own: Tables,
        rdo: float,
        states: int,
    ) -> None:
        import numpy as np
        import torch

        super().__init__(site, transform, predictor, own)
        self._rdo = rdo
        self._trellis = trellis(states) if states else None
        count = 2 if states else 1
        first = np.arange(count)[:, None, None] * bank.LAWS
        self._laws = own["laws"].reshape(count, -1, transform.rank) + first
        self._odds = own["odds"].astype("float64")
        lengths = bank.code_lengths()
        self._lengths = torch.from_numpy(lengths).flatten()
        # Where in `_lengths` the number 0 stands under each law.
        self._zero = torch.from_numpy(self._laws.astype("int32")) * lengths.shape[1] + bank.RADIUS
        self._radius = torch.from_numpy(bank.radii()[self._laws])
        self._shrink = torch.from_numpy(own["shrink"].astype("float32")).view(count, 2, -1) / 256
        self._kind_bits = -torch.from_numpy(own["odds"]).float().log2()
        self.calibrated_bits = float("nan")

    def to(self, device: torch.device) -> None:
        """Move the tables of code lengths, which choosing indices reads."""
        for name in ("_zero", "_lengths", "_radius", "_shrink", "_kind_bits"):
            setattr(self, name, getattr(self, name).to(device))

    def choose(self, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers and classes [...] of coefficients [..., rank]; bank.ESCAPE stands for an escape."""
        import torch

        numbers = c.round().clamp(-bank.ESCAPE, bank.ESCAPE).long()
        numbers = torch.where(numbers == -bank.ESCAPE, bank.ESCAPE, numbers)
        kinds = self._kinds(numbers)
        if self._trellis is not None:
            return self._along(self._trellis, c, kinds), kinds
        if self._rdo:
            nearer = numbers - numbers.sign()
            saved = self._bits(numbers, kinds) - self._bits(nearer, kinds)
            worse = (c - nearer).square() - (c - numbers).square()
            take = (saved * self._rdo > worse) & (numbers != bank.ESCAPE)
            numbers = torch.where(take, nearer, numbers)
            kinds = self._kinds(numbers)
        beyond = numbers.abs() > self._radius[0][kinds]
        return torch.where(beyond, bank.ESCAPE, numbers), kinds

    def _along(self, code: Trellis, c: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        """Numbers of the cheapest path, a few tokens at a time: what is tried for them is large."""
        import torch

        rows, kind = c.reshape(-1, c.shape[-1]), kinds.reshape(-1)
        most = _SEARCHED.get(c.device.type, _SEARCHED["cuda"])
        found = [
            cheapest(some, self._lengths, self._zero[:, of], self._radius[:, of], self._rdo, code)
            for some, of in zip(rows.split(most), kind.split(most), strict=True)
        ]
        return torch.cat(found).reshape(c.shape)

    def apart(self, coefficients: torch.Tensor) -> torch.Tensor:
        """Share of escapes."""
        numbers, _ = self.choose(coefficients)
        return (numbers == bank.ESCAPE).float().mean(dim=(1, 2))

    def lengths(self, numbers: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        """Bits of each token."""
        import torch

        bits = self._bits(numbers, kinds)
        if self._trellis is not None:
            second = quantisers(numbers, self._trellis) > 0
            bits = torch.where(second, self._bits(numbers, kinds, 1), bits)
        return bits.sum(-1) + self._kind_bits[kinds]

    def quantise(self, x: torch.Tensor, side: torch.Tensor | None = None) -> Parts:
        import torch

        if self._lengths.device != x.device:
            self.to(x.device)
        c = self.coefficients(x, side)
        numbers, kinds = self.choose(c)
        return numbers.to(torch.int16), kinds.to(torch.uint8), torch.where(numbers == bank.ESCAPE, c, 0.0)

    def dequantise(self, parts: Parts, side: torch.Tensor | None = None) -> torch.Tensor:
        import torch

        numbers, _, escaped = parts
        value, sign = numbers.float(), numbers.sign()
        one = value.abs() == 1
        # By quantiser: how far what a number stands for, as samples have it, lies nearer to 0 than the number.
        gaps = [torch.where(one, *shrink) for shrink in self._shrink.to(value.device)]
        gap = gaps[0]
        if self._trellis is not None:
            gap = torch.where(quantisers(numbers, self._trellis) > 0, gaps[1] + 0.5, gap)
        return self.tokens_of(torch.where(numbers == bank.ESCAPE, escaped, value - gap * sign), side)

    def pack(self, parts: Parts) -> list[bytes]:
        import numpy as np

        numbers = parts[0].cpu().numpy().astype("int64")
        kinds = parts[1].cpu().numpy().astype("int64")
        raw = parts[2].cpu().numpy()
        payloads = []
        for k, kind, value in zip(numbers, kinds, raw, strict=True):
            escapes = value[k == bank.ESCAPE].astype("<f4")
            laws, columns = self._laws[0][kind], None
            if self._trellis is not None:
                columns = self._trellis.apart()
                laws = np.where(self._trellis.takes_second(k), self._laws[1][kind], laws)
            words = bank.encode(k, laws, kind, self._odds, columns)
            payloads.append(_COUNT.pack(escapes.size) + escapes.tobytes() + words)
        return payloads

    def unpack(self, payloads: Sequence[bytes], tokens: int) -> Parts:
        import numpy as np
        import torch

        found = [self._unpack_one(payload, tokens) for payload in payloads]
        numbers, kinds, raw = (np.stack(column) for column in zip(*found, strict=True))
        return (
            torch.from_numpy(numbers.astype("int16")),
            torch.from_numpy(kinds.astype("uint8")),
            torch.from_numpy(raw),
        )

    def _unpack_one(self, payload: bytes, tokens: int) -> tuple[Any, Any, Any]:
        import numpy as np

        if len(payload) < _COUNT.size:
            raise damaged("a block ends before its number of escapes")
        (count,) = _COUNT.unpack_from(payload)
        start = _COUNT.size + 4 * count
        if len(payload) < start:
            raise damaged("a block ends inside its escapes")
        decoder = bank.Decoder(payload[start:])
        kinds = decoder.kinds(tokens, self._odds)
        numbers = self._read_numbers(decoder, kinds)
        escaped = numbers == bank.ESCAPE
        if int(escaped.sum()) != count:
            raise damaged(f"a block has {count} escaped values and {int(escaped.sum())} escapes")
        raw = np.zeros(numbers.shape, dtype=np.float32)
        raw[escaped] = np.frombuffer(payload, dtype="<f4", count=count, offset=_COUNT.size)
        return numbers, kinds, raw

    def _read_numbers(self, decoder: bank.Decoder, kinds: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Numbers [tokens, rank], group by group where the quantiser of a number hangs on those before it."""
        import numpy as np

        if self._trellis is None:
            return decoder.numbers(self._laws[0][kinds])
        width = self._trellis.apart()
        numbers = np.zeros((kinds.size, self.rank), np.int64)
        for first in range(0, self.rank, width):
            own = slice(first, min(first + width, self.rank))
            second = self._trellis.takes_second(numbers[:, :first], own)
            laws = np.where(second, self._laws[1][kinds, own], self._laws[0][kinds, own])
            numbers[:, own] = decoder.numbers(laws)
        return numbers

    def _bits(self, numbers: torch.Tensor, kinds: torch.Tensor, quantiser: int = 0) -> torch.Tensor:
        return self._look_up(self._zero[quantiser][kinds] + numbers.int())

    def _kinds(self, numbers: torch.Tensor) -> torch.Tensor:
        # All classes in one go: on a GPU a token at a time costs as many calls as it has steps.
        places = numbers.int()[..., None, :] + self._zero[0]
        return (self._look_up(places).sum(-1) + self._kind_bits).argmin(dim=-1)

    def _look_up(self, places: torch.Tensor) -> torch.Tensor:
        return self._lengths.index_select(0, places.flatten()).view(places.shape)
