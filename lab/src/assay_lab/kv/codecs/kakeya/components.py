"""Principal components of many small sets of rows at once: exact, or by a random sketch."""

from __future__ import annotations

from functools import lru_cache

import torch

from assay_lab.kv.codecs.kakeya.eigen import eigh_batched
from assay_lab.quantisation.randomness import random_normal

OVERSAMPLE, POWER_ITERATIONS = 8, 2
SEED_OF_SKETCH = 0x9E3779B97F4A7C15


def exact_basis(centred: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[sets, n, d] → rows of components [sets, d, d] by falling variance, and the variances [sets,
    d].
    """
    if centred.is_cuda:
        gram = _gram(centred)
        values, vectors = (t.float() for t in eigh_batched(gram / max(1, centred.shape[1])))
    else:
        values, vectors = torch.linalg.eigh(centred.mT @ centred / max(1, centred.shape[1]))
    return vectors.flip(-1).mT.contiguous(), values.flip(-1).clamp_min(0)


def random_basis(centred: torch.Tensor, rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by a random sketch (Halko, Martinsson, Tropp 2011) with power iterations: [sets,
    rank, d].

    Fewer rows come back where the sets are smaller. Variances are those inside the sketch.
    """
    _, n, d = centred.shape
    rank = min(rank, d, n)
    width = min(rank + OVERSAMPLE, d, n)
    omega = _sketch(seed ^ SEED_OF_SKETCH, n, width).to(centred.device)
    if centred.is_cuda:
        return random_basis_of_grams(centred, omega, rank)
    sketch = centred.mT @ omega
    for _ in range(POWER_ITERATIONS):
        left = torch.linalg.qr(centred @ sketch)[0]
        sketch = torch.linalg.qr(centred.mT @ left)[0]
    q = torch.linalg.qr(sketch)[0]
    _, singular, right = torch.linalg.svd(centred @ q, full_matrices=False)
    rows = right @ q.mT
    return rows[:, :rank].contiguous(), (singular.square() / n)[:, :rank]


def random_basis_of_grams(
    centred: torch.Tensor, omega: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`random_basis` by products and [d, d] matrices alone: the form for a GPU, where batched QR
    and SVD are loops.

    With A the centred rows and S = Aᵀ A, one power iteration takes the span of Z to that of S Z,
    and the SVD of A Q is the eigendecomposition of Qᵀ S Q. Squares are kept in float64, which loses
    nothing of float32 rows.
    """

    gram = _gram(centred)
    q = _orthonormal(centred.double().mT @ omega.double())
    for _ in range(POWER_ITERATIONS):
        q = _orthonormal(gram @ q)
    values, vectors = eigh_batched(q.mT @ gram @ q)
    rows = (q @ vectors.flip(-1)[..., :rank]).mT
    return (
        rows.float().contiguous(),
        (values.flip(-1).clamp_min(0) / centred.shape[1])[:, :rank].float(),
    )


def _orthonormal(z: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the columns of z [sets, d, r], float64: Cholesky QR, three times
    (Fukaya and others 2020).

    The first time with a shift, so that columns which depend on others do no harm.
    """
    z = z / z.norm(dim=1, keepdim=True).clamp_min(1e-30)
    for shift in (1e-13, 1e-15, 0.0):
        square = z.mT @ z
        square.diagonal(dim1=1, dim2=2).add_(shift * z.shape[-1] + 1e-30)
        lower, _ = torch.linalg.cholesky_ex(square)
        z = torch.linalg.solve_triangular(lower.mT, z, upper=True, left=False)
    return z


def _gram(rows: torch.Tensor) -> torch.Tensor:
    """Aᵀ A of rows [sets, n, d], float64."""
    wide = rows.double()
    return wide.mT @ wide


@lru_cache(maxsize=8)
def _sketch(seed: int, n: int, width: int) -> torch.Tensor:
    """The random directions [n, width] that every set is sketched with."""
    return random_normal(seed, n * width).reshape(n, width)


def ranks(variances: torch.Tensor, ratio: float, cap: int) -> torch.Tensor:
    """The fewest components with `ratio` of the variance [sets], at most `cap` (0: no cap), at
    least 1.
    """
    total = variances.sum(dim=-1, keepdim=True)
    enough = variances.cumsum(dim=-1) >= ratio * total * (1 - 1e-6)
    enough[..., -1] = True
    found = enough.int().argmax(dim=-1) + 1
    found[total[..., 0] <= 1e-30] = 1
    return found.clamp_max(cap) if cap else found
