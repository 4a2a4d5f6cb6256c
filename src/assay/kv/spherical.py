"""Principal components and spherical K-means of many small sets of rows at once, as the `kakeya` codec uses them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from assay.quant.hadamard import random_normal, random_words

if TYPE_CHECKING:
    import torch

OVERSAMPLE, POWER_ITERATIONS = 8, 2
SEED_OF_SKETCH = 0x9E3779B97F4A7C15


def exact_basis(centred: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[sets, n, d] → rows of components [sets, d, d] by falling variance, and the variances [sets, d]."""
    import torch

    values, vectors = torch.linalg.eigh(centred.mT @ centred / max(1, centred.shape[1]))
    return vectors.flip(-1).mT.contiguous(), values.flip(-1).clamp_min(0)


def random_basis(centred: torch.Tensor, rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by a random sketch (Halko, Martinsson, Tropp 2011) with power iterations: [sets, rank, d].

    Fewer rows come back where the sets are smaller. Variances are those inside the sketch.
    """
    import torch

    _, n, d = centred.shape
    rank = min(rank, d, n)
    width = min(rank + OVERSAMPLE, d, n)
    omega = random_normal(seed ^ SEED_OF_SKETCH, n * width).reshape(n, width).to(centred.device)
    sketch = centred.mT @ omega
    for _ in range(POWER_ITERATIONS):
        left = torch.linalg.qr(centred @ sketch)[0]
        sketch = torch.linalg.qr(centred.mT @ left)[0]
    q = torch.linalg.qr(sketch)[0]
    _, singular, right = torch.linalg.svd(centred @ q, full_matrices=False)
    rows = right @ q.mT
    return rows[:, :rank].contiguous(), (singular.square() / n)[:, :rank]


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
    import torch

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
    for _ in range(iterations):
        cosine = unit @ found.mT
        member = cosine.abs().argmax(dim=-1)
        if before is not None and torch.equal(member, before):
            break
        before = member
        side = cosine.gather(-1, member[..., None]).sign()
        sums = torch.zeros_like(found).index_put(
            (every[:, None].expand_as(member), member), unit * side, accumulate=True
        )
        size = sums.norm(dim=-1, keepdim=True)
        found = torch.where(size > 1e-12, sums / size.clamp_min(1e-12), found)
    return found
