"""The nearest level by a grid against a search, value by value."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from assay_lab.quantisation.levels import gaussian_levels
from assay_lab.quantisation.nearest import _grid, nearest_level


def awkward(levels: torch.Tensor) -> torch.Tensor:
    """Many values, each edge and both of its neighbours, and what is no ordinary number."""
    edges = (levels[1:] + levels[:-1]) / 2
    far = torch.tensor([0.0, -0.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan])
    beside = [torch.nextafter(edges, torch.full_like(edges, end)) for end in (-99.0, 99.0)]
    z = torch.randn(20_000, generator=torch.Generator().manual_seed(3)) * 2
    return torch.cat([z, edges, *beside, far])


def searched(z: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    return torch.bucketize(z, (levels[1:] + levels[:-1]) / 2)


@pytest.mark.parametrize("bits", range(1, 11))
def test_gaussian_levels(bits: int) -> None:
    levels = torch.tensor(gaussian_levels(2**bits), dtype=torch.float32)
    edges = (levels[1:] + levels[:-1]) / 2
    assert (_grid(tuple(edges.tolist())) is None) == (bits == 1)
    z = awkward(levels)
    found = nearest_level(z, levels)
    assert found.dtype == (torch.uint8 if bits <= 8 else torch.int16)
    assert torch.equal(found.long(), searched(z, levels))
    assert torch.equal(found[:100], nearest_level(z[:100], levels))
    assert nearest_level(z[:8000].reshape(4, 50, 40), levels).shape == (4, 50, 40)
    assert nearest_level(z[:0], levels).shape == (0,)


@pytest.mark.parametrize(
    "levels", [[0.0, 1e-9, 1.0, 2.0], [1.0, 1.0, 1.0], [0.0, 0.5, 0.5, 0.5, 2.0], [3.0]]
)
def test_levels_that_no_grid_parts(levels: list[float]) -> None:
    table = torch.tensor(levels)
    z = awkward(table)
    assert torch.equal(nearest_level(z, table).long(), searched(z, table))
