"""The grid of edges against a search, value by value."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from assay.lab.quant.levels import (
    _grid,
    edges_below,
    gaussian_levels,
)


def awkward(edges: torch.Tensor) -> torch.Tensor:
    """Many values, each edge and both of its neighbours, and what is no ordinary number."""
    far = torch.tensor([0.0, -0.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan])
    beside = [torch.nextafter(edges, torch.full_like(edges, end)) for end in (-99.0, 99.0)]
    z = torch.randn(20_000, generator=torch.Generator().manual_seed(3)) * 2
    return torch.cat([z, edges, *beside, far])


@pytest.mark.parametrize("bits", range(1, 11))
def test_gaussian_edges(bits: int) -> None:
    levels = torch.tensor(gaussian_levels(2**bits), dtype=torch.float32)
    edges = (levels[1:] + levels[:-1]) / 2
    assert (_grid(tuple(edges.tolist())) is None) == (bits == 1)
    z = awkward(edges)
    assert torch.equal(edges_below(z, edges), torch.bucketize(z, edges, out_int32=True))
    assert edges_below(z[:8000].reshape(4, 50, 40), edges).shape == (4, 50, 40)


def test_edges_that_no_grid_parts() -> None:
    edges = torch.tensor([0.0, 1e-9, 1.0])
    assert _grid(tuple(edges.tolist())) is None
    z = awkward(edges)
    assert torch.equal(edges_below(z, edges), torch.bucketize(z, edges, out_int32=True))
