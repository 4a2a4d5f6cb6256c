"""Scalar quantisers of least squared error (Lloyd, IEEE Trans. Inf. Theory 28 (1982) 129; Max, IRE Trans. 6 (1960) 7).

A quantiser of N levels is optimal where every boundary lies half way between its levels and every level is the mean of
its cell. For the standard normal distribution the mean of (a, b) is (φ(a) − φ(b)) / (Φ(b) − Φ(a)).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import ArrayLike, NDArray

MAX_BITS = 8


@lru_cache(maxsize=MAX_BITS + 1)
def _gaussian(bits: int) -> tuple[float, ...]:
    import numpy as np
    from scipy.special import ndtr, ndtri

    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"tables have 1 to {MAX_BITS} bits, got {bits}")
    n = 2**bits
    # Levels of the optimal high-rate density, which is that of a normal with three times the variance.
    levels = ndtri((np.arange(n) + 0.5) / n) * np.sqrt(3.0) if bits > 1 else np.array([-0.8, 0.8])
    for _ in range(200_000):
        edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
        density = np.exp(-np.square(edges) / 2) / np.sqrt(2 * np.pi)
        moved = (density[:-1] - density[1:]) / np.diff(ndtr(edges))
        done = np.abs(moved - levels).max() < 1e-12
        levels = moved
        if done:
            break
    levels = (levels - levels[::-1]) / 2
    return tuple(float(v) for v in levels)


def gaussian_levels(bits: int) -> NDArray[np.float64]:
    """The 2ᵇ optimal levels of the standard normal distribution, ascending."""
    import numpy as np

    return np.array(_gaussian(bits))


def fitted_levels(
    samples: ArrayLike, bits: int, start: ArrayLike | None = None, rounds: int = 200
) -> NDArray[np.float64]:
    """2ᵇ levels fitted to samples by Lloyd's iteration, from the Gaussian table (or `start`), ascending.

    ValueError without finite samples. A cell that nothing falls into keeps its level.
    """
    import numpy as np

    values = np.sort(np.asarray(samples, dtype=np.float64).ravel())
    if values.size == 0 or not np.isfinite(values).all():
        raise ValueError("levels are fitted to finite samples")
    levels = np.array(gaussian_levels(bits) if start is None else start, dtype=np.float64)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    for _ in range(rounds):
        cuts = np.searchsorted(values, (levels[1:] + levels[:-1]) / 2, side="right")
        ends = np.concatenate([[0], cuts, [values.size]])
        counts = np.diff(ends)
        means = np.divide(sums[ends[1:]] - sums[ends[:-1]], counts, out=levels.copy(), where=counts > 0)
        if np.abs(means - levels).max() < 1e-10:
            break
        levels = means
    return levels


def nearest(x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Index (int64) of the nearest level of each value; a tie goes to the lower one. `levels` ascending, [N]."""
    import torch

    return torch.bucketize(x.contiguous(), (levels[1:] + levels[:-1]) / 2)
