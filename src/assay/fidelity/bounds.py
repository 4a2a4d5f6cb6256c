"""The figures of a candidate that is known at a few ids only: what stays open, what is possible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from assay.fidelity.estimates import mean_of
from assay.fidelity.observation import BoundedObservation, WindowObservation, pooled
from assay.stats import ClusterEstimate, Interval, cluster_proportion


@dataclass(frozen=True)
class Bounds:
    """Beside the lower bound of KL: means over tokens of what was left over on both sides, and what
    it allows.

    `upper` is infinite as soon as nothing bounds KL from above at one token. `certain` and
    `possible` are the share of tokens that certainly, and that possibly, have the same likeliest
    token on both sides; `tv` reaches from what the total variation is at least to what it is at
    most, its value is the former.
    """

    tail_reference: float
    tail_candidate: float
    upper: float
    tv_lo: float
    tv_hi: float
    tv: ClusterEstimate
    certain: ClusterEstimate
    possible: ClusterEstimate

    @property
    def top1_exact(self) -> bool:
        """Whether the likeliest token of the candidate was known throughout."""
        return self.certain.value == self.possible.value

    @property
    def top1(self) -> ClusterEstimate:
        """The share as it can be judged: its interval reaches from the lower end of what is certain
        to the upper end of what is possible. The value is the certain share."""
        if self.top1_exact:
            return self.certain
        interval = Interval(self.certain.value, self.certain.interval.lo, self.possible.interval.hi)
        return replace(self.certain, interval=interval)

    def kld_json(self) -> dict[str, Any]:
        """What `results.kld` says more; no upper bound is null."""
        return {
            "kind": "lower_bound",
            "unresolved_mass_reference": self.tail_reference,
            "unresolved_mass_candidate": self.tail_candidate,
            "upper": self.upper if math.isfinite(self.upper) else None,
            "total_variation": {"lo": self.tv_lo, "hi": self.tv_hi},
        }

    def top1_json(self) -> dict[str, Any]:
        """What `results.top1_pct` says more; where only bounds are known, no value is given."""
        if self.top1_exact:
            return {"kind": "exact"}
        return {
            "kind": "bounds",
            "value": None,
            "certain": 100 * self.certain.value,
            "possible": 100 * self.possible.value,
        }


def bounds_of(seen: Sequence[WindowObservation]) -> Bounds | None:
    """The bounds of a candidate; None where its whole distributions were seen."""
    bounded = [w for w in seen if isinstance(w, BoundedObservation)]
    if not bounded:
        return None
    some = [w for w in bounded if w.finite.any()]
    counts = [int(w.finite.sum()) for w in some]
    tv = mean_of(some, [w.tv_lo for w in some])
    most = mean_of(some, [w.tv_hi for w in some]).interval.hi
    return Bounds(
        tail_reference=float(pooled(some, "tail_ref").mean()),
        tail_candidate=float(pooled(some, "tail_cand").mean()),
        upper=float(pooled(some, "kl_upper").mean()),
        tv_lo=float(pooled(some, "tv_lo").mean()),
        tv_hi=float(pooled(some, "tv_hi").mean()),
        tv=replace(tv, interval=Interval(tv.value, tv.interval.lo, most)),
        certain=cluster_proportion([int(w.top1[w.finite].sum()) for w in some], counts),
        possible=cluster_proportion([int(w.top1_possible[w.finite].sum()) for w in some], counts),
    )
