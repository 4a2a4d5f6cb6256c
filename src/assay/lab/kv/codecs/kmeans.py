"""Principal components and spherical K-means of many small sets of rows at once, as the `kakeya` codec uses them."""

from __future__ import annotations

from functools import lru_cache

import torch

from assay.lab.quant.scalar import random_normal, random_words

OVERSAMPLE, POWER_ITERATIONS = 8, 2
SEED_OF_SKETCH = 0x9E3779B97F4A7C15


def exact_basis(centred: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[sets, n, d] → rows of components [sets, d, d] by falling variance, and the variances [sets, d]."""
    if centred.is_cuda:
        gram = _gram(centred)
        values, vectors = (t.float() for t in eigh_batched(gram / max(1, centred.shape[1])))
    else:
        values, vectors = torch.linalg.eigh(centred.mT @ centred / max(1, centred.shape[1]))
    return vectors.flip(-1).mT.contiguous(), values.flip(-1).clamp_min(0)


def random_basis(centred: torch.Tensor, rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by a random sketch (Halko, Martinsson, Tropp 2011) with power iterations: [sets, rank, d].

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


def random_basis_of_grams(centred: torch.Tensor, omega: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`random_basis` by products and [d, d] matrices alone: the form for a GPU, where batched QR and SVD are loops.

    With A the centred rows and S = Aᵀ A, one power iteration takes the span of Z to that of S Z, and the SVD of A Q is
    the eigendecomposition of Qᵀ S Q. Squares are kept in float64, which loses nothing of float32 rows.
    """

    gram = _gram(centred)
    q = _orthonormal(centred.double().mT @ omega.double())
    for _ in range(POWER_ITERATIONS):
        q = _orthonormal(gram @ q)
    values, vectors = eigh_batched(q.mT @ gram @ q)
    rows = (q @ vectors.flip(-1)[..., :rank]).mT
    return rows.float().contiguous(), (values.flip(-1).clamp_min(0) / centred.shape[1])[:, :rank].float()


def _orthonormal(z: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the columns of z [sets, d, r], float64: Cholesky QR, three times (Fukaya and others 2020).

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
    """The fewest components with `ratio` of the variance [sets], at most `cap` (0: no cap), at least 1."""
    total = variances.sum(dim=-1, keepdim=True)
    enough = variances.cumsum(dim=-1) >= ratio * total * (1 - 1e-6)
    enough[..., -1] = True
    found = enough.int().argmax(dim=-1) + 1
    found[total[..., 0] <= 1e-30] = 1
    return found.clamp_max(cap) if cap else found


def spherical_centres(rows: torch.Tensor, k: int, seed: int, iterations: int = 32) -> torch.Tensor:
    """Unit centres [sets, k, r] of the directions of rows [sets, n, r], a direction and its opposite being one.

    Starts farthest-first (by signed cosine) from a row drawn by `seed`; then a row belongs to the centre of largest
    |cosine| and a centre becomes the normalised sum of its rows, turned to its side. A centre without rows stays.
    """
    length = rows.norm(dim=-1, keepdim=True)
    real = length > 1e-20
    unit = torch.where(real, rows / length.clamp_min(1e-20), 0.0)
    sets, n, _ = rows.shape
    chosen = torch.full((sets,), int(random_words(seed, 1)[0] % max(n, 1)), device=rows.device)
    every = torch.arange(sets, device=rows.device)
    centres, nearest = [unit[every, chosen]], torch.full((sets, n), -2.0, device=rows.device)
    for _ in range(k - 1):
        cosine = (unit @ centres[-1][..., None])[..., 0]
        nearest = torch.maximum(nearest, cosine)
        chosen = torch.where(real[..., 0], nearest, 2.0).argmin(dim=-1)
        centres.append(unit[every, chosen])
    found, before = torch.stack(centres, dim=1), None
    for turn in range(iterations):
        cosine = unit @ found.mT
        member = cosine.abs().argmax(dim=-1)
        # Iterating on changes nothing where no row moves; a GPU that others share is asked less often, as each answer waits.
        if before is not None and not (unit.is_cuda and turn % 8) and torch.equal(member, before):
            break
        before = member
        sums = _sums(unit, member, cosine)
        size = sums.norm(dim=-1, keepdim=True)
        found = torch.where(size > 1e-12, sums / size.clamp_min(1e-12), found)
    return found


def _sums(unit: torch.Tensor, member: torch.Tensor, cosine: torch.Tensor) -> torch.Tensor:
    """The rows of each centre, turned to its side and added up [sets, k, r].

    A GPU has to sort to add in a fixed order, so there memberships become a matrix and the sums one product.
    """
    side = cosine.gather(-1, member[..., None]).sign()
    if unit.is_cuda:
        return torch.zeros_like(cosine).scatter(-1, member[..., None], side).mT @ unit
    sets = torch.arange(unit.shape[0])[:, None].expand_as(member)
    sums = torch.zeros(unit.shape[0], cosine.shape[-1], unit.shape[-1])
    return sums.index_put((sets, member), unit * side, accumulate=True)


# Eigenvectors of many small symmetric matrices at once, by Jacobi rotations that are plain batched products.
#
# LAPACK's routines as torch calls them on a GPU go through a batch one matrix after the other once it is larger than 32;
# thousands of blocks of a cache then take seconds. Here each round turns n / 2 disjoint pairs of coordinates of every
# matrix (round-robin order, Brent and Luk, SIAM J. Sci. Stat. Comput. 6 (1985) 69), n − 1 rounds are a sweep over all
# pairs, and after six to nine sweeps nothing is left beside the diagonal.

SWEEPS = 30
"""More than is ever needed: convergence is quadratic."""


def eigh_batched(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `torch.linalg.eigh` of symmetric [sets, n, n]: values [sets, n] rising, vectors in columns [sets, n, n].

    Stops when the largest value beside the diagonal is below n rounding errors of the largest of the matrix.
    """
    sets, n, _ = matrices.shape
    odd = n % 2
    # A coordinate more, with nothing in it, makes the number of pairs whole.
    a = torch.nn.functional.pad(matrices, (0, odd, 0, odd))
    width = n + odd
    half = width // 2
    vectors = torch.eye(width, dtype=a.dtype, device=a.device).repeat(sets, 1, 1)
    pair, stay, cross = (t.to(a.device) for t in _round(half))
    stay, cross = stay.to(a.dtype), cross.to(a.dtype)
    limit = width * torch.finfo(a.dtype).eps * a.abs().amax(dim=(1, 2))
    for _ in range(SWEEPS):
        if width < 2 or bool((_beside(a) <= limit).all()):
            break
        for _ in range(width - 1):
            angle = _angles(a, half)[:, None, pair]
            turn = angle.cos() * stay + angle.sin() * cross
            a = turn.mT @ a @ turn
            vectors = vectors @ turn
    values, vectors = a.diagonal(dim1=1, dim2=2), vectors[:, :n]
    if odd:
        # The empty coordinate never mixes with others; it goes to the end, where it is cut off.
        empty = vectors.abs().amax(dim=1) == 0
        values = torch.where(empty, torch.inf, values)
    values, rising = values.sort(dim=-1)
    vectors = vectors.gather(2, rising[:, None].expand(-1, n, -1))
    return values[:, :n], vectors[..., :n]


def _angles(a: torch.Tensor, half: int) -> torch.Tensor:
    """The angles [sets, half], at most π / 4, that coordinates i and half + i are turned by to make a[i, half + i] 0."""
    first, second = a.diagonal(dim1=1, dim2=2).split(half, dim=1)
    between = a[:, :half, half:].diagonal(dim1=1, dim2=2)
    # 0 / 0 is a pair with nothing between and nothing to choose; x / 0 is π / 4.
    ratio = (2 * between / (second - first)).nan_to_num(0.0, torch.inf, -torch.inf)
    return ratio.atan() / 2


def _round(half: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which pair each coordinate of the next round comes from [n], and the matrices [n, n] that carry cosines and sines.

    The rotation of coordinates i and half + i by θ has cos θ on the diagonal, sin θ at (i, half + i) and −sin θ at
    (half + i, i). Its columns are put into the order of the next round: all but the first move on by one around the
    table.
    """
    top, bottom = list(range(half)), list(range(half, 2 * half))
    order = torch.tensor(top + bottom if half == 1 else [0, half, *top[1:-1], *bottom[1:], top[-1]])
    eye = torch.eye(2 * half)
    swapped = torch.cat([-eye[half:], eye[:half]]).T
    return order % half, eye[:, order], swapped[:, order]


def _beside(a: torch.Tensor) -> torch.Tensor:
    """The largest value beside the diagonal of each matrix [sets]."""
    return (a - torch.diag_embed(a.diagonal(dim1=1, dim2=2))).abs().amax(dim=(1, 2))
