"""Orthonormal Walsh-Hadamard rotations with random signs.

y = H (σ ∘ x) / √n with H the Sylvester matrix in natural order (H Hᵀ = n I) and σ = ±1. A rotation of n values costs
n log₂ n additions, keeps norms, and makes the coordinates of almost any vector nearly Gaussian.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

_GOLDEN = 0x9E3779B97F4A7C15


def random_words(seed: int, count: int) -> np.ndarray[Any, Any]:
    """`count` words of SplitMix64 started at `seed` (Steele, Lea, Flood 2014), uint64: the same everywhere."""
    with np.errstate(over="ignore"):
        state = np.uint64(seed % 2**64) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
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
    """`random_signs` on a device, to be read only. A copy from main memory in each call would stop a GPU's queue."""
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
    """`count` words of SplitMix64 started at each key, int64 bit patterns: [...] → [..., count], on any device."""
    steps = torch.arange(1, count + 1, device=keys.device) * _signed(_GOLDEN)
    state = keys[..., None] + steps
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    return state ^ _shifted(state, 31)


def normal_of_words(words: torch.Tensor) -> torch.Tensor:
    """Standard normal values from an even number of words: Box-Muller on their upper 24 bits, float32."""
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
    """‖x‖ over the last dimension, float32, added up in float64: no order of adding changes it, on any device."""
    return x.square().sum(-1, dtype=torch.float64).sqrt().float()


def wht(x: torch.Tensor) -> torch.Tensor:
    """The orthonormal transform of the last dimension, whose length is a power of two; its own inverse."""
    n = x.shape[-1]
    # Values of one place next to each other: each stage adds long rows, whatever the distance of its pairs.
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

    Where the length is no power of two, the front is rotated up to the largest power of two that fits, then the back
    likewise, with other signs: every value is mixed with all others at no more values than there were.
    """

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        part = 1 << max(length.bit_length() - 1, 0)
        self._spans = [(0, part)] if part == length else [(0, part), (length - part, length), (0, part)]
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
