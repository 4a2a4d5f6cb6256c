"""The Walsh–Hadamard transform with random signs: a rotation that makes any vector look Gaussian.

y = H D x / √n, with D = diag(±1) and H the Sylvester matrix of order n, a power of two. H is symmetric and H H = n I, so the
inverse is x = D H y / √n. The sum of many signed channels tends to a normal distribution whatever the channels were.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

_MASK = (1 << 64) - 1


def fwht(x: torch.Tensor) -> torch.Tensor:
    """H x / √n over the last dimension, n a power of two (ValueError otherwise). Its own inverse."""
    n = x.shape[-1]
    if n < 1 or n & (n - 1):
        raise ValueError(f"the transform needs a power of two, got {n}")
    shape, half = x.shape, 1
    while half < n:
        pairs = x.reshape(*shape[:-1], n // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = _stack(a + b, a - b).reshape(shape)
        half *= 2
    return x * n**-0.5


def _stack(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.stack((a, b), dim=-2)


@lru_cache(maxsize=64)
def _signs(n: int, seed: int) -> tuple[int, ...]:
    """±1 from the lowest bit of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): the same on every platform."""
    state, found = seed & _MASK, []
    for _ in range(n):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        found.append(1 - 2 * ((z ^ (z >> 31)) & 1))
    return tuple(found)


def random_signs(n: int, seed: int) -> NDArray[np.float32]:
    """n signs, float32."""
    import numpy as np

    return np.array(_signs(n, seed), dtype=np.float32)


def rotate(x: torch.Tensor, seed: int) -> torch.Tensor:
    """H D x / √n over the last dimension."""
    return fwht(x * _as(x, seed))


def rotate_back(y: torch.Tensor, seed: int) -> torch.Tensor:
    """The inverse of `rotate`."""
    return fwht(y) * _as(y, seed)


def _as(x: torch.Tensor, seed: int) -> torch.Tensor:
    import torch

    return torch.from_numpy(random_signs(x.shape[-1], seed)).to(x.device, x.dtype)


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is not below n ≥ 1."""
    return 1 << (n - 1).bit_length()
