"""Coefficients in whole steps, range-coded: each under the law that calibration chose for its channel and token class.

A token's class (quiet … loud) is what makes its code shortest; it is coded with the token. Channels are heavy-tailed
because tokens differ in energy, and within a class they are not. Indices minimise c-error² + rdo · bits over the
nearest number and its neighbour towards zero. Decoded values are the means of the samples at ±1 and beyond, less than
the number itself for peaked laws. An escape is followed by its coefficient in float32.

A block is u16 escapes, their float32, then the words of the range coder.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from assay.kv import bank
from assay.kv.codec import Parts, Site, Tables, damaged
from assay.kv.codecs.pca_base import TransformCoder
from assay.kv.klt import Klt, Predictor, Spectrum

if TYPE_CHECKING:
    import numpy as np
    import torch

_COUNT = struct.Struct("<I")
_FIT_TOKENS = 4096
_FIRST_TOKENS = 1024
_SEARCH_TOKENS = 1024


def fit_range(
    site: Site,
    found: Spectrum,
    rows: torch.Tensor,
    step: float,
    settings: tuple[int, float, float],
    predictor: Predictor | None,
) -> RangeCoder:
    """Laws, classes and decoded values from sampled rows [n, width]; `settings` are classes, rdo, smallest."""
    import numpy as np

    classes, rdo, smallest = settings
    transform = found.with_step(step, smallest)
    stride = max(1, rows.shape[0] // _FIT_TOKENS)
    whole = transform.forward(rows[::stride].float())
    # Laws and classes find each other on some of the tokens; the last turn takes all.
    c = whole[:: max(1, whole.shape[0] // _FIRST_TOKENS)]
    numbers = c.round().clamp(-bank.RADIUS, bank.RADIUS).long()
    loudness = c.abs().clamp_max(64).sum(dim=-1)
    kinds = (loudness.argsort().argsort() * classes // max(1, c.shape[0])).clamp_max(classes - 1)
    for turn in range(3):
        k, kind = numbers.numpy(), kinds.numpy()
        prior = bank.histogram(k) / max(1, k.shape[0])
        # A class borrows from all: a channel it hardly saw keeps a law.
        laws = np.stack([bank.best_laws(bank.histogram(k[kind == i]) + 2 * prior) for i in range(classes)])
        odds = (np.bincount(kind, minlength=classes) + 1.0).astype(np.float32)
        own = {
            "laws": laws,
            "odds": odds / odds.sum(),
            "shrink": np.zeros((2, transform.rank), np.int8),
        }
        coder = RangeCoder(site, transform, predictor, own, rdo if turn else 0.0)
        c = whole if turn else c
        numbers, kinds = coder.choose(c)
    fitted = RangeCoder(site, transform, predictor, {**own, "shrink": _shrinkage(c, numbers)}, rdo)
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


def _shrinkage(c: torch.Tensor, numbers: torch.Tensor) -> np.ndarray[Any, Any]:
    """How far below |k| the mean of |c| lies, for |k| = 1 and beyond, in 1/256: int8 [2, rank]."""
    import torch

    size = numbers.abs()
    rows = []
    for chosen in (size == 1, (size > 1) & (size < bank.ESCAPE)):
        gap = (size - c * numbers.sign()) * chosen
        # A few pretended samples without a gap hold rare cells at 0.
        rows.append(gap.sum(dim=0) / (chosen.sum(dim=0) + 8))
    result: np.ndarray[Any, Any] = (torch.stack(rows) * 256).round().clamp(-127, 127).to(torch.int8).numpy()
    return result


class RangeCoder(TransformCoder):
    """Codes: numbers [blocks, tokens, rank], token classes [blocks, tokens], escaped coefficients like numbers."""

    def __init__(
        self, site: Site, transform: Klt, predictor: Predictor | None, own: Tables, rdo: float
    ) -> None:
        import torch

        super().__init__(site, transform, predictor, own)
        self._rdo = rdo
        self._laws = own["laws"]
        self._odds = own["odds"].astype("float64")
        lengths = bank.code_lengths()
        self._lengths = torch.from_numpy(lengths).flatten()
        # Where in `_lengths` the number 0 stands under each law.
        self._zero = torch.from_numpy(self._laws.astype("int32")) * lengths.shape[1] + bank.RADIUS
        self._radius = torch.from_numpy(bank.radii()[self._laws])
        self._shrink = torch.from_numpy(own["shrink"].astype("float32")) / 256
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
        if self._rdo:
            nearer = numbers - numbers.sign()
            saved = self._bits(numbers, kinds) - self._bits(nearer, kinds)
            worse = (c - nearer).square() - (c - numbers).square()
            take = (saved * self._rdo > worse) & (numbers != bank.ESCAPE)
            numbers = torch.where(take, nearer, numbers)
            kinds = self._kinds(numbers)
        beyond = numbers.abs() > self._radius[kinds]
        return torch.where(beyond, bank.ESCAPE, numbers), kinds

    def apart(self, coefficients: torch.Tensor) -> torch.Tensor:
        """Share of escapes."""
        numbers, _ = self.choose(coefficients)
        return (numbers == bank.ESCAPE).float().mean(dim=(1, 2))

    def lengths(self, numbers: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        """Bits of each token."""
        return self._bits(numbers, kinds).sum(-1) + self._kind_bits[kinds]

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
        value = numbers.float()
        shrink = self._shrink.to(value.device)
        gap = torch.where(value.abs() == 1, shrink[0], shrink[1]) * value.sign()
        return self.tokens_of(torch.where(numbers == bank.ESCAPE, escaped, value - gap), side)

    def pack(self, parts: Parts) -> list[bytes]:
        numbers = parts[0].cpu().numpy().astype("int64")
        kinds = parts[1].cpu().numpy().astype("int64")
        raw = parts[2].cpu().numpy()
        payloads = []
        for k, kind, value in zip(numbers, kinds, raw, strict=True):
            escapes = value[k == bank.ESCAPE].astype("<f4")
            words = bank.encode(k, self._laws[kind], kind, self._odds)
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
        numbers = decoder.numbers(self._laws[kinds])
        escaped = numbers == bank.ESCAPE
        if int(escaped.sum()) != count:
            raise damaged(f"a block has {count} escaped values and {int(escaped.sum())} escapes")
        raw = np.zeros(numbers.shape, dtype=np.float32)
        raw[escaped] = np.frombuffer(payload, dtype="<f4", count=count, offset=_COUNT.size)
        return numbers, kinds, raw

    def _bits(self, numbers: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        return self._look_up(self._zero[kinds] + numbers.int())

    def _kinds(self, numbers: torch.Tensor) -> torch.Tensor:
        # All classes in one go: on a GPU a token at a time costs as many calls as it has steps.
        places = numbers.int()[..., None, :] + self._zero
        return (self._look_up(places).sum(-1) + self._kind_bits).argmin(dim=-1)

    def _look_up(self, places: torch.Tensor) -> torch.Tensor:
        return self._lengths.index_select(0, places.flatten()).view(places.shape)
