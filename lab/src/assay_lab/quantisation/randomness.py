"""Numbers that follow from a seed by SplitMix64, equal on every machine.

y = H (σ ∘ x) / √n with H the Sylvester matrix in natural order (H Hᵀ = n I) and σ = ±1. A
rotation of n values costs n log₂ n additions, keeps norms, and makes the coordinates of almost
any vector nearly Gaussian.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

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
    """Standard normal values [count], float32: Box-Muller on the upper 53 bits of SplitMix64
    words.
    """
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
