"""Lloyd-Max quantisers (Lloyd 1957, Max 1960): the levels with the least squared error for a distribution.

Levels c₁ < … < c_N satisfy c_i = E[X | t_{i−1} < X ≤ t_i] with t_i = (c_i + c_{i+1}) / 2.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from assay.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

Array = Any


@cache
def gaussian_levels(levels: int) -> np.ndarray[Any, Any]:
    """The levels for N(0, 1), float64 [levels], ascending and symmetric; 1 ≤ levels ≤ 1024, exact to 1e-10.

    Newton's method on c − E[X | cell(c)] = 0, whose Jacobian is tridiagonal, from the companding start
    √3 Φ⁻¹((i + ½)/N) (Panter and Dite 1951).
    """
    import numpy as np
    from scipy.linalg import solve_banded
    from scipy.special import ndtri

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
    result: np.ndarray[Any, Any] = (c - c[::-1]) / 2
    result.setflags(write=False)
    return result


def gaussian_error(levels: int) -> float:
    """Mean squared error of the Gaussian quantiser of that many levels: 1 − Σ P(cell) c²."""
    import numpy as np
    from scipy.special import ndtr

    c = gaussian_levels(levels)
    edges = np.concatenate([[-np.inf], (c[1:] + c[:-1]) / 2, [np.inf]])
    return float(1.0 - (np.diff(ndtr(edges)) * c**2).sum())


def empirical_levels(samples: Array, levels: int, *, iterations: int = 200) -> np.ndarray[Any, Any]:
    """The levels for a sample [n], float64, by Lloyd's iteration from the sample's own quantiles.

    Sums over sorted values make an iteration cost N log n. A cell that is empty keeps its level. Stops when no level
    moves by more than 1e-9 of the sample's deviation.
    """
    import numpy as np

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
        moved = np.where(counts > 0, (sums[edges[1:]] - sums[edges[:-1]]) / np.maximum(counts, 1), c)
        done = np.abs(moved - c).max() <= tolerance
        c = moved
        if done:
            break
    return c


def mixed_widths(bits: float, count: int) -> tuple[int, int]:
    """How `count` values get `bits` bits on average: (width of the narrow ones, how many get one bit more).

    UsageError unless 1 ≤ bits ≤ 10.
    """
    if not 1 <= bits <= 10:
        raise UsageError(f"bits={bits:g}: 1 to 10 are possible", finding_id="kv.spec")
    narrow = int(bits)
    return narrow, round((bits - narrow) * count)


def _cell_means(c: np.ndarray[Any, Any]) -> tuple[Array, Array, Array]:
    """E[X | cell], and its derivatives by the left and by the right edge of the cell, for N(0, 1)."""
    import numpy as np
    from scipy.special import ndtr

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


# -----------------------------------------------------------------------------
# Which of many levels is nearest, for many values at once on a CPU.
#
# `torch.bucketize` searches for each value apart. A grid of equal cells, fine enough that no two edges share one, knows
# the answer up to one comparison with one edge, which is made exactly: what comes out is the same.

Grid: TypeAlias = tuple[torch.Tensor, torch.Tensor, float, float]

_FEW = 4096
"""For fewer values a search costs less."""
_MOST_CELLS = 1 << 16


def edges_below(z: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """How many of the rising `edges` lie below each value, int32: `torch.bucketize`, faster for many values on a CPU."""
    grid = grid_of(edges) if z.device.type == "cpu" and z.numel() >= _FEW else None
    if grid is None or z.dtype != torch.float32:
        return torch.bucketize(z.contiguous(), edges, out_int32=True)
    below, upper, first, scale = grid
    flat = z.reshape(-1)
    cell = _cells(flat, first, scale, below.shape[0])
    result = below.index_select(0, cell)
    # A cell without an edge has its next edge above it, so that the comparison adds nothing.
    result += flat > upper.index_select(0, cell)
    return result.view(z.shape)


def _cells(z: torch.Tensor, first: float, scale: float, count: int) -> torch.Tensor:
    """The cell of each value, int32. Every step is monotone, so cells rise with values whatever is rounded."""
    place = (z - first).mul_(scale).clamp_(0, count - 1).nan_to_num_(count - 1)
    return place.int()


def grid_of(edges: torch.Tensor) -> Grid | None:
    """For each cell the edges before it, and the next edge; where the cells begin, and how many there are in 1.

    Of at least two rising edges, float32; None where there are fewer, or where too many cells would be needed.
    """
    return _grid(tuple(edges.tolist()))


@lru_cache(maxsize=32)
def _grid(edges: tuple[float, ...]) -> Grid | None:
    if len(edges) < 2:
        return None
    with torch.inference_mode(False):
        whole = torch.tensor(edges, dtype=torch.float32)
        reach = edges[-1] - edges[0]
        count = 64
        # One more cell than edges reach: values beyond the last edge, and NaN, which counts as such.
        while count <= _MOST_CELLS:
            scale = count / reach
            cells = _cells(whole, edges[0] - 0.5 / scale, scale, count + 2)
            if bool((cells[1:] > cells[:-1]).all()):
                below = torch.bucketize(torch.arange(count + 2, dtype=torch.int32), cells, out_int32=True)
                upper = torch.cat([whole, torch.tensor([torch.inf])])[below.long()]
                return below, upper, edges[0] - 0.5 / scale, scale
            count *= 2
    return None
