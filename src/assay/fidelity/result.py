"""Everything that is known of one candidate after it was scored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.fidelity.breakdown import Bin, Floors, Greedy
from assay.fidelity.plan import MarginOptions, Plan
from assay.fidelity.routing import RoutingResult
from assay.fidelity.score import BoundedObservation, Engaged, WindowObservation, by_block, pooled
from assay.stats import (
    ClusterEstimate,
    Interval,
    Resampling,
    bootstrap_quantiles,
    cluster_mean,
    cluster_proportion,
    cluster_ratio,
    interval_json,
    not_negative,
    percent_change,
)
from assay.stats.equivalence import (
    MIN_PILOT,
    MIN_WINDOWS,
    Grade,
    Judgement,
    Margins,
    judge,
    resolution,
    windows_for,
)
from assay.verdict import Finding, Severity, Verdict

# The figures of a candidate that is known at a few ids only: how much stayed open, and what that
# leaves possible.


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
    tv = _mean(some, [w.tv_lo for w in some])
    most = _mean(some, [w.tv_hi for w in some]).interval.hi
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


# From the statistics of every token to the figures of a comparison, with their intervals.

QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True)
class Summary:
    """The figures of one candidate. Means are over finite tokens, intervals by window.

    `dnll` is the mean of NLL_candidate − NLL_reference, `kl` and `kl_rev` in nats, `top1` a share,
    `dp` the mean of
    |p_candidate − p_reference| of the token that came, `tv` the mean total variation. `agreement`
      is the share of tokens
    whose likeliest token is the same but for rounding (`assay.fidelity.metrics`), which is what the
    grade rests on.
    `quantiles` are those of KL; `kl_max` its largest value.
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
    bounds, top1, (dnll, agreement, kl) = _estimates(seen)
    kl_values = pooled(seen, "kl")
    names = list(QUANTILES)
    quantiles = bootstrap_quantiles(
        _by_window(seen, "kl"), [QUANTILES[name] for name in names], resampling=resampling
    )
    return Summary(
        judgement=judge(
            dnll, agreement, kl, margins, windows=windows, confidence=confidence, shown=top1
        ),
        dnll=dnll,
        kl=kl,
        kl_rev=_mean(seen, [w.kl_rev for w in seen]),
        top1=top1,
        dp=_mean(seen, [np.abs(w.p_cand - w.p_ref) for w in seen]),
        tv=bounds.tv if bounds else _mean(seen, [w.tv for w in seen]),
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


def _estimates(
    seen: Sequence[WindowObservation],
) -> tuple[
    Bounds | None, ClusterEstimate, tuple[ClusterEstimate, ClusterEstimate, ClusterEstimate]
]:
    """The bounds where there are any, top-1 agreement, and what is judged: ΔNLL, agreement beyond
    rounding, KL.
    """
    bounds = bounds_of(seen)
    top1 = bounds.top1 if bounds else _share(seen, [w.top1 for w in seen])
    # Where a server leaves the likeliest token open, what rounding turned cannot be told apart.
    agreement = (
        top1 if bounds and not bounds.top1_exact else _share(seen, [~w.beyond for w in seen])
    )
    dnll = cluster_mean(_by_window(seen, "dnll"))
    return bounds, top1, (dnll, agreement, _mean(seen, [w.kl for w in seen]))


EARLY = 0.9999
"""Confidence of the intervals that may end a run before its plan is done: so many looks more cost
next to no error.
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
        *_estimates(by_block(seen, blocks))[2], margins, windows=len(seen), confidence=EARLY
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


def _mean(
    seen: Sequence[WindowObservation], values: Sequence[NDArray[np.float64]]
) -> ClusterEstimate:
    """Mean of what cannot be negative, over finite tokens by window; where it is infinite (a token
    ruled out), so is its interval. An interval that would reach below zero has its lower end on the
    log scale."""
    sums = [float(v[w.finite].sum()) for w, v in zip(seen, values, strict=True) if w.finite.any()]
    counts = _counts(seen)
    if not np.isfinite(sums).all():
        nothing = Interval(math.inf, -math.inf, math.inf)
        return ClusterEstimate(math.inf, math.nan, nothing, len(counts), float(sum(counts)))
    return not_negative(cluster_ratio(sums, counts))


def _share(
    seen: Sequence[WindowObservation], values: Sequence[NDArray[np.bool_]]
) -> ClusterEstimate:
    """Share of finite tokens, by window."""
    sums = [int(v[w.finite].sum()) for w, v in zip(seen, values, strict=True) if w.finite.any()]
    return cluster_proportion(sums, _counts(seen))


def _by_window(seen: Sequence[WindowObservation], name: str) -> list[NDArray[np.float64]]:
    return [getattr(w, name)[w.finite] for w in seen if w.finite.any()]


def _counts(seen: Sequence[WindowObservation]) -> list[int]:
    return [int(w.finite.sum()) for w in seen if w.finite.any()]


# What a run will be able to tell, from its first windows: the power line that is said before the
# rest is scored.


@dataclass(frozen=True)
class Power:
    """The half-width that the interval of Δppl is expected to have, in percent, from `pilot`
    windows.

    `lo` and `hi` bound it as far as so few windows can tell. `enough` are the windows whose
    half-width would be that of the ACCEPT margin: a candidate without any difference is accepted
    from there on. None where a million are few.
    """

    pilot: int
    windows: int
    half_width: float
    lo: float
    hi: float
    margin: float
    enough: int | None

    def __str__(self) -> str:
        line = (
            f"{self.windows} windows resolve Δppl to about ±{self.half_width:.2g} % "
            f"(between {self.lo:.2g} and {self.hi:.2g}, from {self.pilot} windows)"
        )
        if self.half_width < self.margin:
            return line
        needed = (
            "no number of windows" if self.enough is None else f"at least {self.enough:,} windows"
        )
        return f"{line}; the margin of ±{self.margin:g} % takes {needed}"

    def to_json(self) -> dict[str, Any]:
        """`results.power`."""
        return {
            "pilot_windows": self.pilot,
            "windows": self.windows,
            "dppl_pct_half_width": {"value": self.half_width, "lo": self.lo, "hi": self.hi},
            "windows_for_margin": self.enough,
        }


def power_of(seen: Sequence[WindowObservation], plan: Plan, windows: int) -> Power | None:
    """What `windows` windows will resolve; None where the first ones have too few finite tokens to
    tell.
    """
    groups = [w.dnll[w.finite] for w in seen[:MIN_PILOT] if w.finite.any()]
    if len(groups) < MIN_PILOT or windows < MIN_PILOT:
        return None
    pilot = cluster_mean(groups)
    found = resolution(pilot, windows)
    half, lo, hi = (
        percent_change(Interval(x, x, x)).value for x in (found.half_width, found.lo, found.hi)
    )
    enough = windows_for(pilot, math.log1p(plan.margin_ppl))
    return Power(len(groups), windows, half, lo, hi, 100 * plan.margin_ppl, enough)


@dataclass(frozen=True)
class CandidateResult:
    """One candidate against the reference. `label` is how it is named in tables, without folders."""

    label: str
    summary: Summary
    engaged: Engaged
    seen: Sequence[WindowObservation]
    self_test: bool
    engine: Mapping[str, Any]
    breakdowns: Mapping[str, Sequence[Bin]]
    worst: Sequence[Mapping[str, Any]]
    floors: Floors
    greedy: Greedy | None = None
    """Where its greedy continuations leave the reference's, if that was asked for."""
    routing: RoutingResult | None = None
    """Which tokens go to other experts, if that was asked for."""
    power: Power | None = None
    """What its first windows said that the run would resolve."""
    certain: bool = False
    """Whether it was ended early, since its verdict was certain."""
    blocks: Sequence[int] | None = None
    """The cluster of each window by its index; None: every window is one."""

    @property
    def floor(self) -> float:
        """The largest of the known floors, in nats."""
        return self.floors.largest

    def to_json(self) -> dict[str, Any]:
        """The object that `assay compare` promises for one candidate."""
        return {
            **self.summary.to_json(),
            "candidate": self.label,
            "engine": dict(self.engine),
            "self_kld": self.floors.self_kld,
            "floors": self.floors.to_json(),
            "engaged": self.engaged.to_json(),
            "self_test": self.self_test,
            "breakdowns": {
                name: [b.to_json() for b in bins] for name, bins in self.breakdowns.items()
            },
            "worst_tokens": list(self.worst),
            "per_window": per_window(self.seen, self.blocks),
            "power": self.power.to_json() if self.power else None,
            **({"greedy": self.greedy.to_json()} if self.greedy else {}),
            **({"routing": self.routing.to_json()} if self.routing else {}),
        }


def verdict_of(result: CandidateResult, allow_marginal: bool) -> Verdict:
    """ACCEPT passes, MARGINAL where it is allowed; a reference against itself passes whatever the
    number of windows.
    """
    if result.summary.nonfinite:
        return Verdict.FAIL
    grade = result.summary.judgement.grade
    if grade is Grade.ACCEPT or result.self_test or (grade is Grade.MARGINAL and allow_marginal):
        return Verdict.PASS
    if grade is Grade.INCONCLUSIVE and (
        allow_marginal or not result.summary.judgement.accept_excluded
    ):
        return Verdict.INCONCLUSIVE
    return Verdict.FAIL


def findings_of(result: CandidateResult, allow_marginal: bool) -> list[Finding]:
    """What there is to say of one candidate, gravest first."""
    found: list[Finding] = []
    summary, judged = result.summary, result.summary.judgement
    evidence = {
        "candidate": result.label,
        "dppl_pct": [judged.dppl_pct.value, judged.dppl_pct.lo, judged.dppl_pct.hi],
        "top1_pct": [summary.top1_value, judged.top1_pct.lo, judged.top1_pct.hi],
        "top1_beyond_rounding_pct": [
            summary.beyond_pct.value,
            summary.beyond_pct.lo,
            summary.beyond_pct.hi,
        ],
        "kld": [summary.kl.value, summary.kl.interval.lo, summary.kl.interval.hi],
        "windows": summary.windows,
        "tokens": summary.tokens,
    }
    if summary.nonfinite:
        found.append(
            Finding(
                "fidelity.nonfinite",
                Severity.ERROR,
                f"{result.label}: {summary.nonfinite:,} tokens have logits that are not finite",
                "They are counted here and enter no average.",
                evidence={"tokens": summary.nonfinite, "candidate": result.label},
                causes=("overflow in a low-precision type", "a corrupt weight or cache block"),
                remedies=(
                    "look for NaN in the checkpoint: assay verify --values",
                    "score in a wider type: ?dtype=float32",
                ),
            )
        )
    if result.self_test:
        found.append(
            Finding(
                "fidelity.self_test",
                Severity.INFO,
                f"{result.label} is the reference itself: this tests the instrument, not a"
                " candidate",
            )
        )
        if result.engaged.zero_share < 1:
            found.append(
                Finding(
                    "fidelity.not_repeatable",
                    Severity.WARNING,
                    f"{result.label}: two runs of the same engine differ (KL"
                    f" {kl_text(summary.kl)})",
                    "No candidate can be told from the reference below this.",
                    evidence={"zero_share": result.engaged.zero_share, "kld": summary.kl.value},
                    causes=("kernels whose order of operations changes from run to run",),
                )
            )
        return found
    what = (
        f"{summary.kl_name} {kl_text(summary.kl)}, Δppl {interval_text(judged.dppl_pct, '%')}, "
        f"top-1 {top1_text(summary)}{beyond_text(summary)}"
    )
    if judged.grade is Grade.REJECT:
        found.append(
            Finding(
                "fidelity.reject",
                Severity.ERROR,
                f"{result.label}: not the same distribution within the margin ({what})",
                evidence=evidence,
                remedies=(
                    "see with -v or --html FILE which kinds of tokens differ most",
                    "use a finer format and compare again",
                ),
            )
        )
    elif judged.grade is Grade.MARGINAL:
        found.append(
            Finding(
                "fidelity.marginal",
                Severity.WARNING if allow_marginal else Severity.ERROR,
                f"{result.label}: within the wider margin only ({what})",
                _aim_text(result),
                evidence=evidence,
                remedies=("accept it with --allow-marginal, or use a finer format",),
            )
        )
    elif judged.grade is Grade.INCONCLUSIVE:
        no_accept = judged.accept_excluded and not allow_marginal
        found.append(
            Finding(
                "fidelity.inconclusive",
                Severity.ERROR if no_accept else Severity.WARNING,
                (
                    f"{result.label}: ACCEPT is ruled out; {windows_text(summary.windows)} not tell"
                    f" MARGINAL from REJECT ({what})"
                    if no_accept
                    else f"{result.label}: {windows_text(summary.windows)} not decide ({what})"
                ),
                _aim_text(result),
                evidence=evidence,
                remedies=(_more_windows(judged.windows_needed),),
            )
        )
    if summary.bounds:
        found.append(_lower_bound(result, summary.bounds))
    elif result.floor and summary.kl.value < 2 * result.floor:
        found.append(
            Finding(
                "fidelity.below_floor",
                Severity.INFO,
                f"{result.label}: its KL of {summary.kl.value:.2g} is within twice the floor of"
                f" {result.floor:.2g}: not ranked",
                evidence={
                    "kld": summary.kl.value,
                    "floor": result.floor,
                    "candidate": result.label,
                },
            )
        )
    return found


def _lower_bound(result: CandidateResult, bounds: Bounds) -> Finding:
    upper = f"at most {bounds.upper:.3g}" if math.isfinite(bounds.upper) else "bounded by nothing"
    top1 = (
        ""
        if bounds.top1_exact
        else " Its likeliest token is not always known, so top-1 has bounds only."
    )
    return Finding(
        "fidelity.lower_bound",
        Severity.INFO,
        f"{result.label}: KL is a lower bound, from log-probabilities of a few ids at each token",
        f"All other ids are one bucket: on average {bounds.tail_reference:.2%} of the reference's"
        f" probability and {bounds.tail_candidate:.2%} of the candidate's. Above, KL is {upper};"
        f" the total variation is between {bounds.tv_lo:.3g} and {bounds.tv_hi:.3g}.{top1}",
        evidence={"candidate": result.label, **bounds.kld_json()},
        remedies=(
            (
                "score more ids (?ids=N, with vLLM's --max-logprobs N), or run the engine in"
                " process: vllm:MODEL"
            ),
        ),
    )


def top1_text(summary: Summary) -> str:
    """Top-1 with its interval; the interval alone where the candidate's likeliest token is not
    always known.
    """
    agreement = summary.judgement.top1_pct
    if summary.top1_value is None:
        return f"{agreement.lo:.2f} … {agreement.hi:.2f} %"
    return interval_text(agreement, "%", plus=False)


def beyond_text(summary: Summary) -> str:
    """`, beyond rounding 0.41 %`: how many of the likeliest tokens changed; empty where nobody
    knows.
    """
    return (
        ""
        if summary.top1_value is None
        else f", changed beyond rounding {summary.beyond_pct.value:.2f} %"
    )


def tv_text(summary: Summary) -> str:
    """`0.0123 [0.0120, 0.0126]`, the bounds alone where only they are known."""
    own = summary.tv.interval
    return f"{own.lo:.3g} … {own.hi:.3g}" if summary.bounds else kl_text(summary.tv)


def kl_text(estimate: ClusterEstimate) -> str:
    """`0.0123 [0.0120, 0.0126]`."""
    return f"{estimate.value:.3g} [{estimate.interval.lo:.3g}, {estimate.interval.hi:.3g}]"


def interval_text(interval: Any, unit: str, *, plus: bool = True) -> str:
    """`+0.83 % [+0.50, +1.16]`."""
    sign = "+" if plus else ""
    value, lo, hi = (f"{x:{sign}.2f}" for x in (interval.value, interval.lo, interval.hi))
    return f"{value} {unit} [{lo}, {hi}]"


def _aim_text(result: CandidateResult) -> str:
    judged = result.summary.judgement
    if result.summary.windows < MIN_WINDOWS:
        return (
            f"Fewer than {MIN_WINDOWS} windows are never judged: their intervals cannot be trusted."
        )
    if judged.aim is None:
        return ""
    if judged.windows_needed is None:
        return (
            f"{judged.aim} is not ruled out, but the estimates lie outside its margins: more"
            " windows will hardly reach it."
        )
    return (
        f"About {judged.windows_needed:,} windows would decide {judged.aim}, were the estimates to"
        " stay where they are."
    )


def windows_text(windows: int) -> str:
    """The subject and verb of what windows do: `1 window does`, `7 windows do`."""
    return "1 window does" if windows == 1 else f"{windows:,} windows do"


def _more_windows(needed: int | None) -> str:
    return f"run again with --windows {needed}" if needed else "run again with more windows"
