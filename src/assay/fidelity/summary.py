"""From the statistics of every token to the figures of a comparison, with their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from assay.fidelity.bounded_summary import Bounds, bounds_of
from assay.fidelity.observations import WindowObservation, pooled
from assay.stats.bootstrap import Resampling, bootstrap_quantiles
from assay.stats.cluster import ClusterEstimate, cluster_mean, cluster_ratio
from assay.stats.equivalence import Judgement, Margins, judge
from assay.stats.interval import Interval
from assay.stats.proportion import cluster_proportion

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True)
class Summary:
    """The figures of one candidate. Means are over finite tokens, intervals by window.

    `dnll` is the mean of NLL_candidate − NLL_reference, `kl` and `kl_rev` in nats, `top1` a share, `dp` the mean of
    |p_candidate − p_reference| of the token that came. `quantiles` are those of KL; `kl_max` its largest value.
    """

    judgement: Judgement
    dnll: ClusterEstimate
    kl: ClusterEstimate
    kl_rev: ClusterEstimate
    top1: ClusterEstimate
    dp: ClusterEstimate
    quantiles: dict[str, Interval]
    kl_max: float
    ppl_reference: float
    tokens: int
    windows: int
    nonfinite: int
    bounds: Bounds | None = None
    """Where the candidate is known at a few ids only; `kl`, `kl_rev` and `quantiles` are then lower bounds."""

    @property
    def top1_value(self) -> float | None:
        """Top-1 agreement in percent, None where only bounds of it are known."""
        known = self.bounds is None or self.bounds.top1_exact
        return self.judgement.top1_pct.value if known else None

    @property
    def kl_name(self) -> str:
        """KL as tables and texts call it."""
        return "KL, at least" if self.bounds else "KL"

    def to_json(self) -> dict[str, Any]:
        """The part of `results` that `assay compare` promises for one candidate."""
        judged = self.judgement
        return {
            "grade": judged.grade.value,
            "grade_point": judged.grade_point.value,
            "tokens": self.tokens,
            "windows": self.windows,
            "nonfinite_tokens": self.nonfinite,
            "ppl_reference": self.ppl_reference,
            "dppl_pct": _bounds(judged.dppl_pct),
            "dnll": _bounds(self.dnll.interval),
            "kld": {
                "mean": self.kl.value,
                "lo": self.kl.interval.lo,
                "hi": self.kl.interval.hi,
                **{name: q.value for name, q in self.quantiles.items()},
                "max": self.kl_max,
                "quantile_intervals": {name: [q.lo, q.hi] for name, q in self.quantiles.items()},
                **(self.bounds.kld_json() if self.bounds else {"kind": "exact"}),
            },
            "kld_reverse": _bounds(self.kl_rev.interval),
            "top1_pct": _bounds(judged.top1_pct)
            | (self.bounds.top1_json() if self.bounds else {"kind": "exact"}),
            "mean_abs_dp": _bounds(self.dp.interval),
            "design_effect": self.dnll.design_effect,
            "windows_needed": judged.windows_needed,
            "aim": judged.aim.value if judged.aim else None,
        }


def summarise(seen: Sequence[WindowObservation], margins: Margins, resampling: Resampling) -> Summary:
    """Figures of one candidate from its windows. ValueError where no token is finite."""
    import numpy as np

    dnll = cluster_mean(_by_window(seen, "dnll"))
    kl_values = pooled(seen, "kl")
    bounds = bounds_of(seen)
    top1 = (
        bounds.top1
        if bounds
        else cluster_proportion([int(w.top1[w.finite].sum()) for w in seen if w.finite.any()], _counts(seen))
    )
    names = list(QUANTILES)
    quantiles = bootstrap_quantiles(
        _by_window(seen, "kl"), [QUANTILES[name] for name in names], resampling=resampling
    )
    return Summary(
        judgement=judge(dnll, top1, margins),
        dnll=dnll,
        kl=_mean(seen, [w.kl for w in seen]),
        kl_rev=_mean(seen, [w.kl_rev for w in seen]),
        top1=top1,
        dp=_mean(seen, [np.abs(w.p_cand - w.p_ref) for w in seen]),
        quantiles=dict(zip(names, quantiles, strict=True)),
        kl_max=float(kl_values.max()),
        ppl_reference=math.exp(float(pooled(seen, "nll_ref").mean())),
        tokens=int(kl_values.size),
        windows=sum(1 for w in seen if w.finite.any()),
        nonfinite=sum(int((~w.finite).sum()) for w in seen),
        bounds=bounds,
    )


def per_window(seen: Sequence[WindowObservation]) -> list[dict[str, Any]]:
    """`results.per_window`: means of each window over its finite tokens, null where it has none."""
    rows = []
    for w in seen:
        some, count = w.finite, int(w.finite.sum())
        rows.append(
            {
                "dnll": float(w.dnll[some].mean()) if count else None,
                "kld": float(w.kl[some].mean()) if count else None,
                "top1": float(w.top1[some].mean()) if count else None,
                "tokens": count,
            }
        )
    return rows


def _mean(seen: Sequence[WindowObservation], values: Sequence[NDArray[np.float64]]) -> ClusterEstimate:
    """Mean over finite tokens by window; where it is infinite (a token ruled out), so is its interval."""
    import numpy as np

    sums = [float(v[w.finite].sum()) for w, v in zip(seen, values, strict=True) if w.finite.any()]
    counts = _counts(seen)
    if not np.isfinite(sums).all():
        nothing = Interval(math.inf, -math.inf, math.inf)
        return ClusterEstimate(math.inf, math.nan, nothing, len(counts), float(sum(counts)))
    return cluster_ratio(sums, counts)


def _by_window(seen: Sequence[WindowObservation], name: str) -> list[NDArray[np.float64]]:
    return [getattr(w, name)[w.finite] for w in seen if w.finite.any()]


def _counts(seen: Sequence[WindowObservation]) -> list[int]:
    return [int(w.finite.sum()) for w in seen if w.finite.any()]


def _bounds(interval: Interval) -> dict[str, float | None]:
    return {"value": interval.value, "lo": interval.lo, "hi": interval.hi}
