"""Two candidates of one run compared window by window, where what the windows share cancels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.fidelity.observation import WindowObservation, by_block
from assay.fidelity.result import CandidateResult
from assay.stats.multiplicity import holm
from assay.stats.non_inferiority import PairedDifference, paired_difference


@dataclass(frozen=True)
class Pair:
    """Differences first − second of mean KL and of mean NLL, in nats, with p-values adjusted over
    all pairs.

    `kl` is None where one of the two is a server, of whose KL only a lower bound is known.
    """

    first: str
    second: str
    dnll: PairedDifference
    dnll_p_holm: float
    kl: PairedDifference | None = None
    kl_p_holm: float = math.nan

    def to_json(self) -> dict[str, Any]:
        """One of `results.pairs`."""
        return {
            "candidates": [self.first, self.second],
            "kld": _json(self.kl, self.kl_p_holm) if self.kl else None,
            "dnll": _json(self.dnll, self.dnll_p_holm),
        }


def all_pairs(results: Sequence[CandidateResult]) -> list[Pair]:
    """Every two candidates that were scored on the same windows, with Holm's correction for each
    metric.
    """
    pairs = [
        (a, b, common)
        for i, a in enumerate(results)
        for b in results[i + 1 :]
        if (common := common_windows(a, b))
    ]
    dnll = [_difference(common, "dnll") for _, _, common in pairs]
    kl = [
        None if a.summary.bounds or b.summary.bounds else _difference(common, "kl")
        for a, b, common in pairs
    ]
    adjusted_dnll = holm([_known_pairs(d) for d in dnll])
    adjusted_kl = iter(holm([_known_pairs(d) for d in kl if d]))
    return [
        Pair(a.label, b.label, d, p, k, next(adjusted_kl) if k else math.nan)
        for (a, b, _), d, p, k in zip(pairs, dnll, adjusted_dnll, kl, strict=True)
    ]


Common = list[tuple[WindowObservation, WindowObservation, "NDArray[np.bool_]"]]


def common_windows(a: CandidateResult, b: CandidateResult) -> Common:
    """For each cluster of windows that both scored, which of its tokens are finite and within reach
    on both sides.
    """
    both = min(len(a.seen), len(b.seen))
    return [
        (x, y, some)
        for x, y in zip(*(by_block(r.seen[:both], r.blocks) for r in (a, b)), strict=True)
        if (some := x.finite & y.finite & np.isfinite(x.kl) & np.isfinite(y.kl)).any()
    ]


def _difference(common: Common, name: str) -> PairedDifference:
    sums = [
        (float(getattr(x, name)[some].sum()), float(getattr(y, name)[some].sum()), int(some.sum()))
        for x, y, some in common
    ]
    first, second, tokens = zip(*sums, strict=True)
    return paired_difference(first, second, tokens)


def _known_pairs(difference: PairedDifference) -> float:
    """One window gives no p-value; it is no evidence of a difference."""
    return 1.0 if math.isnan(difference.p_value) else difference.p_value


def _json(difference: PairedDifference, p_holm: float) -> dict[str, float]:
    d = difference.difference
    return {"value": d.value, "lo": d.interval.lo, "hi": d.interval.hi, "p_holm": p_holm}
