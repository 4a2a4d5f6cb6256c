"""Statistics of one tensor, gathered chunk by chunk."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from assay.checkpoint.values.floats import (
    FLOAT_FORMATS,
    INTEGER_WORDS,
    FloatFormat,
    largest_magnitude,
    to_float,
)
from assay.checkpoint.values.holes import Holes

SAMPLES = 16_384
"""Values of a tensor that enter mean and rms, spread evenly."""


@dataclass
class Statistics:
    """What was seen of one tensor.

    `nan`, `inf`, `absmax`, `constant`, `all_zero` and `hole` are exact; mean, rms and the shares
    come from the sample.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int = 0
    nan: int = 0
    inf: int = 0
    absmax: float = 0.0
    constant: bool = True
    all_zero: bool = True
    denormal_share: float = 0.0
    first_bad: int | None = None
    sample: Any = field(default=None, repr=False)
    fingerprint: str = ""
    _first: Any = field(default=None, repr=False)
    _holes: Holes = field(default_factory=Holes, repr=False)
    _samples: list[Any] = field(default_factory=list, repr=False)
    _hash: Any = field(default=None, repr=False)

    def add(self, data: memoryview) -> None:
        """Take in the next bytes (whole elements)."""
        form = FLOAT_FORMATS.get(self.dtype)
        word = form.word if form else INTEGER_WORDS.get(self.dtype, "u1")
        words = np.frombuffer(data, dtype=word)
        if not words.size:
            return
        if self._first is None:
            self._first = words[0].copy()
        if self.constant:
            self.constant = bool(words.min() == self._first == words.max())
        if form is not None:
            largest = largest_magnitude(words, form)
            self.all_zero = self.all_zero and largest == 0
            if largest > form.finite:
                largest = self._no_numbers(words, form)
            value = float(to_float(np.array([largest], words.dtype), self.dtype)[0])
            self.absmax = max(self.absmax, value)
        else:
            self.all_zero = self.constant and bool(self._first == 0)
        self._holes.add(words, self.elements)
        self._keep(words)
        self.elements += words.size

    def _no_numbers(self, words: np.ndarray[Any, Any], form: FloatFormat) -> int:
        """Count Inf and NaN; returns the largest pattern of the others."""
        magnitude = words & words.dtype.type(form.magnitude)
        bad = magnitude > form.finite
        infinite = int(np.count_nonzero(magnitude == form.infinity)) if form.infinity else 0
        self.inf += infinite
        self.nan += int(np.count_nonzero(bad)) - infinite
        if self.first_bad is None:
            self.first_bad = self.elements + int(bad.argmax())
        finite = magnitude[~bad]
        return int(finite.max()) if finite.size else 0

    def _keep(self, words: np.ndarray[Any, Any]) -> None:
        total = 1
        for dimension in self.shape:
            total *= dimension
        stride = max(total // SAMPLES, 1)
        self._samples.append(words[(-self.elements) % stride :: stride].copy())
        if self._hash is None:
            self._hash = hashlib.blake2b(digest_size=16)
        self._hash.update(self._samples[-1].tobytes())

    def finish(self) -> None:
        """Close the statistics once all bytes were added."""
        words = np.concatenate(self._samples) if self._samples else np.zeros(0, "u1")
        form = FLOAT_FORMATS.get(self.dtype)
        if form is not None:
            self.sample = to_float(words, self.dtype)
            magnitude = words & words.dtype.type(form.magnitude)
            small = (magnitude > 0) & (magnitude < form.normal)
            self.denormal_share = float(small.mean()) if words.size else 0.0
        else:
            self.sample = words.astype(np.float64)
        self.sample = self.sample[np.isfinite(self.sample)]
        self.fingerprint = self._hash.hexdigest() if self._hash else ""
        self._samples = []

    @property
    def hole(self) -> tuple[int, int] | None:
        """(first element, length) of the longest run of zeros, if it spans a page."""
        return self._holes.longest

    @property
    def mean(self) -> float:
        """Mean of the sample."""
        return float(self.sample.mean()) if self.sample.size else 0.0

    @property
    def rms(self) -> float:
        """Root mean square of the sample."""
        return float((self.sample**2).mean() ** 0.5) if self.sample.size else 0.0

    @property
    def negative_share(self) -> float:
        """Share of negative values in the sample."""
        return float((self.sample < 0).mean()) if self.sample.size else 0.0
