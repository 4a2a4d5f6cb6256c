"""Tests of each figure against its margins (TOST: two one-sided tests of equivalence)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from assay.fidelity.plan import Plan
from assay.fidelity.summary import Summary
from assay.stats.equivalence import Grade, tost_p
from assay.stats.multiplicity import holm


@dataclass(frozen=True)
class MarginTest:
    """One margin: `bound` in percent (± for perplexity, from below for top-1) or, for KL, in nats
    from above, and the p-value of "it does not hold".

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

    Δppl by two one-sided t tests on the log scale, top-1 by one: flips beyond rounding count, or,
    where a server bounds them, all that are not certainly the same.
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
        # Where every token agrees the windows show no spread; n of n is then what a binomial says
        # of it.
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
