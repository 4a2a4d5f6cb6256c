"""Coefficients in whole steps, range-coded: each under the law that calibration chose for its
channel and token class.

A token's class (quiet … loud) is what makes its code shortest; it is coded with the token. Channels
are heavy-tailed because tokens differ in energy, and within a class they are not. Indices minimise
c-error² + rdo · bits over the nearest number and its neighbour towards zero, or, with the two
quantisers of a trellis, over all paths through it. Decoded values are the means of the samples at
±1 and beyond, less than the number itself for peaked laws. An escape is followed by its coefficient
in float32.

A block is the number of escapes (u32), their float32, then the words of the range coder.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit, ndtr

from assay.errors import AssayError
from assay_lab.kv.codecs.base import Parts
from assay_lab.kv.codecs.samples import Site, Tables
from assay_lab.kv.codecs.stream import damaged
from assay_lab.kv.transforms import Klt, Predictor, Spectrum, TransformCoder
from assay_lab.trellis import Trellis, candidates, cheapest_path, quantisers, trellis, values

# A bank of probability laws of whole numbers, and range coding under a choice of them.
#
# Law p is a density with location 0 cut at half integers: Gaussian, logistic or Laplace, with one
# of 72 scales from 1/16 to about 228, six an octave. A calibration names one law per channel, one
# byte each, so that tables are small and a channel that another text makes wider still has a proper
# tail. Numbers beyond the radius of their law are escapes.
#
# The first `LAWS` are for numbers k that stand for k, as many again for numbers of the trellis'
# quantiser 1, which stand for k − sgn(k)/2: the same densities, cut at ±1/4 and at ±1, ±2 and so
# on.

RADIUS = 1023
SCALES = 72
LAWS = 3 * SCALES
"""Laws of a quantiser."""
ESCAPE = RADIUS + 1
"""What stands for an escape among numbers."""
ESCAPE_BITS = 32.0
"""Bits of the value that follows an escape."""
_TAIL = 2.0**-13


@cache
def _laws() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Probabilities [2 · LAWS, 2 · RADIUS + 2] of −RADIUS … RADIUS and the escape, and the radius
    of each law.
    """
    whole = np.arange(RADIUS + 1.0)
    found = [_cut(whole + 0.5), _cut(np.maximum(whole, 0.25))]
    laws, radius = (np.concatenate(rows) for rows in zip(*found, strict=True))
    return laws, radius


def _cut(edge: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Probabilities of all densities cut at ±`edge` [RADIUS + 1], and their radii."""
    scale = 2.0 ** (np.arange(SCALES) / 6 - 4)[:, None]
    # Upper tails P(X > edge): they do not cancel.
    tails = np.concatenate(
        [ndtr(-edge / scale), expit(-edge / (scale * 0.5513)), 0.5 * np.exp(-edge * 2**0.5 / scale)]
    )
    side = tails[:, :-1] - tails[:, 1:]
    radius = np.clip((tails > _TAIL).sum(axis=1), 1, RADIUS)
    numbers = np.arange(1, RADIUS + 1)
    side = np.where(numbers <= radius[:, None], np.maximum(side, 2.0**-20), 0.0)
    outside = np.maximum(2 * np.take_along_axis(tails, radius[:, None], axis=1), _TAIL / 4)
    whole = np.concatenate([side[:, ::-1], 1 - 2 * tails[:, :1], side, outside], axis=1)
    whole /= whole.sum(axis=1, keepdims=True)
    # Multiples of 2⁻³⁰, so that the last digit of a library's exponential cannot matter.
    return np.round(whole * 2.0**30) / 2.0**30, radius


def radii() -> NDArray[np.int64]:
    """The largest number of each law that is no escape [LAWS]."""
    return _laws()[1]


@cache
def code_lengths() -> NDArray[np.float32]:
    """Bits [2 · LAWS, 2 · RADIUS + 3] of −RADIUS … RADIUS and ESCAPE under each law, an escape's
    value included.
    """
    laws, _ = _laws()
    escape = ESCAPE_BITS - np.log2(laws[:, -1:])
    with np.errstate(divide="ignore"):
        bits = -np.log2(laws[:, :-1])
    result: NDArray[np.float32] = np.concatenate([np.minimum(bits, escape), escape], axis=1).astype(
        np.float32
    )
    return result


@cache
def _lengths_on(device: str) -> torch.Tensor:
    """`code_lengths`, flat, on a device: 3.5 MB that all coders there share."""
    return torch.from_numpy(code_lengths()).flatten().to(device)


def best_laws(counts: NDArray[np.float64], quantiser: int = 0) -> NDArray[np.uint8]:
    """The law with the shortest code for each channel; `counts` [channels, 2 · RADIUS + 2] of
    numbers and escapes.

    Laws are counted from the first one of the quantiser.
    """
    # Nearly all numbers are small: columns that nothing fell into cost nothing.
    used = np.flatnonzero(counts.any(axis=0))
    own = slice(quantiser * LAWS, (quantiser + 1) * LAWS)
    lengths = code_lengths()[own, used].astype("float64")
    best: NDArray[np.uint8] = (counts[:, used] @ lengths.T).argmin(axis=1).astype("uint8")
    return best


def histogram(
    numbers: NDArray[np.int64], chosen: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """How often each of −RADIUS … RADIUS and ESCAPE stands in each column of [n, channels], of
    those that are chosen.
    """
    width = 2 * RADIUS + 2
    columns = np.arange(numbers.shape[1]) * width
    places = numbers + RADIUS + columns
    found = places.ravel() if chosen is None else places[chosen]
    flat = np.bincount(found, minlength=width * numbers.shape[1])
    return flat.reshape(numbers.shape[1], width).astype(np.float64)


def encode(
    numbers: NDArray[np.int64],
    laws: NDArray[np.integer[Any]],
    kinds: NDArray[np.int64],
    odds: NDArray[np.float64],
    columns: int | None = None,
) -> bytes:
    """Range-coded words: first `kinds` under `odds`, then `numbers` [tokens, n], each under its
    law, law by law.

    With `columns` so many columns of them after one another, as `Decoder.numbers` will be asked for
    them.
    """
    coder = library().stream.queue.RangeEncoder()
    if odds.size > 1:
        coder.encode(kinds.astype(np.int32), _model(odds))
    width = max(1, numbers.shape[1])
    for first in range(0, width, columns or width):
        some = slice(first, first + (columns or width))
        flat, order, starts = numbers[:, some].ravel(), *_by_law(laws[:, some])
        for law, lo, hi in starts:
            radius = int(radii()[law])
            words = (np.minimum(flat[order[lo:hi]], radius + 1) + radius).astype(np.int32)
            coder.encode(words, _law_model(law))
    return bytes(coder.get_compressed().astype("<u4").tobytes())


class Decoder:
    """Reads what `encode` wrote: `kinds`, then `numbers`."""

    def __init__(self, data: bytes) -> None:
        if len(data) % 4:
            raise damaged(f"{len(data)} bytes of range code are no whole words")
        self._coder = library().stream.queue.RangeDecoder(
            np.frombuffer(data, dtype="<u4").astype(np.uint32)
        )

    def kinds(self, count: int, odds: NDArray[np.float64]) -> NDArray[np.int64]:
        """The kinds of `count` tokens."""
        if odds.size == 1:
            return np.zeros(count, dtype=np.int64)
        return self._read(_model(odds), count)

    def numbers(self, laws: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """The next numbers, under their laws and of the shape of `laws`."""
        order, starts = _by_law(laws)
        flat = np.empty(laws.size, dtype=np.int64)
        for law, lo, hi in starts:
            radius = int(radii()[law])
            found = self._read(_law_model(law), hi - lo) - radius
            flat[order[lo:hi]] = np.where(found > radius, ESCAPE, found)
        return flat.reshape(laws.shape)

    def _read(self, model: Any, count: int) -> NDArray[np.int64]:
        try:
            found: NDArray[np.int64] = self._coder.decode(model, count).astype("int64")
        except (AssertionError, ValueError) as error:
            raise damaged("its range code is no code of these tables") from error
        return found


def _by_law(laws: NDArray[np.integer[Any]]) -> tuple[NDArray[np.int64], list[tuple[int, int, int]]]:
    """Positions sorted by law, and for each law that occurs (law, first, end) among them."""
    flat = laws.ravel()
    order = np.argsort(flat, kind="stable")
    ends = np.cumsum(np.bincount(flat, minlength=2 * LAWS))
    starts = np.concatenate([[0], ends[:-1]])
    used = np.flatnonzero(ends > starts)
    return order, [(int(law), int(starts[law]), int(ends[law])) for law in used]


@cache
def _law_model(law: int) -> Any:
    laws, radius = _laws()
    r = int(radius[law])
    return _model(np.append(laws[law, RADIUS - r : RADIUS + r + 1], laws[law, -1]))


def _model(odds: NDArray[np.float64]) -> Any:
    return library().stream.model.Categorical(
        np.ascontiguousarray(odds / odds.sum()), perfect=False
    )


def library() -> Any:
    """The package `constriction` (Bamler, arXiv:2201.01741); AssayError where it is not installed."""
    try:
        import constriction
    except ImportError as error:
        raise AssayError(
            "entropy coding needs the package constriction, which is not installed",
            finding_id="kv.package_missing",
            remedy=("pip install 'llm-assay[lab]', or use pca(coding=fixed)"),
        ) from error
    return constriction


# The numbers of coefficients along a trellis: those whose squared errors, and bits weighed against
# them, are cheapest.


def nearest(c: torch.Tensor, most: int, code: Trellis) -> torch.Tensor:
    """Numbers [rows, n] up to `most` with the least squared error of coefficients [rows, n]."""
    tried = [(candidates(c, c.new_full((), most), q), q) for q in (0, 1)]
    numbers = [number for pair, _ in tried for number in pair]
    return _along(numbers, [_error(number, c, q) for pair, q in tried for number in pair], code)


def cheapest(
    c: torch.Tensor,
    lengths: torch.Tensor,
    zero: torch.Tensor,
    radius: torch.Tensor,
    rdo: float,
    code: Trellis,
) -> torch.Tensor:
    """Numbers [rows, n] with the least Σ error² + rdo · bits; bank.ESCAPE where c lies beyond what
    its law knows.

    `zero` [2, rows, n] says where in `lengths` the number 0 of each quantiser stands, `radius` like
    it the largest number. An escape counts as even and has no error.
    """

    def bits(number: torch.Tensor | int, quantiser: int) -> torch.Tensor:
        places = zero[quantiser] + number
        return lengths.index_select(0, places.flatten().int()).view(c.shape)

    numbers, costs = [], []
    for quantiser in (0, 1):
        even, odd = candidates(c, radius[quantiser], quantiser)
        even_cost, odd_cost = (
            _error(n, c, quantiser) + rdo * bits(n, quantiser) for n in (even, odd)
        )
        # The number 0 is cheap to code: it stands in for the even one wherever it costs less.
        zero_cost = c.square() + rdo * bits(0, quantiser)
        even = torch.where(zero_cost < even_cost, 0.0, even)
        even_cost = torch.minimum(zero_cost, even_cost)
        beyond = c.abs() > radius[quantiser] + 0.5
        even = torch.where(beyond, float(ESCAPE), even)
        even_cost = torch.where(beyond, rdo * bits(ESCAPE, quantiser), even_cost)
        numbers += [even, odd]
        costs += [even_cost, odd_cost]
    return _along(numbers, costs, code)


def _error(number: torch.Tensor, c: torch.Tensor, quantiser: int) -> torch.Tensor:
    """Squared errors of numbers of a quantiser."""
    return (values(number, quantiser) - c).square()


def _along(
    numbers: Sequence[torch.Tensor], costs: Sequence[torch.Tensor], code: Trellis
) -> torch.Tensor:
    """Of four numbers [rows, n] by quantiser and parity those of the path that costs least, int64."""
    path = cheapest_path(torch.stack(list(costs), dim=-1).unflatten(-1, (2, 2)), code)
    found = numbers[0]
    for choice in (1, 2, 3):
        found = torch.where(path == choice, numbers[choice], found)
    return found.long()


_COUNT = struct.Struct("<I")
_FIT_TOKENS = 4096
_FIRST_TOKENS = 1024
_SEARCH_TOKENS = 1024
_SEARCHED = {"cpu": 512, "cuda": 16_384}
"""Tokens whose paths are searched at once."""


@dataclass(frozen=True)
class RangeSettings:
    """How numbers are chosen: token classes, bits weighed against squared steps, the smallest
    deviation that is coded in steps, states of the trellis (0: one quantiser)."""

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
    classes, states = settings.classes, settings.states
    transform = found.with_step(step, settings.smallest)
    stride = max(1, rows.shape[0] // _FIT_TOKENS)
    whole = transform.forward(rows[::stride].float())
    # Laws and classes find each other on some of the tokens; the last turn takes all.
    c = whole[:: max(1, whole.shape[0] // _FIRST_TOKENS)]
    numbers = c.round().clamp(-RADIUS, RADIUS).long()
    if states:
        numbers = nearest(c, RADIUS, trellis(states))
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
    """The step whose nearest numbers take `bits` a value under one law per channel: secant steps in
    log₂ step.
    """
    transform = found.with_step(unit, 0.0)
    c = transform.forward(rows[:: max(1, rows.shape[0] // _SEARCH_TOKENS)].float())
    lengths = code_lengths().astype(np.float64).T

    def spent(step: float) -> float:
        numbers = (c * (unit / step)).round().clamp(-RADIUS, RADIUS).long().numpy()
        total = float((histogram(numbers) @ lengths).min(axis=1).sum())
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


def _learnt_laws(
    numbers: torch.Tensor, kinds: torch.Tensor, settings: RangeSettings
) -> np.ndarray[Any, Any]:
    """The law of each channel, by quantiser and token class, for numbers [n, rank]: uint8
    [quantisers · classes, rank]."""
    k, kind = numbers.numpy(), kinds.numpy()
    found = []
    for quantiser, own in enumerate(_by_quantiser(numbers, settings)):
        taken = own.numpy()
        prior = histogram(k, taken) / np.maximum(1, taken.sum(axis=0))[:, None]
        # A class borrows from all: a channel it hardly saw keeps a law.
        counts = [
            histogram(k[kind == i], taken[kind == i]) + 2 * prior for i in range(settings.classes)
        ]
        found += [best_laws(c, quantiser) for c in counts]
    return np.stack(found)


def _by_quantiser(numbers: torch.Tensor, settings: RangeSettings) -> list[torch.Tensor]:
    """Which of the numbers [n, rank] each quantiser gave."""
    if not settings.states:
        return [torch.ones_like(numbers, dtype=torch.bool)]
    second = quantisers(numbers, trellis(settings.states)) > 0
    return [~second, second]


def _shrinkage(
    c: torch.Tensor, numbers: torch.Tensor, settings: RangeSettings
) -> np.ndarray[Any, Any]:
    """How far below what |k| stands for the mean of |c| lies, for |k| = 1 and beyond, in 1/256:
    int8 [2 · quantisers, rank]."""
    size = numbers.abs()
    rows = []
    for quantiser, own in enumerate(_by_quantiser(numbers, settings)):
        for chosen in (size == 1, (size > 1) & (size < ESCAPE)):
            taken = chosen & own
            gap = (size - 0.5 * quantiser - c * numbers.sign()) * taken
            # A few pretended samples without a gap hold rare cells at 0.
            rows.append(gap.sum(dim=0) / (taken.sum(dim=0) + 8))
    result: np.ndarray[Any, Any] = (
        (torch.stack(rows) * 256).round().clamp(-127, 127).to(torch.int8).numpy()
    )
    return result


class RangeCoder(TransformCoder):
    """Codes: numbers [blocks, tokens, rank], token classes [blocks, tokens], escaped coefficients
    like numbers.

    Tables of laws, radii and decoded values have one row for each quantiser: two with a trellis of
    `states`.
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
        super().__init__(site, transform, predictor, own)
        self._rdo = rdo
        self._trellis = trellis(states) if states else None
        count = 2 if states else 1
        first = np.arange(count)[:, None, None] * LAWS
        self._laws = own["laws"].reshape(count, -1, transform.rank) + first
        self._odds = own["odds"].astype("float64")
        self._lengths = _lengths_on("cpu")
        # Where in `_lengths` the number 0 stands under each law.
        self._zero = torch.from_numpy(self._laws.astype("int32")) * code_lengths().shape[1] + RADIUS
        self._radius = torch.from_numpy(radii()[self._laws])
        self._shrink = torch.from_numpy(own["shrink"].astype("float32")).view(count, 2, -1) / 256
        self._kind_bits = -torch.from_numpy(own["odds"]).float().log2()
        self.calibrated_bits = float("nan")

    def to(self, device: torch.device) -> None:
        """Move the tables of code lengths, which choosing indices reads."""
        self._lengths = _lengths_on(str(device))
        for name in ("_zero", "_radius", "_shrink", "_kind_bits"):
            setattr(self, name, getattr(self, name).to(device))

    def choose(self, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers and classes [...] of coefficients [..., rank]; bank.ESCAPE stands for an escape."""
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
        most = _SEARCHED.get(c.device.type, _SEARCHED["cuda"])
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

    def quantise(self, x: torch.Tensor, side: torch.Tensor | None = None) -> Parts:
        if self._lengths.device != x.device:
            self.to(x.device)
        c = self.coefficients(x, side)
        numbers, kinds = self.choose(c)
        return (
            numbers.to(torch.int16),
            kinds.to(torch.uint8),
            torch.where(numbers == ESCAPE, c, 0.0),
        )

    def dequantise(self, parts: Parts, side: torch.Tensor | None = None) -> torch.Tensor:
        numbers, _, escaped = parts
        value, sign = numbers.float(), numbers.sign()
        one = value.abs() == 1
        # By quantiser: how far what a number stands for, as samples have it, lies nearer to 0 than
        # the number.
        gaps = [torch.where(one, *shrink) for shrink in self._shrink.to(value.device)]
        gap = gaps[0]
        if self._trellis is not None:
            gap = torch.where(quantisers(numbers, self._trellis) > 0, gaps[1] + 0.5, gap)
        return self.tokens_of(torch.where(numbers == ESCAPE, escaped, value - gap * sign), side)

    def pack(self, parts: Parts) -> list[bytes]:
        numbers = parts[0].cpu().numpy().astype("int64")
        kinds = parts[1].cpu().numpy().astype("int64")
        raw = parts[2].cpu().numpy()
        payloads = []
        for k, kind, value in zip(numbers, kinds, raw, strict=True):
            escapes = value[k == ESCAPE].astype("<f4")
            laws, columns = self._laws[0][kind], None
            if self._trellis is not None:
                columns = self._trellis.apart()
                laws = np.where(self._trellis.takes_second(k), self._laws[1][kind], laws)
            words = encode(k, laws, kind, self._odds, columns)
            payloads.append(_COUNT.pack(escapes.size) + escapes.tobytes() + words)
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
        if len(payload) < _COUNT.size:
            raise damaged("a block ends before its number of escapes")
        (count,) = _COUNT.unpack_from(payload)
        start = _COUNT.size + 4 * count
        if len(payload) < start:
            raise damaged("a block ends inside its escapes")
        decoder = Decoder(payload[start:])
        kinds = decoder.kinds(tokens, self._odds)
        numbers = self._read_numbers(decoder, kinds)
        escaped = numbers == ESCAPE
        if int(escaped.sum()) != count:
            raise damaged(f"a block has {count} escaped values and {int(escaped.sum())} escapes")
        raw = np.zeros(numbers.shape, dtype=np.float32)
        raw[escaped] = np.frombuffer(payload, dtype="<f4", count=count, offset=_COUNT.size)
        return numbers, kinds, raw

    def _read_numbers(self, decoder: Decoder, kinds: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Numbers [tokens, rank], group by group where the quantiser of a number hangs on those
        before it.
        """
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
