"""Spherical K-means of many small sets of rows at once."""

from __future__ import annotations

import torch

from assay_lab.quantisation.randomness import random_words


def spherical_centres(rows: torch.Tensor, k: int, seed: int, iterations: int = 32) -> torch.Tensor:
    """Unit centres [sets, k, r] of the directions of rows [sets, n, r], a direction and its
    opposite being one.

    Starts farthest-first (by signed cosine) from a row drawn by `seed`; then a row belongs to the
    centre of largest
    |cosine| and a centre becomes the normalised sum of its rows, turned to its side. A centre
      without rows stays.
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
        # Iterating on changes nothing where no row moves; a GPU that others share is asked less
        # often, as each answer waits.
        if before is not None and not (unit.is_cuda and turn % 8) and torch.equal(member, before):
            break
        before = member
        sums = _sums(unit, member, cosine)
        size = sums.norm(dim=-1, keepdim=True)
        found = torch.where(size > 1e-12, sums / size.clamp_min(1e-12), found)
    return found


def _sums(unit: torch.Tensor, member: torch.Tensor, cosine: torch.Tensor) -> torch.Tensor:
    """The rows of each centre, turned to its side and added up [sets, k, r].

    A GPU has to sort to add in a fixed order, so there memberships become a matrix and the sums one
    product.
    """
    side = cosine.gather(-1, member[..., None]).sign()
    if unit.is_cuda:
        return torch.zeros_like(cosine).scatter(-1, member[..., None], side).mT @ unit
    sets = torch.arange(unit.shape[0])[:, None].expand_as(member)
    sums = torch.zeros(unit.shape[0], cosine.shape[-1], unit.shape[-1])
    return sums.index_put((sets, member), unit * side, accumulate=True)
