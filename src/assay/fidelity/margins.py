"""Every declared margin as a test of its own, with Holm's correction over all margins and candidates of a run.

The grade needs no correction: ACCEPT asks for all of its margins at once (an intersection-union test has the level of
its parts). Who reads single margins, or picks the candidates that hold, reads several tests, and there it counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.fidelity.plan import Plan
from assay.fidelity.result import CandidateResult, Summary
from assay.fidelity.score import WindowObservation, by_block
from assay.stats.equivalence import Grade, PairedDifference, holm, paired_difference, tost_p


@dataclass(frozen=True)
class MarginTest:
    """One margin: `bound` in percent (± for perplexity, from below for top-1) or, for KL, in nats from above, and the
    p-value of "it does not hold".

    `p_holm` is adjusted for all margins of the run. 1 where nothing is known of the error.
    """

    metric: str
    grade: str
    bound: float
    p: float
    p_holm: float = math.nan

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def margin_tests(summaries: Sequence[Summary], plan: Plan) -> list[list[MarginTest]]:
    """The tests of every candidate, in the order given.

    Δppl by two one-sided t tests on the log scale, top-1 by one: flips beyond rounding count, or, where a server bounds
    them, all that are not certainly the same.
    """
    found = [_tests(summary, plan) for summary in summaries]
    adjusted = iter(holm([test.p for tests in found for test in tests]))
    return [[replace(test, p_holm=next(adjusted)) for test in tests] for tests in found]


def _tests(summary: Summary, plan: Plan) -> list[MarginTest]:
    tests = []
    for grade, ppl, top1, kl in (
        (Grade.ACCEPT, plan.margin_ppl, plan.margin_top1, plan.margin_kl),
        (Grade.MARGINAL, plan.marginal_ppl, plan.marginal_top1, plan.marginal_kl),
    ):
        within = tost_p(summary.dnll, math.log1p(-ppl), math.log1p(ppl))
        agreement = summary.agreement
        # Where every token agrees the windows show no spread; n of n is then what a binomial says of it.
        every = agreement.value == 1.0 and agreement.clusters > 1
        above = top1**agreement.n if every else tost_p(agreement, top1, math.inf)
        tests += [
            MarginTest("dppl_pct", grade.value, 100 * ppl, _known(within)),
            MarginTest("top1_pct", grade.value, 100 * top1, _known(above)),
            MarginTest("kld", grade.value, kl, _known(tost_p(summary.kl, -math.inf, kl))),
        ]
    return tests


def _known(p: float) -> float:
    return 1.0 if math.isnan(p) else p


# -----------------------------------------------------------------------------
# Two candidates of one run against each other, window by window: what the windows have in common cancels.


@dataclass(frozen=True)
class Pair:
    """Differences first − second of mean KL and of mean NLL, in nats, with p-values adjusted over all pairs.

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
    """Every two candidates that were scored on the same windows, with Holm's correction for each metric."""
    pairs = [
        (a, b, common) for i, a in enumerate(results) for b in results[i + 1 :] if (common := common_windows(a, b))
    ]
    dnll = [_difference(common, "dnll") for _, _, common in pairs]
    kl = [None if a.summary.bounds or b.summary.bounds else _difference(common, "kl") for a, b, common in pairs]
    adjusted_dnll = holm([_known_pairs(d) for d in dnll])
    adjusted_kl = iter(holm([_known_pairs(d) for d in kl if d]))
    return [
        Pair(a.label, b.label, d, p, k, next(adjusted_kl) if k else math.nan)
        for (a, b, _), d, p, k in zip(pairs, dnll, adjusted_dnll, kl, strict=True)
    ]


Common = list[tuple[WindowObservation, WindowObservation, "NDArray[np.bool_]"]]


def common_windows(a: CandidateResult, b: CandidateResult) -> Common:
    """For each cluster of windows that both scored, which of its tokens are finite and within reach on both sides."""
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
