"""Whether a candidate is no worse than a control, such as the format that it is to replace.

Both are compared with the same reference on the same windows. In mean KL the candidate may lose a
share (`--control-margin`) of the control's own. In perplexity it may lose that share of the
control's |Δppl| or, where that is more, of the ACCEPT margin: a tenth of a change that may be zero
leaves no room. *No worse* must be shown in both, *worse* in either is enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from assay.fidelity.names import label_of
from assay.fidelity.pairs import Common, common_windows
from assay.fidelity.plan import Plan
from assay.fidelity.result import CandidateResult
from assay.stats import Interval, percent_change
from assay.stats.non_inferiority import POWER, NonInferiority, Standing, non_inferiority
from assay.verdict import Finding, Metric, Severity, Verdict


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
        """`results.control`: the difference of mean KL in nats, with that of perplexity
        beside it.
        """
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
