"""Levels of scalar quantisers: the best for a Gaussian, and those of samples.

Lloyd-Max quantisers (Lloyd 1957, Max 1960) have the least squared error for a distribution. Their
levels c₁ < … < c_N satisfy c_i = E[X | t_{i−1} < X ≤ t_i] with t_i = (c_i + c_{i+1}) / 2.
"""

from __future__ import annotations

from functools import cache

import numpy as np
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
    """E[X | cell], and its derivatives by the left and by the right edge of the cell, for N(0,
    1).
    """
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
