"""What each stage of a codec loses, and how the values are distributed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from assay_lab.kv.codecs.base import Stage
    from assay_lab.kv.stream_coder import FittedCodec

MOST = 200_000
"""Values that are looked at; of more, every so many-th."""


@dataclass(frozen=True)
class Distribution:
    """Excess kurtosis (normal: 0), Wasserstein-2 and Kolmogorov-Smirnov distance to the normal
    distribution.

    W₂ is in standard deviations: about 0.21 for uniform values and 0.18 for Laplace ones; KS is the
    largest difference of the distribution functions. None where all values are the same.
    """

    kurtosis: float | None
    w2: float | None
    ks: float | None
    values: int


def distribution(values: torch.Tensor) -> Distribution:
    """Of values of any shape; those that are not finite are left out.

    W₂² = ∫ (F⁻¹(u) − Φ⁻¹(u))² du = 1 + mean z² − 2 Σ z₍ᵢ₎ (φ(aᵢ₋₁) − φ(aᵢ)) with z sorted and aᵢ =
    Φ⁻¹(i / n), exactly.
    """
    import numpy as np
    import torch
    from scipy.special import ndtr, ndtri

    flat = values.detach().flatten()
    flat = flat[torch.isfinite(flat)]
    flat = flat[:: max(1, flat.numel() // MOST)].double().cpu()
    n = flat.numel()
    # Rounding alone gives values that are all the same some spread.
    if n < 2 or float(flat.std()) <= 1e-9 * float(flat.abs().max()):
        return Distribution(None, None, None, n)
    z = np.sort(((flat - flat.mean()) / flat.std(correction=0)).numpy())
    density = np.exp(-0.5 * ndtri(np.arange(n + 1) / n) ** 2) / np.sqrt(2 * np.pi)
    square = 1 + float((z**2).mean()) - 2 * float(z @ -np.diff(density))
    normal, rank = ndtr(z), np.arange(n + 1) / n
    ks = max(float((rank[1:] - normal).max()), float((normal - rank[:-1]).max()))
    return Distribution(float((z**4).mean()) - 3, max(square, 0.0) ** 0.5, ks, n)


FAR = 4.0
"""Standard deviations beyond which a value is an outlier: 0.006 % of normal ones."""


@dataclass(frozen=True)
class StageError:
    """Mean over heads of the error after one stage, what that stage added, what entered the next,
    and other figures.
    """

    name: str
    relative_mse: float
    added: float
    values: Distribution | None
    figures: dict[str, float]


def coded(
    fitted: FittedCodec, x: torch.Tensor, predictors: torch.Tensor | None = None
) -> torch.Tensor:
    """What comes back of each window [windows, heads, tokens, head_dim], its exact ends as they
    were, float32.

    `predictors` [windows, predictor heads, tokens, head_dim]: what a decoder has of the streams
    that the codec predicts from.
    """
    import torch

    lo, hi = span(fitted, x.shape[2])
    result = x.float().clone()
    if hi > lo:
        nears = (
            [None] * x.shape[0] if predictors is None else [near[:, lo:hi] for near in predictors]
        )
        result[:, :, lo:hi] = torch.stack(
            [
                fitted.reconstruct(own[:, lo:hi], near)
                for own, near in zip(x.float(), nears, strict=True)
            ]
        )
    return result


def span(fitted: FittedCodec, tokens: int) -> tuple[int, int]:
    """The tokens of a sequence that are coded: not the exact ones at both ends."""
    lo = min(fitted.exact_first, tokens)
    return lo, max(lo, tokens - fitted.exact_last)


def spread(x: torch.Tensor) -> torch.Tensor:
    """Σ (x − mean of its channel)² of each head [heads], over windows and tokens."""
    return (x - x.mean(dim=(0, 2), keepdim=True)).square().sum(dim=(0, 2, 3)).clamp_min(1e-30)


def relative_mse(x: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """Squared error over variance of each head [heads]."""
    return (x - back).square().sum(dim=(0, 2, 3)) / spread(x)


def outlier_share(x: torch.Tensor) -> torch.Tensor:
    """Share of each head's values [heads] more than `FAR` deviations of the head from the mean of
    their channel.
    """
    import torch

    off = x - x.mean(dim=(0, 2), keepdim=True)
    deviation = off.square().mean(dim=(0, 2, 3), keepdim=True).sqrt()
    return (off.abs() > FAR * deviation).to(torch.float32).mean(dim=(0, 2, 3))


def stage_errors(
    fitted: FittedCodec, x: torch.Tensor, predictors: torch.Tensor | None = None
) -> list[StageError]:
    """The stages of the coded tokens of all windows; none where the codec is one step. `predictors`
    as in `coded`.
    """
    import torch

    lo, hi = span(fitted, x.shape[2])
    whole = spread(x[:, :, lo:hi])
    lost: dict[str, torch.Tensor] = {}
    entering: dict[str, list[torch.Tensor]] = {}
    figures: dict[str, dict[str, float]] = {}
    tokens = 0
    size = fitted.granularity
    batches = (
        itertools.repeat(None) if predictors is None else _batches(predictors[:, :, lo:hi], size)
    )
    for blocks, near in zip(_batches(x[:, :, lo:hi], size), batches, strict=False):
        count = blocks.shape[0] * blocks.shape[2]
        tokens += count
        for stage in fitted.coder.stages(blocks, near):
            error = (blocks - stage.decoded).square().sum(dim=(0, 2, 3))
            lost[stage.name] = lost.get(stage.name, torch.zeros_like(error)) + error
            kept = figures.setdefault(stage.name, {})
            for name, value in stage.figures.items():
                kept[name] = kept.get(name, 0.0) + float(value.mean()) * count
            if stage.values is not None:
                entering.setdefault(stage.name, []).append(_standard(stage, x.shape[0]))
    found, before = [], 0.0
    for name, total in lost.items():
        error_now = float((total / whole).mean())
        values = distribution(torch.cat(entering[name])) if name in entering else None
        shares = {key: value / tokens for key, value in figures[name].items()}
        found.append(StageError(name, error_now, error_now - before, values, shares))
        before = error_now
    return found


def _batches(x: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Windows as blocks [blocks, heads, tokens, head_dim] of `size` tokens, then what is left of
    each.
    """
    if size == 1:
        yield x
        return
    whole = x.shape[2] // size * size
    for lo in range(0, whole, size):
        yield x[:, :, lo : lo + size]
    if whole < x.shape[2]:
        yield x[:, :, whole:]


def _standard(stage: Stage, windows: int) -> torch.Tensor:
    """Some of the values that leave a stage, flat."""
    import torch

    flat = (stage.values if stage.values is not None else torch.empty(0)).flatten()
    return flat[:: max(1, flat.numel() * windows // MOST)].float().cpu()
