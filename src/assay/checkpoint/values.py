"""Stream every tensor of the local files once and gather its statistics, several files' parts at a
time.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from assay.checkpoint import SHOWN, found, plural, some, warned
from assay.checkpoint.safetensors import DTYPE_BITS, FLOATS, Tensor, layer_index, layer_role
from assay.verdict import Finding

# Bit patterns of stored floats: enough to find NaN, Inf, zeros and the largest value by integer
# comparison.


@dataclass(frozen=True)
class FloatFormat:
    """`magnitude` masks the sign off; patterns above `finite` are Inf or NaN, `infinity` is Inf
    itself (0: none).

    Nonzero magnitudes below `normal` are denormal. Magnitudes order like the values, so integers
    can be compared.
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

    Read as unsigned, negative floats come last and order by magnitude; read as signed, the others
    do. Two maxima of integers run several times as fast as any operation that writes a result.
    """
    highest, top = int(words.max()), 1 << (8 * words.itemsize - 1)
    if form.magnitude >= top:  # a type without a sign
        return highest
    negative = highest - top if highest >= top else 0
    return max(negative, int(words.view(f"<i{words.itemsize}").max()), 0)


INTEGER_WORDS: Mapping[str, str] = {
    "I8": "i1",
    "U8": "u1",
    "I16": "<i2",
    "U16": "<u2",
    "I32": "<i4",
    "U32": "<u4",
    "I64": "<i8",
    "U64": "<u8",
}


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
    """Eight-bit floats: value = ± (1 + m/2^mantissa) · 2^(e − bias), without the hidden one where e
    is zero.
    """
    word = words.astype(np.int64)
    exponent, fraction = (word & 0x7F) >> mantissa, (word & ((1 << mantissa) - 1)) / (1 << mantissa)
    value = np.where(
        exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * np.exp2(exponent - bias)
    )
    special = (word & 0x7F) == 0x7F if mantissa == 3 else exponent == 31
    result: np.ndarray[Any, Any] = np.where(special, np.nan, np.where(word & 0x80, -value, value))
    return result


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

        A hole covers at least two neighbours among the words at every half page: only what lies
        between two zeros there is looked at whole.
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


# Statistics of one tensor, gathered chunk by chunk.

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


_local = threading.local()
CHUNK = 1 << 20
"""Bytes read at once: stays in the core's own cache while they are looked at several times."""


def scan(
    jobs: Iterable[tuple[Tensor, Path]],
    progress: Callable[[int], None] = lambda count: None,
    workers: int | None = None,
) -> tuple[list[Statistics], list[tuple[str, str]]]:
    """Statistics of each (tensor, file), and (tensor, reason) for those that could not be read to
    their end.
    """
    ordered = sorted(jobs, key=lambda job: -job[0].nbytes)

    def one(job: tuple[Tensor, Path]) -> Statistics | tuple[str, str]:
        tensor, path = job
        try:
            return scan_tensor(tensor, path, progress)
        except OSError as error:
            return tensor.name, error.strerror or str(error)

    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        done = list(pool.map(one, ordered))
    return [d for d in done if isinstance(d, Statistics)], [
        d for d in done if not isinstance(d, Statistics)
    ]


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


# What the statistics say: values that are no numbers, constant, holed, denormal, or of another
# scale.

PEER_RATIO = 64.0
"""A weight whose rms is this far from the median of its peers in other layers was scaled, not
trained.
"""
MODEL_RATIO = 256.0
"""The same against all matrices of the model, where a role has fewer than three layers."""
OUTLIER, OUTLIER_RATIO = 1e3, 1e4
"""A largest value above both was damaged: trained weights reach a few hundred times their rms,
seldom more.
"""

_ZERO_POINTS = (
    "qzeros",
    "g_idx",
    "weight_zero_point",
    "weight_shape",
    "zero",
    "weight_g_idx",
    "zeros",
)
_SCALES = re.compile(r"(scale|scales|scale_inv|absmax|SCB|scale_2)$")
_NORM = re.compile(r"(norm|layernorm|ln_\w+)\.(weight|bias)$")
_EMBEDDING = re.compile(r"(embed\w*|lm_head|wte|shared_head\.head|token_embd|output)\.weight$")
_STATE = re.compile(r"(A_log|dt_bias|D|inv_freq|conv1d\.\w+|e_score_correction_bias|bias|sinks)$")


def is_norm(name: str) -> bool:
    """Whether a tensor is a normalisation weight."""
    return bool(_NORM.search(name))


def is_scale(name: str) -> bool:
    """Whether a tensor holds quantisation scales."""
    return bool(_SCALES.search(name))


def judge_values(
    statistics: Sequence[Statistics], signed_scales: bool = False
) -> Iterator[Finding]:
    """Findings on values. `signed_scales` allows negative scales (AutoRound's symmetric scheme uses
    them).
    """
    by_name = {s.name: s for s in statistics}
    yield from _nonfinite(statistics)
    yield from _constant(statistics)
    yield from _holes(statistics)
    yield from _denormal(statistics)
    yield from _scaled(by_name)
    yield from _scales(statistics, signed_scales)


def _nonfinite(statistics: Sequence[Statistics]) -> Iterator[Finding]:
    bad = [s for s in statistics if s.nan or s.inf]
    if not bad:
        return
    worst = max(bad, key=lambda s: s.nan + s.inf)
    row = ""
    if worst.first_bad is not None and len(worst.shape) > 1:
        row = f", first in row {worst.first_bad // math.prod(worst.shape[1:])}"
    title = f"{plural(len(bad), 'tensor')} with values that are no numbers, worst {worst.name}: "
    title += f"{worst.nan} NaN, {worst.inf} Inf of {worst.elements}{row}"
    causes = [
        "an overflow when converting to float16",
        "bytes damaged on disk",
        "a diverged training or calibration",
    ]
    evidence = {s.name: {"nan": s.nan, "inf": s.inf} for s in bad[:SHOWN]}
    detail = (
        "One such value turns whole logits into NaN, which engines print as token 0, often '!'."
    )
    yield found("nonfinite", title, detail=detail, causes=causes, tensors=evidence, count=len(bad))


def _constant(statistics: Sequence[Statistics]) -> Iterator[Finding]:
    flat = [s for s in statistics if s.constant and s.elements > 16 and not _may_be_constant(s)]
    zero = [s.name for s in flat if s.all_zero]
    other = [s.name for s in flat if not s.all_zero and not s.nan]
    if zero:
        title = f"{plural(len(zero), 'tensor')} all zero: {some(zero)}"
        causes = [
            "the file has a hole where the bytes should be",
            "the weight was never filled before saving",
        ]
        yield found("tensor_constant", title, causes=causes, tensors=zero[:SHOWN], count=len(zero))
    if other:
        title = f"{plural(len(other), 'tensor')} with one value throughout: {some(other)}"
        causes = ["the weight was never filled before saving"]
        yield found(
            "tensor_constant", title, causes=causes, tensors=other[:SHOWN], count=len(other)
        )


def _may_be_constant(s: Statistics) -> bool:
    """Zero points, biases, scalars and states may; so may norms of ones (zeros are judged here)."""
    if s.name.endswith(_ZERO_POINTS) or _STATE.search(s.name) or is_scale(s.name):
        return True
    if is_norm(s.name):
        return not s.all_zero or s.name.endswith(".bias")
    return len(s.shape) < 2


def _holes(statistics: Sequence[Statistics]) -> Iterator[Finding]:
    holed: dict[str, tuple[int, int]] = {}
    rows: dict[str, tuple[int, int]] = {}
    for s in statistics:
        if (
            s.hole is None
            or s.constant
            or len(s.shape) < 2
            or s.name.endswith(_ZERO_POINTS)
            or is_scale(s.name)
        ):
            continue
        start, length = s.hole
        width = math.prod(s.shape[1:])
        if not _EMBEDDING.search(s.name) or start % width or (start + length) % width:
            if not (_EMBEDDING.search(s.name) and start + length >= s.elements - width):
                holed[s.name] = s.hole
        elif start + length < s.elements:  # unused rows at the end only pad the vocabulary
            rows[s.name] = s.hole
    if holed:
        name, (start, length) = next(iter(holed.items()))
        title = (
            f"{plural(len(holed), 'tensor')} with a hole of zeros, first {name}: {length} values"
            f" from {start} on"
        )
        causes = ["a block of the file was never written (an interrupted download or copy)"]
        remedies = ["download the shard again"]
        evidence = {n: {"first": a, "length": b} for n, (a, b) in list(holed.items())[:SHOWN]}
        yield found(
            "tensor_constant",
            title,
            causes=causes,
            remedies=remedies,
            tensors=evidence,
            count=len(holed),
        )
    if rows:
        title = f"rows of zeros in the middle of {some(rows)}"
        yield warned(
            "tensor_constant",
            title,
            causes=["unused tokens, or a hole that fits whole rows"],
            tensors=rows,
        )


def _denormal(statistics: Sequence[Statistics]) -> Iterator[Finding]:
    def flooded(s: Statistics) -> bool:
        # float16 reaches only 6e-5 before it goes denormal, where small honest weights may lie.
        limit = {"F16": 0.5, "BF16": 0.01, "F32": 0.01, "F64": 0.01}.get(s.dtype)
        return limit is not None and s.elements > 64 and s.denormal_share > limit

    names = [s.name for s in statistics if flooded(s)]
    if names:
        title = f"{plural(len(names), 'tensor')} flooded with denormal values: {some(names)}"
        causes = ["bytes read as another type", "a scale was applied twice"]
        yield found("tensor_scale", title, causes=causes, tensors=names[:SHOWN], count=len(names))


def _scaled(by_name: Mapping[str, Statistics]) -> Iterator[Finding]:
    matrices = {
        n: s
        for n, s in by_name.items()
        if s.dtype in FLOATS
        and len(s.shape) >= 2
        and not s.constant
        and not is_scale(n)
        and not _STATE.search(n)
        and s.rms > 0
    }
    roles: dict[str, list[float]] = defaultdict(list)
    for name, s in matrices.items():
        roles[layer_role(name)].append(s.rms)
    overall = median(s.rms for s in matrices.values()) if matrices else 0.0
    strange: dict[str, str] = {}
    for name, s in matrices.items():
        peers = roles[layer_role(name)]
        usual, limit = (median(peers), PEER_RATIO) if len(peers) >= 3 else (overall, MODEL_RATIO)
        ratio = s.rms / usual
        if len(matrices) >= 3 and not 1 / limit < ratio < limit:
            strange[name] = f"its rms {s.rms:.3g} is {ratio:.3g} times that of its peers"
        elif s.absmax > OUTLIER and s.absmax > OUTLIER_RATIO * s.rms:
            strange[name] = (
                f"its largest value {s.absmax:.3g} is {s.absmax / s.rms:.3g} times its rms"
            )
    for name, s in by_name.items():
        if is_norm(name) and s.absmax > 1e5:
            strange[name] = f"its largest value is {s.absmax:.3g}"
    if strange:
        name, reason = next(iter(strange.items()))
        title = f"{plural(len(strange), 'tensor')} of another scale, first {name}: {reason}"
        causes = ["a flipped exponent bit", "a quantisation scale applied twice or not at all"]
        evidence = dict(list(strange.items())[:SHOWN])
        yield found("tensor_scale", title, causes=causes, tensors=evidence, count=len(strange))


def _scales(statistics: Sequence[Statistics], signed: bool) -> Iterator[Finding]:
    wrong: dict[str, str] = {}
    for s in statistics:
        if not is_scale(s.name) or s.dtype not in {*FLOATS, "F8_E4M3"} or not s.elements:
            continue
        if s.all_zero:
            wrong[s.name] = "all zero"
        elif s.negative_share and not signed:
            wrong[s.name] = f"{s.negative_share:.1%} negative"
        elif s.absmax > 1e5 or (s.rms and s.elements > 64 and s.absmax > 1e5 * float(_typical(s))):
            wrong[s.name] = f"as large as {s.absmax:.3g}"
    if wrong:
        name, reason = next(iter(wrong.items()))
        title = f"{plural(len(wrong), 'scale tensor')} out of range, first {name}: {reason}"
        causes = ["scales were never filled or were damaged"]
        yield found(
            "tensor_scale",
            title,
            causes=causes,
            tensors=dict(list(wrong.items())[:SHOWN]),
            count=len(wrong),
        )


def _typical(s: Statistics) -> float:
    return float(np.median(np.abs(s.sample))) or s.rms


# Norm weights stored as `w` where the architecture computes `1 + w`, and the reverse.

ONE_PLUS = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "paligemma",
        "vaultgemma",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
    }
)
"""Architectures whose RMS norm multiplies by 1 + w; the gated norm of their linear attention does
not.
"""
PLAIN = frozenset(
    {
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "deepseek_v3",
        "glm4_moe",
        "mimo",
        "smollm3",
        "olmo2",
        "phi3",
        "granite",
    }
)

# What a norm multiplies by is positive nearly everywhere, and below 1 in some channel. Measured
# shares of norms: more than a fifth negative: SmolLM2 2 %, with 1 subtracted 98 %; under a
# twentieth negative: Gemma 3 41 %, with 1 added 98 %. Means tell nothing: SmolLM2's lie at 0.25,
# Gemma 3's between -0.4 and 323.
NEGATIVE, POSITIVE, MOST = 0.2, 0.05, 0.8
NEGATIVE_IN_HEAD = 0.01
"""In place of NEGATIVE for an EAGLE-3 head: its norms start at 1 and stay near it, so that w - 1 is
near 0, of either sign.
"""


def check_norms(statistics: Sequence[Statistics], model_type: str) -> Iterator[Finding]:
    """Backbone and draft head are judged apart: a head is often converted by another tool."""
    if model_type not in ONE_PLUS | PLAIN:
        return
    norms = [
        s
        for s in statistics
        if is_norm(s.name) and s.name.endswith("weight") and "linear_attn" not in s.name
    ]
    norms = [s for s in norms if "visual" not in s.name and "vision" not in s.name]
    for part, group in (
        ("the model", [s for s in norms if "mtp" not in s.name]),
        ("the multi-token-prediction head", [s for s in norms if "mtp" in s.name]),
    ):
        yield from _group(part, group, model_type)


def _group(part: str, norms: Sequence[Statistics], model_type: str) -> Iterator[Finding]:
    if len(norms) < 2:
        return
    if model_type in PLAIN:
        few = NEGATIVE_IN_HEAD if any("midlayer." in s.name for s in norms) else NEGATIVE
        odd = [s for s in norms if s.all_zero or s.negative_share > few]
        if len(odd) * 2 > len(norms):
            title = (
                f"norm weights of {part} are stored as w - 1, but {model_type} multiplies by w as"
                " it is"
            )
            yield _finding(title, odd, "they come from a format that stores w - 1; add 1 to them")
        return
    odd = [s for s in norms if not s.all_zero and s.negative_share < POSITIVE]
    if len(odd) > MOST * len(norms):
        title = f"norm weights of {part} are stored as 1 + w, but {model_type} adds the 1 itself"
        reason = "a converter added the 1 already; subtract it"
        if all(s.constant for s in odd):
            yield warned(
                "norm_convention",
                title + " (all of them constant)",
                causes=[reason],
                count=len(odd),
            )
        else:
            yield _finding(title, odd, reason)


def _finding(title: str, odd: Sequence[Statistics], cause: str) -> Finding:
    detail = (
        "The output is wrong everywhere, though every tensor is present and of the right shape."
    )
    references = ["https://github.com/youssofal/MTPLX/issues/176"]
    means = {s.name: round(s.mean, 4) for s in odd[:SHOWN]}
    title = f"{title} ({plural(len(odd), 'tensor')})"
    return found(
        "norm_convention", title, detail=detail, causes=[cause], references=references, means=means
    )


# Tensors that are bytewise equal and should not be, and a stored head that differs from its tied
# embedding.

SameBytes = Callable[[str, str], bool]
_SHARED = ("embed_tokens", "lm_head", "shared_head", "wte", "token_embd", "output.weight")


def check_duplicates(statistics: Sequence[Statistics], same: SameBytes) -> Iterator[Finding]:
    """Matrices of one role that are equal in two layers; whole layers that repeat are only noted."""
    groups: dict[tuple[str, str, tuple[int, ...], str], list[Statistics]] = defaultdict(list)
    per_layer: dict[int, set[str]] = defaultdict(set)
    for s in statistics:
        if len(s.shape) < 2 or s.constant or any(part in s.name for part in _SHARED):
            continue
        groups[s.fingerprint, s.dtype, s.shape, layer_role(s.name)].append(s)
        index = layer_index(s.name)
        if index is not None:
            per_layer[index].add(layer_role(s.name))
    pairs = [
        (first.name, other.name)
        for (_, _, _, _), (first, *others) in groups.items()
        for other in others
        if not _packed_side(first.name) and same(first.name, other.name)
    ]
    copied: dict[tuple[int | None, int | None], list[tuple[str, str]]] = defaultdict(list)
    for pair in pairs:
        copied[layer_index(pair[0]), layer_index(pair[1])].append(pair)
    single = [
        pair
        for (a, b), found_pairs in copied.items()
        for pair in found_pairs
        if a is None or b is None or a == b or len(found_pairs) < 0.8 * len(per_layer[a])
    ]
    if single:
        title = f"{plural(len(single), 'tensor')} equal to another that it should differ from, "
        title += f"first {single[0][1]} and {single[0][0]}"
        causes = ["a conversion wrote one tensor under two names"]
        yield found(
            "tensor_duplicate", title, causes=causes, pairs=single[:SHOWN], count=len(single)
        )
    whole = [pair for pair in pairs if pair not in single]
    if whole:
        layers = sorted({(layer_index(a), layer_index(b)) for a, b in whole}, key=str)
        title = (
            f"{plural(len(layers), 'pair')} of whole layers are equal, first {layers[0][0]} and"
            f" {layers[0][1]}"
        )
        yield warned(
            "tensor_duplicate",
            title,
            causes=["a model grown by repeating layers, or a copied layer"],
            layers=layers,
        )


def _packed_side(name: str) -> bool:
    return name.endswith(
        ("qzeros", "g_idx", "weight_zero_point", "scales", "weight_scale", "weight_scale_inv")
    )


def check_tied(
    names: Mapping[str, Statistics], embedding: str, head: str, tied: bool, same: SameBytes
) -> Iterator[Finding]:
    """A head that is stored although it is tied must equal the embedding: engines drop one of the
    two.
    """
    if not tied or embedding not in names or head not in names:
        return
    one, two = names[embedding], names[head]
    if (
        one.shape == two.shape
        and one.dtype == two.dtype
        and not (one.fingerprint == two.fingerprint and same(embedding, head))
    ):
        title = f"tie_word_embeddings is true, but {head} is stored and differs from {embedding}"
        detail = "Engines that tie drop the stored head; others use it: they answer differently."
        yield found(
            "config_conflict",
            title,
            detail=detail,
            causes=["the flag was lost or set when fine-tuning"],
        )
