"""Statistics of one tensor, gathered chunk by chunk."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from assay.checkpoint.values.formats import FLOAT_FORMATS, INTEGER_WORDS, to_float

if TYPE_CHECKING:
    import numpy as np

SAMPLES = 16_384
"""Values of a tensor that enter mean and rms, spread evenly."""
HOLE_BYTES = 4096
"""A run of zeros of at least a memory page is looked at more closely."""


@dataclass
class Statistics:
    """What was seen of one tensor. `nan`, `inf`, `zeros`, `denormals` are exact counts; mean and rms are sampled."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    denormals: int = 0
    absmax: float = 0.0
    constant: bool = True
    first_bad: int | None = None
    hole: tuple[int, int] | None = None
    """(first element, length) of the longest run of zeros, if it spans a page."""
    sample: Any = field(default=None, repr=False)
    fingerprint: str = ""
    _first: Any = field(default=None, repr=False)
    _samples: list[Any] = field(default_factory=list, repr=False)
    _hash: Any = field(default=None, repr=False)

    def add(self, data: memoryview) -> None:
        """Take in the next bytes (whole elements)."""
        import numpy as np

        form = FLOAT_FORMATS.get(self.dtype)
        word = form.word if form else INTEGER_WORDS.get(self.dtype, "u1")
        words = np.frombuffer(data, dtype=word)
        if not words.size:
            return
        if self._first is None:
            self._first = words[0].copy()
        if self.constant:
            self.constant = bool(words.min() == self._first and words.max() == self._first)
        nonzero = int(np.count_nonzero(words)) if form is None else self._floats(words, form)
        zeros = words.size - nonzero
        if zeros * words.itemsize >= HOLE_BYTES:
            self._find_hole(words, form.magnitude if form else None)
        self.zeros += zeros
        self._keep(words)
        self.elements += words.size

    def _floats(self, words: np.ndarray[Any, Any], form: Any) -> int:
        import numpy as np

        magnitude = words & words.dtype.type(form.magnitude)
        highest = int(magnitude.max())
        nonzero = int(np.count_nonzero(magnitude))
        if form.normal:
            small = int(np.count_nonzero(magnitude < form.normal))
            self.denormals += small - (words.size - nonzero)
        if highest > form.finite:
            bad = magnitude > form.finite
            infinite = int(np.count_nonzero(magnitude == form.infinity)) if form.infinity else 0
            self.inf += infinite
            self.nan += int(np.count_nonzero(bad)) - infinite
            if self.first_bad is None:
                self.first_bad = self.elements + int(bad.argmax())
            finite = magnitude[~bad]
            highest = int(finite.max()) if finite.size else 0
        value = float(to_float(np.array([highest], words.dtype), self.dtype)[0])
        self.absmax = max(self.absmax, value)
        return nonzero

    def _find_hole(self, words: np.ndarray[Any, Any], mask: int | None) -> None:
        import numpy as np

        values = words if mask is None else words & words.dtype.type(mask)
        edges = np.flatnonzero(values)
        bounds = np.concatenate(([-1], edges, [words.size]))
        gaps = np.diff(bounds) - 1
        longest = int(gaps.argmax())
        length = int(gaps[longest])
        if length * words.itemsize >= HOLE_BYTES and (self.hole is None or length > self.hole[1]):
            self.hole = (self.elements + int(bounds[longest]) + 1, length)

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
        import numpy as np

        words = np.concatenate(self._samples) if self._samples else np.zeros(0, "u1")
        if self.dtype in FLOAT_FORMATS:
            self.sample = to_float(words, self.dtype)
        else:
            self.sample = words.astype(np.float64)
        self.sample = self.sample[np.isfinite(self.sample)]
        self.fingerprint = self._hash.hexdigest() if self._hash else ""
        self._samples = []

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
