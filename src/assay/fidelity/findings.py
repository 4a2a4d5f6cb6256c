"""What there is to say of one candidate, in findings and in words."""

from __future__ import annotations

import math
from typing import Any

from assay.fidelity.bounds import Bounds
from assay.fidelity.result import CandidateResult
from assay.fidelity.summary import Summary
from assay.stats import ClusterEstimate
from assay.stats.equivalence import Grade
from assay.stats.resolution import MIN_WINDOWS
from assay.verdict import Finding, Severity


def findings_of(result: CandidateResult, allow_marginal: bool) -> list[Finding]:
    """What there is to say of one candidate, gravest first."""
    found = _not_finite(result) if result.summary.nonfinite else []
    if result.self_test:
        return found + _self_test(result)
    return found + _grade(result, allow_marginal) + _limits(result)


def _not_finite(result: CandidateResult) -> list[Finding]:
    """That logits were not finite."""
    summary = result.summary
    return [
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
    ]


def _self_test(result: CandidateResult) -> list[Finding]:
    """That the candidate is the reference, and whether it repeats itself."""
    found, summary = list[Finding](), result.summary
    found.append(
        Finding(
            "fidelity.self_test",
            Severity.INFO,
            f"{result.label} is the reference itself: this tests the instrument, not a candidate",
        )
    )
    if result.engaged.zero_share < 1:
        found.append(
            Finding(
                "fidelity.not_repeatable",
                Severity.WARNING,
                f"{result.label}: two runs of the same engine differ (KL {kl_text(summary.kl)})",
                "No candidate can be told from the reference below this.",
                evidence={"zero_share": result.engaged.zero_share, "kld": summary.kl.value},
                causes=("kernels whose order of operations changes from run to run",),
            )
        )
    return found


def _grade(result: CandidateResult, allow_marginal: bool) -> list[Finding]:
    """The grade as a finding, with the figures that it rests on."""
    found, summary, judged = list[Finding](), result.summary, result.summary.judgement
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
    return found


def _limits(result: CandidateResult) -> list[Finding]:
    """What the KL cannot tell: it is a lower bound, or near the noise floor."""
    found, summary = list[Finding](), result.summary
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
    """`, beyond rounding 0.41 %`: how many of the likeliest tokens changed; empty where
    that is unknown.
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
