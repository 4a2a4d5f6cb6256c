"""Quantiles with intervals by a bootstrap of whole clusters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from assay.stats.interval import Interval, check_confidence

_BLOCK = 1 << 21
"""Numbers worked on at once: bounds the memory at some tens of MB for any number of clusters.
"""


@dataclass(frozen=True)
class Resampling:
    """How often and from which seed clusters are drawn; part of the result, so that it can be had
    again.
    """

    draws: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise ValueError(f"need at least one draw, got {self.draws}")


def resampled_counts(clusters: int, resampling: Resampling) -> Iterator[NDArray[np.float64]]:
    """Blocks [b, G] of counts: how often each cluster is in a draw. Equal seeds give
    equal counts.
    """
    rng = np.random.default_rng(resampling.seed)
    rows = max(1, _BLOCK // clusters)
    for lo in range(0, resampling.draws, rows):
        size = min(rows, resampling.draws - lo)
        picks = rng.integers(0, clusters, size=(size, clusters))
        flat = picks + np.arange(size)[:, None] * clusters
        counts = np.bincount(flat.ravel(), minlength=size * clusters)
        yield counts.reshape(size, clusters).astype(np.float64)


def bootstrap_quantiles(
    groups: Sequence[ArrayLike],
    probabilities: Sequence[float],
    confidence: float = 0.95,
    resampling: Resampling | None = None,
) -> list[Interval]:
    """Quantiles of all observations, given as one list for each cluster, with percentile intervals.

    The quantile of p is the smallest observation that at least the share p does not exceed (the
    inverse of the distribution function, no interpolation), exact in every draw. +∞ is an ordinary
    value; NaN is a ValueError.
    """
    check_confidence(confidence)
    arrays = [np.asarray(group, dtype=np.float64).ravel() for group in groups]
    arrays = [a for a in arrays if a.size]
    if not arrays:
        raise ValueError("there is no observation")
    if any(not 0.0 < p <= 1.0 for p in probabilities):
        raise ValueError(f"probabilities must lie in (0, 1], got {list(probabilities)}")
    values = np.concatenate(arrays)
    if np.isnan(values).any():
        raise ValueError("NaN has no rank: leave it out")
    order = np.argsort(values, kind="stable")
    ranked = values[order]
    cluster = np.repeat(np.arange(len(arrays)), [a.size for a in arrays])[order]
    ranks = _RankedClusters(cluster, len(arrays))
    drawn = [
        [ranked[ranks.at(counts, p)] for p in probabilities]
        for counts in resampled_counts(len(arrays), resampling or Resampling())
    ]
    result = []
    for i, p in enumerate(probabilities):
        point = float(ranked[_target(np.float64(values.size), p) - 1])
        result.append(
            _percentiles(point, np.concatenate([block[i] for block in drawn]), confidence)
        )
    return result


class _RankedClusters:
    """Weighted ranks among n sorted observations, where the weight of one is the count of its
    cluster.

    The cumulated weight is known at every `step`-th rank by one matrix product; only the block that
    holds the wanted rank is added up one by one: O(G √n) a draw in place of O(n).
    """

    def __init__(self, cluster: NDArray[np.int64], clusters: int) -> None:
        n = cluster.size
        self.step = max(1, math.isqrt(n))
        blocks = -(-n // self.step)
        flat = cluster * blocks + np.arange(n) // self.step
        per_block = np.bincount(flat, minlength=clusters * blocks).reshape(clusters, blocks)
        self.cumulated = per_block.cumsum(axis=1).astype(np.float64)
        # Padding points at an extra cluster that is never drawn.
        members = np.full(blocks * self.step, clusters)
        members[:n] = cluster
        self.members = members.reshape(blocks, self.step)

    def at(self, counts: NDArray[np.float64], p: float) -> NDArray[np.int64]:
        """Index of the p-quantile in each draw of a block of counts [b, G]."""
        rows = max(1, _BLOCK // max(self.step, self.cumulated.shape[1]))
        return np.concatenate(
            [self._at(counts[lo : lo + rows], p) for lo in range(0, len(counts), rows)]
        )

    def _at(self, counts: NDArray[np.float64], p: float) -> NDArray[np.int64]:
        weight = counts @ self.cumulated  # [b, blocks], exact: whole numbers far below 2^53
        target = _target(weight[:, -1], p)
        block = (weight < target[:, None]).sum(axis=1)
        draw = np.arange(len(counts))
        before = np.where(block > 0, weight[draw, block - 1], 0.0)
        padded = np.pad(counts, ((0, 0), (0, 1)))
        within = padded[draw[:, None], self.members[block]].cumsum(axis=1) + before[:, None]
        found: NDArray[np.int64] = block * self.step + (within < target[:, None]).sum(axis=1)
        return found


def _target(total: NDArray[np.float64] | np.float64, p: float) -> NDArray[np.int64]:
    """The rank of the p-quantile among `total`: ⌈p · total⌉, at least 1, safe from the rounding of
    p · total.
    """
    wanted = np.asarray(np.ceil(p * total * (1 - 1e-12)), dtype=np.int64)
    return np.maximum(wanted, 1)


def _percentiles(value: float, draws: NDArray[np.float64], confidence: float) -> Interval:
    tail = (1 - check_confidence(confidence)) / 2
    # No interpolation: between two infinite draws it would give NaN.
    lo, hi = np.quantile(draws, [tail, 1 - tail], method="inverted_cdf")
    return Interval(value, float(lo), float(hi))
