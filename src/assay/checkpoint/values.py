"""Stream every tensor of the local files once and gather its statistics, several files' parts at a time."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from assay.checkpoint.safetensors import DTYPE_BITS, Tensor

# -----------------------------------------------------------------------------
# Bit patterns of stored floats: enough to find NaN, Inf, zeros and the largest value by integer comparison.


@dataclass(frozen=True)
class FloatFormat:
    """`magnitude` masks the sign off; patterns above `finite` are Inf or NaN, `infinity` is Inf itself (0: none).

    Nonzero magnitudes below `normal` are denormal. Magnitudes order like the values, so integers can be compared.
    """

    word: str
    magnitude: int
    finite: int
    infinity: int
    normal: int


FLOAT_FORMATS: Mapping[str, FloatFormat] = {
    "F64": FloatFormat(
        "<u8", (1 << 63) - 1, 0x7FEF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000, 0x0010_0000_0000_0000
    ),
    "F32": FloatFormat("<u4", 0x7FFF_FFFF, 0x7F7F_FFFF, 0x7F80_0000, 0x0080_0000),
    "BF16": FloatFormat("<u2", 0x7FFF, 0x7F7F, 0x7F80, 0x0080),
    "F16": FloatFormat("<u2", 0x7FFF, 0x7BFF, 0x7C00, 0x0400),
    "F8_E4M3": FloatFormat("u1", 0x7F, 0x7E, 0, 0x08),
    "F8_E5M2": FloatFormat("u1", 0x7F, 0x7B, 0x7C, 0x04),
    "F8_E8M0": FloatFormat("u1", 0xFF, 0xFE, 0, 0),
}


def largest_magnitude(words: np.ndarray[Any, Any], form: FloatFormat) -> int:
    """The largest pattern without its sign among unsigned words, which must not be none.

    Read as unsigned, negative floats come last and order by magnitude; read as signed, the others do. Two maxima of
    integers run several times as fast as any operation that writes a result.
    """
    highest, top = int(words.max()), 1 << (8 * words.itemsize - 1)
    if form.magnitude >= top:  # a type without a sign
        return highest
    negative = highest - top if highest >= top else 0
    return max(negative, int(words.view(f"<i{words.itemsize}").max()), 0)


INTEGER_WORDS: Mapping[str, str] = {
    "I8": "i1", "U8": "u1", "I16": "<i2", "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8",
}  # fmt: skip


def to_float(words: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Stored words as float64 (for samples; Inf and NaN stay what they are)."""
    if dtype == "BF16":
        return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype in _VIEWS:
        return words.view(_VIEWS[dtype]).astype(np.float64)
    if dtype == "F8_E8M0":
        powers: np.ndarray[Any, Any] = np.exp2(words.astype(np.float64) - 127)
        return powers
    return _small_float(words, *((3, 7) if dtype == "F8_E4M3" else (2, 15)))


_VIEWS = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}


def _small_float(words: np.ndarray[Any, Any], mantissa: int, bias: int) -> np.ndarray[Any, Any]:
    """Eight-bit floats: value = ± (1 + m/2^mantissa) · 2^(e − bias), without the hidden one where e is zero."""
    word = words.astype(np.int64)
    exponent, fraction = (word & 0x7F) >> mantissa, (word & ((1 << mantissa) - 1)) / (1 << mantissa)
    value = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * np.exp2(exponent - bias))
    special = (word & 0x7F) == 0x7F if mantissa == 3 else exponent == 31
    result: np.ndarray[Any, Any] = np.where(special, np.nan, np.where(word & 0x80, -value, value))
    return result


# -----------------------------------------------------------------------------
# Runs of zeros long enough to be a part of the file that was never written.

PAGE_BYTES = 4096
"""A run of zeros of at least a memory page is a hole."""
_BLOCK = PAGE_BYTES // 2
"""Every such run covers at least one whole block of half that size, wherever it begins."""


@dataclass
class Holes:
    """The longest run of zero words seen so far, chunk by chunk."""

    longest: tuple[int, int] | None = None
    """(first element, length), None while no run spans a page."""
    _open: int = 0
    """Zeros at the end of the last chunk, which the next may continue."""

    def add(self, words: np.ndarray[Any, Any], start: int) -> None:
        """Look at the next chunk, whose first element has the index `start`.

        A hole covers at least two neighbours among the words at every half page: only what lies between two zeros
        there is looked at whole.
        """
        before, self._open = self._open, _zeros_at(words[::-1])
        if self._open == words.size:
            self._open += before
            self._keep(start - before, self._open, words.itemsize)
            return
        if before or words[0] == 0:
            self._keep(start - before, before + _zeros_at(words), words.itemsize)
        step = _BLOCK // words.itemsize
        zero = words[::step] == 0
        first, count = _longest(_whole_blocks(words, zero[:-1] & zero[1:], step))
        if count:
            low, high = first * step, (first + count) * step
            low -= _zeros_at(words[max(low - step, 0) : low][::-1])
            high += _zeros_at(words[high : high + step])
            self._keep(start + low, high - low, words.itemsize)

    def _keep(self, start: int, length: int, width: int) -> None:
        if length * width >= PAGE_BYTES and (self.longest is None or length > self.longest[1]):
            self.longest = (start, length)


def _whole_blocks(
    words: np.ndarray[Any, Any], candidates: np.ndarray[Any, Any], step: int
) -> np.ndarray[Any, Any]:
    """Those of the candidate blocks that hold nothing but zeros."""
    at = np.flatnonzero(candidates)
    flags = np.zeros_like(candidates)
    if at.size:
        flags[at] = ~words[: candidates.size * step].reshape(-1, step)[at].any(axis=1)
    return flags


def _zeros_at(words: np.ndarray[Any, Any]) -> int:
    """How many zeros the array begins with; windows that double find a near end soon."""
    done, window = 0, 64
    while done < words.size:
        present = words[done : done + window] != 0
        index = int(present.argmax())
        if present[index]:
            return done + index
        done, window = done + present.size, 2 * window
    return done


def _longest(flags: np.ndarray[Any, Any]) -> tuple[int, int]:
    """(first index, length) of the longest run of true flags."""
    if not flags.any():
        return 0, 0
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    lengths = edges[1::2] - edges[::2]
    at = int(lengths.argmax())
    return int(edges[2 * at]), int(lengths[at])


# -----------------------------------------------------------------------------
# Statistics of one tensor, gathered chunk by chunk.

SAMPLES = 16_384
"""Values of a tensor that enter mean and rms, spread evenly."""


@dataclass
class Statistics:
    """What was seen of one tensor.

    `nan`, `inf`, `absmax`, `constant`, `all_zero` and `hole` are exact; mean, rms and the shares come from the sample.
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


# -----------------------------------------------------------------------------

_local = threading.local()
CHUNK = 1 << 20
"""Bytes read at once: stays in the core's own cache while they are looked at several times."""


def scan(
    jobs: Iterable[tuple[Tensor, Path]],
    progress: Callable[[int], None] = lambda count: None,
    workers: int | None = None,
) -> tuple[list[Statistics], list[tuple[str, str]]]:
    """Statistics of each (tensor, file), and (tensor, reason) for those that could not be read to their end."""
    ordered = sorted(jobs, key=lambda job: -job[0].nbytes)

    def one(job: tuple[Tensor, Path]) -> Statistics | tuple[str, str]:
        tensor, path = job
        try:
            return scan_tensor(tensor, path, progress)
        except OSError as error:
            return tensor.name, error.strerror or str(error)

    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        done = list(pool.map(one, ordered))
    return [d for d in done if isinstance(d, Statistics)], [d for d in done if not isinstance(d, Statistics)]


def _buffer() -> memoryview:
    """One chunk of memory for each thread."""
    if not hasattr(_local, "chunk"):
        _local.chunk = memoryview(bytearray(CHUNK))
    chunk: memoryview = _local.chunk
    return chunk


def scan_tensor(
    tensor: Tensor, path: Path, progress: Callable[[int], None] = lambda count: None
) -> Statistics:
    """Statistics of one tensor. Raises OSError if the file ends before the tensor does."""
    statistics = Statistics(tensor.name, tensor.dtype, tensor.shape)
    width = max(DTYPE_BITS.get(tensor.dtype, 8) // 8, 1)
    view = _buffer()
    with path.open("rb", buffering=0) as stream:
        stream.seek(tensor.start)
        left = tensor.nbytes
        while left:
            count = stream.readinto(view[: min(left, CHUNK)])
            if not count:
                raise OSError(0, f"the file ends {left} bytes before the tensor does")
            whole = count // width * width
            if whole != count:
                stream.seek(whole - count, os.SEEK_CUR)
            if not whole:
                raise OSError(0, "the file ends inside an element")
            statistics.add(view[:whole])
            progress(whole)
            left -= whole
    statistics.finish()
    return statistics
