"""How finely `pca` quantises, and under which distributions: learnt from samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from assay_lab.kv.codecs.cheapest_numbers import nearest
from assay_lab.kv.codecs.distributions import (
    ESCAPE,
    RADIUS,
    best_distributions,
    code_lengths,
    histogram,
)
from assay_lab.kv.codecs.pca_entropy import RangeCoder
from assay_lab.kv.codecs.samples import LayerStream
from assay_lab.kv.klt import Predictor, Spectrum
from assay_lab.trellis import quantisers, trellis

_FIT_TOKENS = 4096
_FIRST_TOKENS = 1024
_SEARCH_TOKENS = 1024


@dataclass(frozen=True)
class RangeSettings:
    """How numbers are chosen: token classes, bits weighed against squared steps, the smallest
    deviation that is coded in steps, states of the trellis (0: one quantiser)."""

    classes: int
    rdo: float
    smallest: float
    states: int = 0


def fit_range(
    site: LayerStream,
    found: Spectrum,
    rows: torch.Tensor,
    step: float,
    settings: RangeSettings,
    predictor: Predictor | None,
) -> RangeCoder:
    """Laws, classes and decoded values from sampled rows [n, width]."""
    classes, states = settings.classes, settings.states
    transform = found.with_step(step, settings.smallest)
    stride = max(1, rows.shape[0] // _FIT_TOKENS)
    whole = transform.forward(rows[::stride].float())
    # Laws and classes find each other on some of the tokens; the last turn takes all.
    c = whole[:: max(1, whole.shape[0] // _FIRST_TOKENS)]
    numbers = c.round().clamp(-RADIUS, RADIUS).long()
    if states:
        numbers = nearest(c, RADIUS, trellis(states))
    loudness = c.abs().clamp_max(64).sum(dim=-1)
    kinds = (loudness.argsort().argsort() * classes // max(1, c.shape[0])).clamp_max(classes - 1)
    for turn in range(3):
        odds = (np.bincount(kinds.numpy(), minlength=classes) + 1.0).astype(np.float32)
        own = {
            "laws": _learnt_distributions(numbers, kinds, settings),
            "odds": odds / odds.sum(),
            "shrink": np.zeros((4 if states else 2, transform.rank), np.int8),
        }
        coder = RangeCoder(site, transform, predictor, own, settings.rdo if turn else 0.0, states)
        c = whole if turn else c
        numbers, kinds = coder.choose(c)
    own["shrink"] = _shrinkage(c, numbers, settings)
    fitted = RangeCoder(site, transform, predictor, own, settings.rdo, states)
    fitted.calibrated_bits = float(fitted.lengths(numbers, kinds).mean()) / site.width
    return fitted


def step_for_bits(found: Spectrum, rows: torch.Tensor, bits: float, unit: float) -> float:
    """The step whose nearest numbers take `bits` a value under one distribution per channel: secant
    steps in log₂ step.
    """
    transform = found.with_step(unit, 0.0)
    c = transform.forward(rows[:: max(1, rows.shape[0] // _SEARCH_TOKENS)].float())
    lengths = code_lengths().astype(np.float64).T

    def spent(step: float) -> float:
        numbers = (c * (unit / step)).round().clamp(-RADIUS, RADIUS).long().numpy()
        total = float((histogram(numbers) @ lengths).min(axis=1).sum())
        return total / int(c.shape[0] * found.mean.numel())

    step, slope = float(unit * 2.0 ** (2.0 - bits)), -0.8
    last: tuple[float, float] | None = None
    for _ in range(10):
        excess = spent(step) - bits
        if abs(excess) < 0.003 * bits:
            break
        at = float(np.log2(step))
        if last is not None and at != last[0]:
            slope = min(-0.05, max(-1.1, (excess - last[1]) / (at - last[0])))
        last = (at, excess)
        step *= float(2.0 ** max(-2.0, min(2.0, -excess / slope)))
    return step


def _learnt_distributions(
    numbers: torch.Tensor, kinds: torch.Tensor, settings: RangeSettings
) -> np.ndarray[Any, Any]:
    """The distribution of each channel, by quantiser and token class, for numbers [n, rank]: uint8
    [quantisers · classes, rank]."""
    k, kind = numbers.numpy(), kinds.numpy()
    found = []
    for quantiser, own in enumerate(_by_quantiser(numbers, settings)):
        taken = own.numpy()
        prior = histogram(k, taken) / np.maximum(1, taken.sum(axis=0))[:, None]
        # A class borrows from all: a channel it hardly saw keeps a distribution.
        counts = [
            histogram(k[kind == i], taken[kind == i]) + 2 * prior for i in range(settings.classes)
        ]
        found += [best_distributions(c, quantiser) for c in counts]
    return np.stack(found)


def _by_quantiser(numbers: torch.Tensor, settings: RangeSettings) -> list[torch.Tensor]:
    """Which of the numbers [n, rank] each quantiser gave."""
    if not settings.states:
        return [torch.ones_like(numbers, dtype=torch.bool)]
    second = quantisers(numbers, trellis(settings.states)) > 0
    return [~second, second]


def _shrinkage(
    c: torch.Tensor, numbers: torch.Tensor, settings: RangeSettings
) -> np.ndarray[Any, Any]:
    """How far the mean of |c| is below the value of |k|, for |k| = 1 and beyond, in 1/256:
    int8 [2 · quantisers, rank]."""
    size = numbers.abs()
    rows = []
    for quantiser, own in enumerate(_by_quantiser(numbers, settings)):
        for chosen in (size == 1, (size > 1) & (size < ESCAPE)):
            taken = chosen & own
            gap = (size - 0.5 * quantiser - c * numbers.sign()) * taken
            # A few pretended samples without a gap hold rare cells at 0.
            rows.append(gap.sum(dim=0) / (taken.sum(dim=0) + 8))
    result: np.ndarray[Any, Any] = (
        (torch.stack(rows) * 256).round().clamp(-127, 127).to(torch.int8).numpy()
    )
    return result
