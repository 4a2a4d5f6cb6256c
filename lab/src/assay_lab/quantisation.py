"""Scalar quantisation: levels, packed integers, the rotation before them, and weights that are
rounded by it.

Lloyd-Max quantisers (Lloyd 1957, Max 1960): the levels with the least squared error for a
distribution.

Levels c₁ < … < c_N satisfy c_i = E[X | t_{i−1} < X ≤ t_i] with t_i = (c_i + c_{i+1}) / 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import solve_banded
from scipy.special import ndtr, ndtri

from assay.errors import UsageError

Array = NDArray[np.float64]


@cache
def gaussian_levels(levels: int) -> Array:
    """The levels for N(0, 1), float64 [levels], ascending and symmetric; 1 ≤ levels ≤ 1024, exact
    to 1e-10.

    Newton's method on c − E[X | cell(c)] = 0, whose Jacobian is tridiagonal, from the companding
    start √3 Φ⁻¹((i + ½)/N) (Panter and Dite 1951).
    """
    if not 1 <= levels <= 1024:
        raise UsageError(f"{levels} levels: 1 to 1024 are possible", finding_id="kv.levels")
    c = np.sqrt(3.0) * ndtri((np.arange(levels) + 0.5) / levels)
    for _ in range(200):
        mean, left, right = _cell_means(c)
        residual = c - mean
        # A boundary moves by half of what a level next to it moves.
        bands = np.zeros((3, levels))
        bands[1] = 1.0 - 0.5 * (left + right)
        bands[0, 1:] = -0.5 * right[:-1]
        bands[2, :-1] = -0.5 * left[1:]
        step = solve_banded((1, 1), bands, residual) if levels > 1 else residual
        limit = np.min(np.diff(c), initial=np.inf) / 2
        c = c - np.clip(step, -limit, limit)
        if np.abs(step).max() < 1e-13:
            break
    result: Array = (c - c[::-1]) / 2
    result.setflags(write=False)
    return result


def empirical_levels(samples: NDArray[np.floating], levels: int, *, iterations: int = 200) -> Array:
    """The levels for a sample [n], float64, by Lloyd's iteration from the sample's own quantiles.

    Sums over sorted values make an iteration cost N log n. A cell that is empty keeps its level.
    Stops when no level moves by more than 1e-9 of the sample's deviation.
    """
    values = np.sort(np.asarray(samples, dtype=np.float64).ravel())
    if values.size == 0:
        raise UsageError("levels cannot be fitted to no values", finding_id="kv.levels")
    sums = np.concatenate([[0.0], np.cumsum(values)])
    c = np.quantile(values, (np.arange(levels) + 0.5) / levels)
    tolerance = 1e-9 * float(values.std())
    for _ in range(iterations):
        edges = np.searchsorted(values, (c[1:] + c[:-1]) / 2)
        edges = np.concatenate([[0], edges, [values.size]])
        counts = np.diff(edges)
        moved = np.where(
            counts > 0, (sums[edges[1:]] - sums[edges[:-1]]) / np.maximum(counts, 1), c
        )
        done = np.abs(moved - c).max() <= tolerance
        c = moved
        if done:
            break
    return c


def mixed_widths(bits: float, count: int) -> tuple[int, int]:
    """How `count` values get `bits` bits on average: (width of the narrow ones, how many get one
    bit more).

    UsageError unless 1 ≤ bits ≤ 10.
    """
    if not 1 <= bits <= 10:
        raise UsageError(f"bits={bits:g}: 1 to 10 are possible", finding_id="kv.spec")
    narrow = int(bits)
    return narrow, round((bits - narrow) * count)


def _cell_means(c: Array) -> tuple[Array, Array, Array]:
    """E[X | cell], and its derivatives by the left and by the right edge of the cell, for N(0, 1)."""
    edges = np.concatenate([[-np.inf], (c[1:] + c[:-1]) / 2, [np.inf]])
    density = np.exp(-(edges**2) / 2) / np.sqrt(2 * np.pi)
    a, b = edges[:-1], edges[1:]
    # Differences of the distribution function are taken in the tail where they do not cancel.
    mass = np.where(a > 0, ndtr(-a) - ndtr(-b), ndtr(b) - ndtr(a))
    mean = (density[:-1] - density[1:]) / mass
    finite_a, finite_b = np.where(np.isinf(a), 0.0, a), np.where(np.isinf(b), 0.0, b)
    left = density[:-1] * (mean - finite_a) / mass
    right = density[1:] * (finite_b - mean) / mass
    return mean, left, right


# Which level is nearest, for many values at once. `torch.bucketize` searches for each value apart;
# on a CPU a grid of equal cells, fine enough that no two edges share one, is eight times as fast:
# it knows the answer up to one comparison with one edge, which is made exactly.

_FEW = 4096
"""For fewer values a search costs less."""
_MOST_CELLS = 1 << 13


def nearest_level(z: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Index of the nearest of rising `levels` [L] to each value, the lower of two: uint8 up to 256
    levels, else int16.
    """
    kind = torch.uint8 if levels.numel() <= 256 else torch.int16
    edges = (levels[1:] + levels[:-1]) / 2
    many = z.device.type == "cpu" and z.dtype == torch.float32 and z.numel() >= _FEW
    grid = _grid(tuple(edges.tolist())) if many else None
    if grid is None:
        return torch.bucketize(z.contiguous(), edges, out_int32=True).to(kind)
    below, upper, first, scale = grid
    flat = z.reshape(-1)
    cell = _cells(flat, first, scale, below.shape[0])
    # A cell without an edge has its next edge above it, so that the comparison adds nothing.
    result = below.index_select(0, cell) + (flat > upper.index_select(0, cell))
    return result.to(kind).view(z.shape)


def _cells(z: torch.Tensor, first: float, scale: float, count: int) -> torch.Tensor:
    """The cell of each value, int32. Every step is monotone, so cells rise with values whatever is
    rounded.
    """
    return (z - first).mul_(scale).clamp_(0, count - 1).nan_to_num_(count - 1).int()


@lru_cache(maxsize=256)
def _grid(edges: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor, float, float] | None:
    """For each cell the edges before it and the next edge; where the cells begin, and how many
    there are in 1.

    None for fewer than two edges, and where too many cells would be needed to part them.
    """
    if len(edges) < 2 or edges[-1] <= edges[0]:
        return None
    with torch.inference_mode(False):
        whole = torch.tensor(edges, dtype=torch.float32)
        count = 64
        while count <= _MOST_CELLS:
            scale = count / (edges[-1] - edges[0])
            # One more cell than edges reach: values beyond the last edge, and NaN, which counts as
            # such.
            cells = _cells(whole, edges[0] - 0.5 / scale, scale, count + 2)
            if bool((cells[1:] > cells[:-1]).all()):
                below = torch.bucketize(
                    torch.arange(count + 2, dtype=torch.int32), cells, out_int32=True
                )
                upper = torch.cat([whole, torch.tensor([torch.inf])])[below.long()]
                return below, upper, edges[0] - 0.5 / scale, scale
            count *= 2
    return None


# Integers of 1 to 16 bits packed without gaps, lowest bit first: bit k of value i is bit i · width
# + k of the bytes.
#
# Bit j of the stream is bit j mod 8 of byte j // 8, the order of
# `numpy.packbits(bitorder="little")`. Eight values fill `width` whole bytes. Up to 7 bits they are
# the bytes of one word of 64 bits, which is closed up in three steps: pairs of values, then fours,
# then all eight.


def packed_bytes(count: int, width: int) -> int:
    """Bytes that `count` values of `width` bits take."""
    return -(-count * width // 8)


def pack(values: torch.Tensor, width: int) -> torch.Tensor:
    """Integers [..., n] in 0 … 2^width − 1 → uint8 [..., ceil(n · width / 8)]; higher bits are
    ignored.
    """
    _check(width)
    count = values.shape[-1]
    if not count:
        return torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    if width == 8:
        return values.to(torch.uint8)
    if width == 16:
        return values.to(torch.int32).to(torch.int16).contiguous().view(torch.uint8)
    kind = torch.uint8 if width < 8 else torch.int64
    padded = torch.nn.functional.pad(values.to(kind), (0, -count % 8)) & ((1 << width) - 1)
    words = _closed(padded, width) if width < 8 else _joined(padded, width)
    return (
        words.view(torch.uint8)[..., :width]
        .flatten(-2)[..., : packed_bytes(count, width)]
        .contiguous()
    )


def unpack(data: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """The first `count` values of uint8 [..., bytes]: [..., count], uint8 up to 8 bits, else int32.

    UsageError where the bytes are too few.
    """
    _check(width)
    if data.shape[-1] < packed_bytes(count, width):
        raise UsageError(
            f"{data.shape[-1]} bytes hold less than {count} values of {width} bits",
            finding_id="kv.packing",
        )
    kind = torch.uint8 if width <= 8 else torch.int32
    if not count:
        return torch.empty(*data.shape[:-1], 0, dtype=kind, device=data.device)
    data = data[..., : packed_bytes(count, width)]
    if width == 8:
        return data
    groups = torch.nn.functional.pad(data, (0, -data.shape[-1] % width)).unflatten(-1, (-1, width))
    return (_opened(groups, width) if width < 8 else _split(groups, width))[..., :count].to(kind)


def _closed(values: torch.Tensor, width: int) -> torch.Tensor:
    """Eight values in the bytes of each word → words [..., n, 1] whose lowest 8 · width bits hold
    them without gaps.
    """
    words = values.contiguous().view(torch.int64)
    for step, low in ((1, 0x00FF00FF00FF00FF), (2, 0x0000FFFF0000FFFF), (4, 0x00000000FFFFFFFF)):
        lower = words & low
        words = lower | ((words ^ lower) >> (step * (8 - width)))
    return words[..., None]


def _opened(groups: torch.Tensor, width: int) -> torch.Tensor:
    """The other way round: bytes [..., n, width] → uint8 [..., 8 n]."""
    words = torch.nn.functional.pad(groups, (0, 8 - width)).contiguous().view(torch.int64)[..., 0]
    for step, places in ((4, 0x1), (2, 0x0000000100000001), (1, 0x0001000100010001)):
        lower = words & (((1 << (step * width)) - 1) * places)
        words = lower | ((words ^ lower) << (step * (8 - width)))
    return words.view(torch.uint8)


def _joined(values: torch.Tensor, width: int) -> torch.Tensor:
    """Values of 8 to 16 bits, int64 [..., 8 n] → words [..., n, 2]: eight values take at most two
    of them.
    """
    eight = values.unflatten(-1, (-1, 8)).unbind(-1)
    low, high = torch.zeros_like(eight[0]), torch.zeros_like(eight[0])
    for i, value in enumerate(eight):
        start = i * width
        if start < 64:
            low = low | (value << start)
        if start + width > 64:
            high = high | (value << (start - 64) if start >= 64 else value >> (64 - start))
    return torch.stack([low, high], dim=-1)


def _split(groups: torch.Tensor, width: int) -> torch.Tensor:
    """The other way round: bytes [..., n, width] → int64 [..., 8 n]."""
    words = torch.nn.functional.pad(groups, (0, 16 - width)).contiguous().view(torch.int64)
    low, high = words[..., 0], words[..., 1]
    parts = []
    for i in range(8):
        start = i * width
        if start >= 64:
            value = high >> (start - 64)
        elif start + width > 64:
            value = ((low >> start) & ((1 << (64 - start)) - 1)) | (high << (64 - start))
        else:
            value = low >> start
        parts.append(value & ((1 << width) - 1))
    return torch.stack(parts, dim=-1).flatten(-2)


def _check(width: int) -> None:
    if not 1 <= width <= 16:
        raise UsageError(
            f"values of {width} bits cannot be packed, 1 to 16 can", finding_id="kv.packing"
        )


# Orthonormal Walsh-Hadamard rotations with random signs.
#
# y = H (σ ∘ x) / √n with H the Sylvester matrix in natural order (H Hᵀ = n I) and σ = ±1. A
# rotation of n values costs n log₂ n additions, keeps norms, and makes the coordinates of almost
# any vector nearly Gaussian.


_GOLDEN = 0x9E3779B97F4A7C15


def random_words(seed: int, count: int) -> np.ndarray[Any, Any]:
    """`count` words of SplitMix64 started at `seed` (Steele, Lea, Flood 2014), uint64: the same
    everywhere.
    """
    with np.errstate(over="ignore"):
        state = np.uint64(seed % 2**64) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(
            _GOLDEN
        )
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        result: np.ndarray[Any, Any] = state ^ (state >> np.uint64(31))
    return result


def random_signs(seed: int, count: int) -> torch.Tensor:
    """±1 [count], float32: the highest bit of each word of SplitMix64, set for −1."""
    negative = (random_words(seed, count) >> np.uint64(63)).astype(np.float32)
    return torch.from_numpy(1.0 - 2.0 * negative)


@lru_cache(maxsize=256)
def signs_on(seed: int, count: int, device: torch.device) -> torch.Tensor:
    """`random_signs` on a device, to be read only. A copy from main memory in each call would stop
    a GPU's queue.
    """
    with torch.inference_mode(False):
        return random_signs(seed, count).to(device)


def random_normal(seed: int, count: int) -> torch.Tensor:
    """Standard normal values [count], float32: Box-Muller on the upper 53 bits of SplitMix64 words."""
    pairs = -(-count // 2)
    uniform = ((random_words(seed, 2 * pairs) >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
    radius = np.sqrt(-2.0 * np.log(uniform[:pairs]))
    angle = 2.0 * np.pi * uniform[pairs:]
    both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return torch.from_numpy(both[:count].astype(np.float32))


def words_of_keys(keys: torch.Tensor, count: int) -> torch.Tensor:
    """`count` words of SplitMix64 started at each key, int64 bit patterns: [...] → [..., count], on
    any device.
    """
    steps = torch.arange(1, count + 1, device=keys.device) * _signed(_GOLDEN)
    state = keys[..., None] + steps
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    return state ^ _shifted(state, 31)


def normal_of_words(words: torch.Tensor) -> torch.Tensor:
    """Standard normal values from an even number of words: Box-Muller on their upper 24 bits,
    float32.
    """
    uniform = (_shifted(words, 40).float() + 0.5) / 2.0**24
    first, second = uniform.chunk(2, dim=-1)
    radius = torch.sqrt(-2.0 * torch.log(first))
    angle = 2.0 * torch.pi * second
    return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], dim=-1)


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """Words shifted right with zeros coming in."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    """The int64 of the same bits: torch multiplies no uint64."""
    return word - 2**64 if word >= 2**63 else word


def lengths(x: torch.Tensor) -> torch.Tensor:
    """‖x‖ over the last dimension, float32, added up in float64: no order of adding changes it, on
    any device.
    """
    return x.square().sum(-1, dtype=torch.float64).sqrt().float()


def wht(x: torch.Tensor) -> torch.Tensor:
    """The orthonormal transform of the last dimension, whose length is a power of two; its own
    inverse.
    """
    n = x.shape[-1]
    # Values of one place next to each other: each stage adds long rows, whatever the distance of
    # its pairs.
    rows = x.detach().reshape(-1, n).T.clone(memory_format=torch.contiguous_format)
    other = torch.empty_like(rows)
    size = 1
    while size < n:
        pairs, both = (t.view(n // (2 * size), 2, size, -1) for t in (rows, other))
        torch.add(pairs[:, 0], pairs[:, 1], out=both[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=both[:, 1])
        rows, other = other, rows
        size *= 2
    return rows.mul_(n**-0.5).T.contiguous().view(x.shape)


class Rotation:
    """An orthonormal rotation of vectors of any length, from a seed.

    Where the length is no power of two, the front is rotated up to the largest power of two that
    fits, then the back likewise, with other signs: every value is mixed with all others at no more
    values than there were.
    """

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        part = 1 << max(length.bit_length() - 1, 0)
        self._spans = (
            [(0, part)] if part == length else [(0, part), (length - part, length), (0, part)]
        )
        self.seeds = [seed + i for i in range(len(self._spans))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., length] rotated."""
        for (lo, hi), seed in zip(self._spans, self.seeds, strict=True):
            x = _span(x * signs_on(seed, self.length, x.device), lo, hi)
        return x

    def inverse(self, y: torch.Tensor) -> torch.Tensor:
        """The rotation undone."""
        for (lo, hi), seed in zip(reversed(self._spans), reversed(self.seeds), strict=True):
            y = _span(y, lo, hi) * signs_on(seed, self.length, y.device)
        return y


def _span(x: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
    if lo == 0 and hi == x.shape[-1]:
        return wht(x)
    return torch.cat([x[..., :lo], wht(x[..., lo:hi]), x[..., hi:]], dim=-1)


# The linear layers of a model of transformers, whose weights a quantisation replaces.


def linear_layers(model: Any) -> list[Any]:
    """The linear layers but the output head; a weight that several share is named once."""
    head = model.get_output_embeddings()
    found: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            found.setdefault(id(module.weight), module)
    return list(found.values())


def replace_weights(
    model: Any,
    round_trip: Callable[[torch.Tensor], torch.Tensor],
    stored_bytes: Callable[[torch.Tensor], int],
) -> int:
    """Put every linear layer's weight through `round_trip` in place.

    Returns the bytes of all parameters: `stored_bytes` of the replaced ones, the others as they are
    held.
    """
    total: int = 0
    counted = set[int]()
    with torch.no_grad():
        for module in linear_layers(model):
            module.weight.copy_(round_trip(module.weight))
            total += stored_bytes(module.weight)
            counted.add(id(module.weight))
    rest = {id(p): p for p in model.parameters() if id(p) not in counted}
    total += sum(p.numel() * p.element_size() for p in rest.values())
    return total


# Weights in Hadamard-rotated blocks with Lloyd-Max levels and one norm a block, the PolarQuant way.
#
# Each row of a linear layer is cut into blocks of `block` inputs (a power of two; the last is
# padded with zeros). A block w becomes z = √n R w / ‖w‖ with R random signs and an orthonormal
# Hadamard matrix; the coordinates of z are nearly Gaussian and get the 2^b Lloyd-Max levels; the
# stored fp16 factor gives the decoded block the least squared error.


def polar_round_trip(
    weight: torch.Tensor, bits: int, block: int = 128, seed: int = 1
) -> torch.Tensor:
    """`weight` [out, in] as its codes decode, in its own type."""
    _check_format(bits, block)
    width = weight.shape[1]
    padded = torch.nn.functional.pad(weight.float(), (0, -width % block)).unflatten(-1, (-1, block))
    norm = padded.norm(dim=-1, keepdim=True)
    rotation = Rotation(block, seed)
    z = rotation.forward(padded) * (block**0.5 / norm.clamp_min(1e-30))
    levels = torch.tensor(gaussian_levels(2**bits), dtype=torch.float32, device=weight.device)
    shape = levels[torch.bucketize(z, (levels[1:] + levels[:-1]) / 2)]
    # ⟨w, R⁻¹ẑ⟩ / ‖ẑ‖², in the rotated frame.
    factor = (
        (shape * z).sum(-1, keepdim=True) / shape.square().sum(-1, keepdim=True) * norm / block**0.5
    )
    half = factor.clamp(-65504, 65504).half().float()
    back: torch.Tensor = rotation.inverse(shape * half).flatten(1)[:, :width]
    return back.to(weight.dtype)


def polar_bytes(rows: int, width: int, bits: int, block: int = 128) -> int:
    """Stored bytes of a [rows, width] weight: packed levels of whole blocks and 2 bytes a block."""
    blocks = rows * -(-width // block)
    return packed_bytes(blocks * block, bits) + 2 * blocks


def polar_quantise(model: Any, bits: int, block: int = 128, seed: int = 1) -> int:
    """Replace the weights of every linear layer but the output head; returns the bytes of all
    parameters.
    """
    _check_format(bits, block)
    return replace_weights(
        model,
        lambda weight: polar_round_trip(weight, bits, block, seed),
        lambda weight: polar_bytes(weight.shape[0], weight.shape[1], bits, block),
    )


def _check_format(bits: int, block: int) -> None:
    if not 2 <= bits <= 8 or block < 2 or block & (block - 1):
        raise UsageError(
            f"polar(bits={bits}, block={block}): bits is 2 to 8 and block a power of two",
            finding_id="fidelity.usage",
        )


# Round-to-nearest integer weights, the plainest quantisation: a control, and a candidate to compare
# with.
#
# Each group of `group` weights along the input of a linear layer has one scale (and, asymmetric,
# one zero point): ŵ = s · clamp(round(w / s) + z, 0, 2ᵇ − 1) − s · z, with s and z from the
# smallest and largest weight of the group. With a real minimum m instead of a rounded zero point
# (llama.cpp's Q4_1): ŵ = s · round((w − m) / s) + m.


def quantise_dequantise(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool = False, minimum: bool = False
) -> torch.Tensor:
    """`weight` [out, in] on the integer grid, in its own type. The last group of a row may be
    shorter.

    `minimum` keeps the smallest weight of a group as it is, in place of a zero point that is one of
    the levels.
    """
    rows, width = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -width % group))
    grouped = padded.reshape(rows, -1, group)
    # Padding must not widen the range of the last group.
    real = torch.nn.functional.pad(
        torch.ones(width, dtype=torch.bool, device=weight.device), (0, -width % group)
    )
    real = real.reshape(1, -1, group).expand(grouped.shape)
    levels = 2**bits - 1
    if symmetric:
        top = 2 ** (bits - 1) - 1
        scale = grouped.abs().amax(-1, keepdim=True) / max(top, 1)
        codes = torch.round(grouped / scale.clamp_min(1e-30)).clamp(-top - 1, top)
        result = codes * scale
    elif minimum:
        lo = torch.where(real, grouped, torch.inf).amin(-1, keepdim=True)
        hi = torch.where(real, grouped, -torch.inf).amax(-1, keepdim=True)
        scale = ((hi - lo) / levels).clamp_min(1e-30)
        result = torch.round((grouped - lo) / scale) * scale + lo
    else:
        lo = torch.where(real, grouped, torch.inf).amin(-1, keepdim=True).clamp_max(0.0)
        hi = torch.where(real, grouped, -torch.inf).amax(-1, keepdim=True).clamp_min(0.0)
        scale = ((hi - lo) / levels).clamp_min(1e-30)
        zero = torch.round(-lo / scale)
        codes = (torch.round(grouped / scale) + zero).clamp(0, levels)
        result = (codes - zero) * scale
    return result.reshape(rows, -1)[:, :width].to(weight.dtype)


def stored_bytes(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool = False, minimum: bool = False
) -> int:
    """Bytes of the codes, packed, with an fp16 scale a group and, asymmetric, a zero point of
    `bits` or an fp16 minimum.
    """
    rows, width = weight.shape
    groups = -(-width // group)
    extra = 16 + (0 if symmetric else 16 if minimum else bits)
    size: int = rows * (-(-width * bits // 8) + -(-groups * extra // 8))
    return size


def quantise_model(
    model: Any, bits: int = 4, group: int = 128, symmetric: bool = False, minimum: bool = False
) -> int:
    """Round every linear layer but the output head of `model` in place; returns the bytes of all
    its parameters.

    UsageError for a width that is not 1 … 8 bits, a group below 1, or a symmetric grid with a
    minimum.
    """
    if not 1 <= bits <= 8 or group < 1 or (symmetric and minimum):
        raise UsageError(
            f"int(bits={bits}, group={group}): bits must be 1 to 8 and group at least 1; "
            "symmetric and minimum exclude each other",
            finding_id="fidelity.usage",
        )
    kind = {"symmetric": symmetric, "minimum": minimum}
    return replace_weights(
        model,
        lambda weight: quantise_dequantise(weight, bits, group, **kind),
        lambda weight: stored_bytes(weight, bits, group, **kind),
    )


# GPTQ (Frantar et al. 2022, arXiv 2210.17323): weights rounded column by column, each error spread
# over the columns to come.
#
# A linear layer y = W x is rounded so that ‖(W − Ŵ) X‖² over calibration inputs X is small, not ‖W
# − Ŵ‖². With H = X Xᵀ the best answer to a column's rounding error (w_j − ŵ_j) is to move each
# later column k by −(w_j − ŵ_j) U_jk / U_jj, where U is the upper Cholesky factor of H⁻¹. Scale and
# zero point of a group are those of the weights as they are when its first column is reached.


BLOCK = 128
"""Columns whose errors are gathered before they are spread over the rest: the same result as one by
one, in fewer products.
"""


def gptq(
    weight: torch.Tensor,
    gram: torch.Tensor,
    bits: int,
    group: int,
    *,
    damping: float = 0.01,
    symmetric: bool = False,
) -> torch.Tensor:
    """`weight` [out, in] on an integer grid with a scale (and a zero point) a group of inputs, in
    its own type.

    `gram` [in, in] is X Xᵀ over the inputs; `damping` times the mean of its diagonal is added to
    it. Inputs that never are anything but zero get the weight zero.
    """
    w, width = weight.float().clone(), weight.shape[1]
    h = gram.float().clone()
    dead = h.diagonal() == 0
    h.diagonal()[dead] = 1.0
    w[:, dead] = 0.0
    h.diagonal().add_(damping * h.diagonal().mean())
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)
    scale = zero = torch.zeros(())
    levels, top = 2**bits - 1, 2 ** (bits - 1)
    block = group * max(
        1, BLOCK // group
    )  # whole groups: their weights are up to date when the first column is reached
    for begin in range(0, width, block):
        end = min(begin + block, width)
        part, errors = w[:, begin:end], torch.zeros_like(w[:, begin:end])
        for j in range(begin, end):
            if j % group == 0:
                own = w[:, j : j + group]
                if symmetric:
                    scale, zero = own.abs().amax(1) / (top - 1), torch.full_like(own[:, 0], top)
                else:
                    lo, hi = own.amin(1).clamp_max(0.0), own.amax(1).clamp_min(0.0)
                    scale = (hi - lo) / levels
                    zero = torch.round(-lo / scale.clamp_min(1e-30))
                scale = scale.clamp_min(1e-30)
            column = w[:, j].clone()
            w[:, j] = ((torch.round(column / scale) + zero).clamp(0, levels) - zero) * scale
            error = (column - w[:, j]) / upper[j, j]
            errors[:, j - begin] = error
            part[:, j - begin + 1 :].addr_(error, upper[j, j + 1 : end], alpha=-1)
        w[:, end:] -= errors @ upper[begin:end, end:]
    return w.to(weight.dtype)


class _Enough(Exception):
    """The block has seen its inputs."""


@contextmanager
def _grams(block: Any, layers: Iterable[Any]) -> Iterator[dict[Any, torch.Tensor]]:
    """X Xᵀ of each linear layer, summed while the model runs up to the end of `block`."""
    sums: dict[Any, torch.Tensor] = {}

    def seen(layer: Any, given: tuple[torch.Tensor, ...]) -> None:
        x = given[0].flatten(0, -2).float()
        own = x.T @ x
        sums[layer] = sums[layer] + own if layer in sums else own

    def stop(*_: Any) -> None:
        raise _Enough

    hooks = [layer.register_forward_pre_hook(seen) for layer in layers] + [
        block.register_forward_hook(stop)
    ]
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()  # type: ignore[untyped-decorator]
def gptq_model(
    model: Any, texts: Iterable[list[int]], bits: int, group: int, *, symmetric: bool = False,
    advance: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Round every linear layer of a model of transformers in place, block by block, each on what
    the rounded ones before hand it.

    `texts` are token ids to calibrate on. The output head is left as it is.
    """
    inner, texts = model.base_model, list(texts)
    for block in inner.layers:
        layers = [m for m in block.modules() if isinstance(m, torch.nn.Linear)]
        with _grams(block, layers) as sums:
            for ids in texts:
                with suppress(_Enough):
                    inner(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
        for layer in layers:
            layer.weight.copy_(
                gptq(layer.weight, sums.pop(layer), bits, group, symmetric=symmetric)
            )
        advance()
