"""Find where a sequence repeats itself with a fixed period: compare it with itself, shifted.

A sequence x has period p on a stretch where x[i] = x[i − p]. For each p up to `max_period` one
vectorised comparison finds all such stretches, so the cost is max_period · n, linear in the
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.coherence.arrays import has_stretch, true_stretches


@dataclass(frozen=True)
class Run:
    """A stretch [start, end) of a sequence, in units, that repeats with `period`."""

    period: int
    start: int
    end: int

    @property
    def repeats(self) -> float:
        """How many times the unit stands there, the last time perhaps in part."""
        return (self.end - self.start) / self.period


def periodic_runs(
    ids: NDArray[Any], *, max_period: int = 64, min_repeats: int = 4, min_length: int = 1
) -> Sequence[Run]:
    """Maximal runs with period ≤ `max_period`, at least `min_repeats` periods and `min_length`
    units long.

    A run already explained by a smaller period is left out (aaaa has period 1, not 2). Order: by
    period, start.
    """
    covered = np.zeros(len(ids) + 1, dtype=np.int64)
    runs: list[Run] = []
    for period in range(1, min(max_period, len(ids) // min_repeats) + 1):
        need = max(min_repeats * period, min_length)
        same = ids[period:] == ids[:-period]
        if not has_stretch(same, need - period):
            continue
        starts, ends = true_stretches(same)
        ends = ends + period
        keep = ends - starts >= need
        if not keep.any():
            continue
        seen = np.concatenate(([0], np.cumsum(covered[:-1] > 0)))
        for start, end in zip(starts[keep].tolist(), ends[keep].tolist(), strict=True):
            if seen[end] - seen[start] < 0.9 * (end - start):
                runs.append(Run(period, start, end))
                covered[start:end] = 1
    return runs
