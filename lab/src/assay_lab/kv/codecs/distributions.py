"""A bank of probability distributions of whole numbers, and range coding under a choice of them.

Law p is a density with location 0 cut at half integers: Gaussian, logistic or Laplace, with one
of 72 scales from 1/16 to about 228, six an octave. A calibration names one distribution per
channel, one byte each, so that tables are small and a channel that another text makes wider still
has a proper tail. Numbers beyond the radius of their distribution are escapes.

The first `DISTRIBUTIONS` are for numbers k of value k, as many again for numbers of the
trellis' quantiser 1, of value k − sgn(k)/2: the same densities, cut at ±1/4 and at ±1, ±2
and so on.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit, ndtr

from assay.errors import AssayError
from assay_lab.kv.codecs.stream import damaged

RADIUS = 1023
SCALES = 72
DISTRIBUTIONS = 3 * SCALES
"""Distributions of a quantiser."""
ESCAPE = RADIUS + 1
"""The number that marks an escape."""
ESCAPE_BITS = 32.0
"""Bits of the value that follows an escape."""
_TAIL = 2.0**-13


@cache
def _distributions() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Probabilities [2 · DISTRIBUTIONS, 2 · RADIUS + 2] of −RADIUS … RADIUS and the escape, and the
    radius of each distribution.
    """
    whole = np.arange(RADIUS + 1.0)
    found = [_cut(whole + 0.5), _cut(np.maximum(whole, 0.25))]
    distributions, radius = (np.concatenate(rows) for rows in zip(*found, strict=True))
    return distributions, radius


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
    """The largest number of each distribution that is no escape [DISTRIBUTIONS]."""
    return _distributions()[1]


@cache
def code_lengths() -> NDArray[np.float32]:
    """Bits [2 · DISTRIBUTIONS, 2 · RADIUS + 3] of −RADIUS … RADIUS and ESCAPE under each
    distribution, an escape's value included.
    """
    distributions, _ = _distributions()
    escape = ESCAPE_BITS - np.log2(distributions[:, -1:])
    with np.errstate(divide="ignore"):
        bits = -np.log2(distributions[:, :-1])
    result: NDArray[np.float32] = np.concatenate([np.minimum(bits, escape), escape], axis=1).astype(
        np.float32
    )
    return result


@cache
def lengths_on(device: str) -> torch.Tensor:
    """`code_lengths`, flat, on a device: 3.5 MB that all coders there share."""
    return torch.from_numpy(code_lengths()).flatten().to(device)


def best_distributions(counts: NDArray[np.float64], quantiser: int = 0) -> NDArray[np.uint8]:
    """The distribution with the shortest code for each channel; `counts` [channels, 2 · RADIUS + 2]
    of numbers and escapes.

    Laws are counted from the first one of the quantiser.
    """
    # Nearly all numbers are small: columns that nothing fell into cost nothing.
    used = np.flatnonzero(counts.any(axis=0))
    own = slice(quantiser * DISTRIBUTIONS, (quantiser + 1) * DISTRIBUTIONS)
    lengths = code_lengths()[own, used].astype("float64")
    best: NDArray[np.uint8] = (counts[:, used] @ lengths.T).argmin(axis=1).astype("uint8")
    return best


def histogram(
    numbers: NDArray[np.int64], chosen: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """How often each of −RADIUS … RADIUS and ESCAPE occurs in each column of [n, channels], of
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
    distributions: NDArray[np.integer[Any]],
    kinds: NDArray[np.int64],
    odds: NDArray[np.float64],
    columns: int | None = None,
) -> bytes:
    """Range-coded words: first `kinds` under `odds`, then `numbers` [tokens, n], each under its
    distribution, distribution by distribution.

    With `columns` so many columns of them after one another, as `Decoder.numbers` will be asked for
    them.
    """
    coder = library().stream.queue.RangeEncoder()
    if odds.size > 1:
        coder.encode(kinds.astype(np.int32), _model(odds))
    width = max(1, numbers.shape[1])
    for first in range(0, width, columns or width):
        some = slice(first, first + (columns or width))
        flat, order, starts = numbers[:, some].ravel(), *_by_distribution(distributions[:, some])
        for distribution, lo, hi in starts:
            radius = int(radii()[distribution])
            words = (np.minimum(flat[order[lo:hi]], radius + 1) + radius).astype(np.int32)
            coder.encode(words, _distribution_model(distribution))
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

    def numbers(self, distributions: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """The next numbers, under their distributions and of the shape of `distributions`."""
        order, starts = _by_distribution(distributions)
        flat = np.empty(distributions.size, dtype=np.int64)
        for distribution, lo, hi in starts:
            radius = int(radii()[distribution])
            found = self._read(_distribution_model(distribution), hi - lo) - radius
            flat[order[lo:hi]] = np.where(found > radius, ESCAPE, found)
        return flat.reshape(distributions.shape)

    def _read(self, model: Any, count: int) -> NDArray[np.int64]:
        try:
            found: NDArray[np.int64] = self._coder.decode(model, count).astype("int64")
        except (AssertionError, ValueError) as error:
            raise damaged("its range code is no code of these tables") from error
        return found


def _by_distribution(
    distributions: NDArray[np.integer[Any]],
) -> tuple[NDArray[np.int64], list[tuple[int, int, int]]]:
    """Positions sorted by distribution, and for each distribution that occurs (distribution, first,
    end) among them.
    """
    flat = distributions.ravel()
    order = np.argsort(flat, kind="stable")
    ends = np.cumsum(np.bincount(flat, minlength=2 * DISTRIBUTIONS))
    starts = np.concatenate([[0], ends[:-1]])
    used = np.flatnonzero(ends > starts)
    return order, [
        (int(distribution), int(starts[distribution]), int(ends[distribution]))
        for distribution in used
    ]


@cache
def _distribution_model(distribution: int) -> Any:
    distributions, radius = _distributions()
    r = int(radius[distribution])
    return _model(
        np.append(
            distributions[distribution, RADIUS - r : RADIUS + r + 1],
            distributions[distribution, -1],
        )
    )


def _model(odds: NDArray[np.float64]) -> Any:
    return library().stream.model.Categorical(
        np.ascontiguousarray(odds / odds.sum()), perfect=False
    )


def library() -> Any:
    """The package `constriction` (Bamler, arXiv:2201.01741); AssayError where it is not
    installed.
    """
    try:
        import constriction
    except ImportError as error:
        raise AssayError(
            "entropy coding needs the package constriction, which is not installed",
            finding_id="kv.package_missing",
            remedy=("pip install 'llm-assay[lab]', or use pca(coding=fixed)"),
        ) from error
    return constriction
