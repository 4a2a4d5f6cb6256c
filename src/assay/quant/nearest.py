"""Which of many levels is nearest, for many values at once on a CPU.

`torch.bucketize` searches for each value apart. A grid of equal cells, fine enough that no two edges share one, knows
the answer up to one comparison with one edge, which is made exactly: what comes out is the same.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

import torch

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
