"""The figures of a comparison with their intervals, from the statistics of every token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from assay.fidelity.bounds import Bounds, bounds_of
from assay.fidelity.estimates import by_window, mean_of, share_of
from assay.fidelity.observation import WindowObservation, by_block, pooled
from assay.fidelity.plan import MarginOptions
from assay.stats import (
    ClusterEstimate,
    Interval,
    Resampling,
    bootstrap_quantiles,
    cluster_mean,
    interval_json,
)
from assay.stats.equivalence import Grade, Judgement, Margins, judge

QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True)
class Summary:
    """The figures of one candidate. Means are over finite tokens, intervals by window.

    Attributes:
        judgement: The grade.
        dnll: Mean of NLL_candidate − NLL_reference, in nats.
        kl: Mean KL(reference‖candidate), in nats.
        kl_rev: Mean KL(candidate‖reference), in nats.
        top1: Share of tokens with the same likeliest token.
        dp: Mean |p_candidate − p_reference| of the token that came.
        tv: Mean total variation.
        agreement: Share of tokens with the same likeliest token but for rounding
            (`assay.fidelity.metrics.token_statistics`), on which the grade rests.
        quantiles: Quantiles of KL.
        kl_max: The largest KL.
    """

    judgement: Judgement
    dnll: ClusterEstimate
    kl: ClusterEstimate
    kl_rev: ClusterEstimate
    top1: ClusterEstimate
    dp: ClusterEstimate
    tv: ClusterEstimate
    agreement: ClusterEstimate
    quantiles: dict[str, Interval]
    kl_max: float
    ppl_reference: float
    tokens: int
    windows: int
    clusters: int
    nonfinite: int
    bounds: Bounds | None = None
    """Where the candidate is known at a few ids only; `kl`, `kl_rev` and `quantiles` are then lower
    bounds.
    """

    @property
    def top1_value(self) -> float | None:
        """Top-1 agreement in percent, None where only bounds of it are known."""
        known = self.bounds is None or self.bounds.top1_exact
        return self.judgement.top1_pct.value if known else None

    @property
    def beyond_pct(self) -> Interval:
        """Tokens whose likeliest token differs beyond rounding, in percent: what `agreement` leaves
        over.
        """
        own = self.agreement.interval
        return Interval(*(100 * (1 - x) for x in (own.value, own.hi, own.lo)))

    def _beyond_json(self) -> dict[str, Any]:
        exact = self.top1_value is not None
        bounds = interval_json(self.beyond_pct)
        return bounds | ({"kind": "exact"} if exact else {"kind": "bounds", "value": None})

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
            "clusters": self.clusters,
            "confidence": judged.confidence,
            "accept_excluded": judged.accept_excluded,
            "nonfinite_tokens": self.nonfinite,
            "ppl_reference": self.ppl_reference,
            "dppl_pct": interval_json(judged.dppl_pct),
            "dnll": interval_json(self.dnll.interval),
            "kld": {
                "mean": self.kl.value,
                "lo": self.kl.interval.lo,
                "hi": self.kl.interval.hi,
                **{name: q.value for name, q in self.quantiles.items()},
                "max": self.kl_max,
                "quantile_intervals": {name: [q.lo, q.hi] for name, q in self.quantiles.items()},
                **(self.bounds.kld_json() if self.bounds else {"kind": "exact"}),
            },
            "kld_reverse": interval_json(self.kl_rev.interval),
            "top1_pct": (
                interval_json(judged.top1_pct)
                | (self.bounds.top1_json() if self.bounds else {"kind": "exact"})
            ),
            "top1_beyond_rounding_pct": self._beyond_json(),
            "tv": {
                "mean": None if self.bounds else self.tv.value,
                "lo": self.tv.interval.lo,
                "hi": self.tv.interval.hi,
                "kind": "bounds" if self.bounds else "exact",
            },
            "mean_abs_dp": interval_json(self.dp.interval),
            "design_effect": self.dnll.design_effect,
            "windows_needed": judged.windows_needed,
            "aim": judged.aim.value if judged.aim else None,
        }


def summarise(
    seen: Sequence[WindowObservation],
    margins: Margins,
    resampling: Resampling,
    *,
    blocks: Sequence[int] | None = None,
    confidence: float = 0.95,
) -> Summary:
    """Figures of one candidate from its windows. ValueError where no token is finite.

    `blocks[i]` is the cluster of the window with the index i (`plan.blocks_of`), by default the
    window itself. `confidence` is that of the intervals which the grade rests on; those that are
    shown have 95 %.
    """
    windows = sum(1 for w in seen if w.finite.any())
    seen = by_block(seen, blocks)
    bounds, top1, (dnll, agreement, kl) = judged_estimates(seen)
    kl_values = pooled(seen, "kl")
    names = list(QUANTILES)
    quantiles = bootstrap_quantiles(
        by_window(seen, "kl"), [QUANTILES[name] for name in names], resampling=resampling
    )
    return Summary(
        judgement=judge(
            dnll, agreement, kl, margins, windows=windows, confidence=confidence, shown=top1
        ),
        dnll=dnll,
        kl=kl,
        kl_rev=mean_of(seen, [w.kl_rev for w in seen]),
        top1=top1,
        dp=mean_of(seen, [np.abs(w.p_cand - w.p_ref) for w in seen]),
        tv=bounds.tv if bounds else mean_of(seen, [w.tv for w in seen]),
        agreement=agreement,
        quantiles=dict(zip(names, quantiles, strict=True)),
        kl_max=float(kl_values.max()),
        ppl_reference=math.exp(float(pooled(seen, "nll_ref").mean())),
        tokens=int(kl_values.size),
        windows=windows,
        clusters=dnll.clusters,
        nonfinite=sum(int((~w.finite).sum()) for w in seen),
        bounds=bounds,
    )


def judged_estimates(
    seen: Sequence[WindowObservation],
) -> tuple[
    Bounds | None, ClusterEstimate, tuple[ClusterEstimate, ClusterEstimate, ClusterEstimate]
]:
    """The bounds where there are any, top-1 agreement, and what is judged: ΔNLL, agreement beyond
    rounding, KL.
    """
    bounds = bounds_of(seen)
    top1 = bounds.top1 if bounds else share_of(seen, [w.top1 for w in seen])
    # Where a server leaves the likeliest token open, what rounding turned cannot be told apart.
    agreement = (
        top1 if bounds and not bounds.top1_exact else share_of(seen, [~w.beyond for w in seen])
    )
    dnll = cluster_mean(by_window(seen, "dnll"))
    return bounds, top1, (dnll, agreement, mean_of(seen, [w.kl for w in seen]))


EARLY = 0.9999
"""Confidence of the intervals that may end a run before its plan is done: so many looks more cost
hardly any error.
"""


def is_certain(
    seen: Sequence[WindowObservation], margins: Margins, blocks: Sequence[int] | None
) -> bool:
    """Whether no further windows can be expected to change the grade. Tokens that are not finite
    fail in any case.
    """
    if not all(w.finite.all() for w in seen):
        return True
    judged = judge(
        *judged_estimates(by_block(seen, blocks))[2], margins, windows=len(seen), confidence=EARLY
    )
    return judged.grade in (Grade.ACCEPT, Grade.REJECT) or (
        judged.grade is Grade.MARGINAL and judged.accept_excluded
    )


def margins_of(plan: MarginOptions) -> Margins:
    """The margins of a plan as they are judged by."""
    return Margins(
        100 * plan.margin_ppl,
        100 * plan.marginal_ppl,
        100 * plan.margin_top1,
        100 * plan.marginal_top1,
        plan.margin_kl,
        plan.marginal_kl,
    )


def per_window(
    seen: Sequence[WindowObservation], blocks: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """`results.per_window`: means of each window over its finite tokens, null where it has none,
    and its cluster.
    """
    rows = []
    for w in seen:
        some, count = w.finite, int(w.finite.sum())
        rows.append(
            {
                "dnll": float(w.dnll[some].mean()) if count else None,
                "kld": float(w.kl[some].mean()) if count else None,
                "top1": float(w.top1[some].mean()) if count else None,
                "tokens": count,
                "window": w.index,
                "block": w.index if blocks is None else blocks[w.index],
            }
        )
    return rows
