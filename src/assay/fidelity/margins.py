"""Every declared margin as a test of its own, with Holm's correction over all margins and
candidates of a run; and whether a candidate is no worse than a control.

The grade needs no correction: ACCEPT asks for all of its margins at once (an intersection-union
test has the level of its parts). Who reads single margins, or picks the candidates that hold, reads
several tests, and there it counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.fidelity.plan import Plan, label_of
from assay.fidelity.result import CandidateResult, Summary
from assay.fidelity.score import WindowObservation, by_block
from assay.stats import Interval, percent_change
from assay.stats.equivalence import (
    POWER,
    Grade,
    NonInferiority,
    PairedDifference,
    Standing,
    holm,
    non_inferiority,
    paired_difference,
    tost_p,
)
from assay.verdict import Finding, Metric, Severity, Verdict


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


# Two candidates of one run against each other, window by window: what the windows have in common
# cancels.


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


# Is a candidate no worse than a control, such as the format that it is to replace?
#
# Both are held against the same reference on the same windows. In mean KL the candidate may lose a
# share (`--control-margin`) of the control's own. In perplexity it may lose that share of the
# control's |Δppl| or, where that is more, of the ACCEPT margin: a tenth of a change that may be
# zero leaves no room. *No worse* must be shown in both, *worse* in either is enough.


@dataclass(frozen=True)
class Control:
    """A candidate against the control, by window. `kl` is None where a server bounds it: then
    nothing shows *no worse*.
    """

    candidate: str
    control: str
    share: float
    dnll: NonInferiority
    kl: NonInferiority | None

    @property
    def standing(self) -> Standing:
        """Of both metrics together."""
        found = {self.dnll.standing, self.kl.standing if self.kl else Standing.UNDECIDED}
        if Standing.WORSE in found:
            return Standing.WORSE
        return Standing.NO_WORSE if found == {Standing.NO_WORSE} else Standing.UNDECIDED

    @property
    def verdict(self) -> Verdict:
        """Of the report, as far as the control goes."""
        passes = {Standing.NO_WORSE: Verdict.PASS, Standing.WORSE: Verdict.FAIL}
        return passes.get(self.standing, Verdict.INCONCLUSIVE)

    @property
    def windows_needed(self) -> int | None:
        """Windows that decide what is open; None where nothing is open or no number does."""
        parts = [
            part for part in (self.kl, self.dnll) if part and part.standing is Standing.UNDECIDED
        ]
        if (
            self.standing is not Standing.UNDECIDED
            or not self.kl
            or any(p.windows_needed is None for p in parts)
        ):
            return None
        return max(part.windows_needed or 0 for part in parts)

    def to_json(self) -> dict[str, Any]:
        """`results.control`: the difference of mean KL in nats, with that of perplexity beside it."""
        kl = self.kl
        return {
            "verdict": self.standing.value,
            "difference": kl.difference.value if kl else None,
            "lo": kl.difference.lo if kl else None,
            "hi": kl.difference.hi if kl else None,
            "margin": kl.margin if kl else None,
            "windows_needed": self.windows_needed,
            "control": self.control,
            "margin_share": self.share,
            "kld": _side_json(kl) if kl else None,
            "dppl_pct": _side_json(self.dnll, percent=True),
        }


def _side_json(part: NonInferiority, *, percent: bool = False) -> dict[str, Any]:
    difference, margin = part.difference, Interval(part.margin, part.margin, part.margin)
    if percent:
        difference, margin = percent_change(difference), percent_change(margin)
    return {
        "verdict": part.standing.value,
        "difference": difference.value,
        "lo": difference.lo,
        "hi": difference.hi,
        "margin": margin.value,
        "power": part.power,
        "windows_needed": part.windows_needed if part.standing is Standing.UNDECIDED else None,
    }


def against_control(
    result: CandidateResult, control: CandidateResult, share: float, margin_ppl: float
) -> Control | None:
    """Judge one candidate; None where the two have no finite tokens of one window in common."""
    common = common_windows(result, control)
    if not common:
        return None
    windows = sum(
        bool((x.finite & y.finite).any()) for x, y in zip(result.seen, control.seen, strict=False)
    )
    bounded = result.summary.bounds or control.summary.bounds
    return Control(
        result.label,
        control.label,
        share,
        _judged(common, "dnll", windows, share, math.log1p(margin_ppl)),
        None if bounded else _judged(common, "kl", windows, share),
    )


def controlled(
    results: Sequence[CandidateResult], plan: Plan
) -> tuple[list[CandidateResult], dict[str, Control]]:
    """The results of the candidates alone, and of each, by its label, how it stands against the
    plan's control.
    """
    if not plan.control:
        return list(results), {}
    label = label_of(plan.control, plan.sides)
    control = next((r for r in results if r.label == label), None)
    candidates = [r for r in results if plan.control in plan.candidates or r is not control]
    found = [
        against_control(r, control, plan.control_margin, plan.margin_ppl)
        for r in candidates
        if control and r is not control
    ]
    return candidates, {one.candidate: one for one in found if one}


def _judged(
    common: Common, name: str, windows: int, share: float, least: float = 0.0
) -> NonInferiority:
    ours, theirs, tokens = (
        [float(getattr(x, name)[some].sum()) for x, _, some in common],
        [float(getattr(y, name)[some].sum()) for _, y, some in common],
        [int(some.sum()) for _, _, some in common],
    )
    return non_inferiority(ours, theirs, tokens, share=share, least=least, windows=windows)


def control_findings(found: Sequence[Control]) -> list[Finding]:
    """What there is to say of the candidates that are not shown to be no worse."""
    return [_finding(one) for one in found if one.standing is not Standing.NO_WORSE]


def _finding(one: Control) -> Finding:
    worse = one.standing is Standing.WORSE
    what = f"{one.candidate} against {one.control}: {control_text(one)}"
    if worse:
        title, remedies = (
            f"worse than its control: {what}",
            ("keep the control, or use a finer format",),
        )
    elif one.kl is None:
        title = (
            "a server's KL is only bounded, so nothing shows that it is no worse than its control:"
            f" {what}"
        )
        remedies = ("run both engines in process",)
    else:
        title, remedies = f"undecided whether it is worse than its control: {what}", (_more(one),)
    return Finding(
        "fidelity.control_worse" if worse else "fidelity.control_undecided",
        Severity.ERROR if worse else Severity.WARNING,
        title,
        f"Allowed is a loss of {one.share:.0%} of the control's own difference to the reference.",
        evidence={"candidate": one.candidate, **one.to_json()},
        remedies=remedies,
    )


def _more(one: Control) -> str:
    if one.windows_needed is None:
        return (
            "the difference lies on the margin: no number of windows decides, a wider"
            " --control-margin does"
        )
    return (
        f"run again with --windows {one.windows_needed}: that decides with a chance of {POWER:.0%},"
        " were the estimates to stay where they are"
    )


def control_text(one: Control) -> str:
    """`KL +0.0012 [+0.0010, +0.0014] of +0.0008 allowed, perplexity +0.10 % [+0.02, +0.18] of +0.10
    % allowed`.
    """
    dppl = percent_change(one.dnll.difference)
    limit = percent_change(Interval(one.dnll.margin, one.dnll.margin, one.dnll.margin)).value
    text = (
        f"perplexity {dppl.value:+.2f} % [{dppl.lo:+.2f}, {dppl.hi:+.2f}] of {limit:+.2f} % allowed"
    )
    if one.kl is None:
        return text
    kl = one.kl.difference
    return (
        f"KL {kl.value:+.3g} [{kl.lo:+.3g}, {kl.hi:+.3g}] of {one.kl.margin:+.3g} allowed, {text}"
    )


def control_metrics(found: Sequence[Control]) -> list[Metric]:
    """One figure a candidate."""
    return [
        Metric(
            (
                f"against {one.control}"
                if len(found) == 1
                else f"{one.candidate} against {one.control}"
            ),
            f"{one.standing.value}: {control_text(one)}",
        )
        for one in found
    ]
