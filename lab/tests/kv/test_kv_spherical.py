"""Components of many sets at once: the forms for a GPU against LAPACK's."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from codec_cases import SITES, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from assay_lab.kv.codecs.kakeya.components import (
    _sketch,
    random_basis,
    random_basis_of_grams,
    ranks,
)
from assay_lab.kv.codecs.kakeya.eigen import eigh_batched


@settings(max_examples=10, deadline=None)
@given(
    n=st.integers(1, 12),
    rank=st.integers(1, 12),
    decades=st.integers(0, 8),
    seed=st.integers(0, 99),
)
def test_jacobi_agrees_with_lapack(n: int, rank: int, decades: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3, min(rank, n), n, generator=generator, dtype=torch.float64)
    a = (rows * torch.logspace(0, -decades, n, dtype=torch.float64)).mT
    a = a @ a.mT
    values, vectors = eigh_batched(a)
    expected = torch.linalg.eigvalsh(a)
    top = float(expected.amax())
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-12 * top)
    torch.testing.assert_close(
        vectors.mT @ vectors, torch.eye(n, dtype=a.dtype).expand(3, n, n), rtol=0, atol=1e-12
    )
    torch.testing.assert_close(
        vectors @ torch.diag_embed(values) @ vectors.mT, a, rtol=0, atol=1e-12 * max(top, 1e-30)
    )


def test_jacobi_of_nothing_and_of_what_is_diagonal() -> None:
    values, vectors = eigh_batched(torch.zeros(2, 5, 5))
    assert not values.any() and torch.equal(vectors, torch.eye(5).expand(2, 5, 5))
    values, _ = eigh_batched(torch.diag(torch.tensor([3.0, 1.0, 2.0]))[None])
    assert values[0].tolist() == [1.0, 2.0, 3.0]


def cases() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    outlier = torch.cat([normal(2, 127, 24), torch.full((2, 1, 24), 1e3)], dim=1)
    return {
        "keys": tokens(SITES["k64"], 128),
        "steep": normal(3, 128, 24) * torch.logspace(0, -5, 24),
        "few dimensions": normal(3, 128, 5) @ normal(5, 24),
        "one outlier": outlier,
        "constant": torch.ones(2, 128, 24),
        "fewer rows than columns": normal(2, 9, 24),
    }


@pytest.mark.parametrize("name", cases())
def test_a_sketch_by_products_spans_what_qr_and_svd_span(name: str) -> None:
    x = cases()[name]
    centred = x - x.mean(dim=1, keepdim=True)
    _, n, d = centred.shape
    cap = d // 2
    basis, variances = random_basis(centred, cap, 7)
    width = min(cap + 8, d, n)
    omega = _sketch(7 ^ 0x9E3779B97F4A7C15, n, width)
    again, others = random_basis_of_grams(centred, omega, min(cap, d, n))
    assert again.shape == basis.shape
    torch.testing.assert_close(
        others, variances, rtol=1e-4, atol=1e-5 * float(variances.amax()) + 1e-12
    )
    for share in (0.95, 1.0):
        rank = ranks(variances, share, cap)
        assert torch.equal(ranks(others, share, cap), rank)
        used = torch.arange(basis.shape[1]) < rank[:, None]
        kept, told = (b * used[..., None] for b in (basis, again))
        torch.testing.assert_close(
            centred @ told.mT @ told,
            centred @ kept.mT @ kept,
            rtol=0,
            atol=2e-3 * float(centred.abs().amax()) + 1e-6,
        )
