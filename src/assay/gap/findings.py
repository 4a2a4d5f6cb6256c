"""The verdict of a decomposition, and what there is to say of it."""

from __future__ import annotations

from assay.gap.amounts import Amount
from assay.gap.closure import Place, place
from assay.gap.outcome import Outcome, dppl
from assay.gap.path import engine_name
from assay.stats.power import windows_needed
from assay.verdict import Finding, Severity, Verdict

BEYOND = 2.0
"""A KL within so many times a floor is not told from it."""


def verdict_of(outcome: Outcome) -> Verdict:
    """fail: a difference of set-up above the floor, or a total outside the margin; inconclusive: not closed or undecided."""
    severities = {f.id: f.severity for f in findings_of(outcome)}
    if Severity.ERROR in severities.values():
        return Verdict.FAIL
    open_ = {"gap.not_closed", "gap.undecided"} & set(severities)
    return Verdict.INCONCLUSIVE if open_ else Verdict.PASS


def findings_of(outcome: Outcome) -> list[Finding]:
    """Gravest first."""
    found = [*_setup(outcome), *_margin(outcome), *_closure(outcome), *_kernels(outcome)]
    if outcome.same:
        found.append(
            Finding(
                "gap.self_test",
                Severity.INFO,
                "reference and candidate are one engine and the codec changes nothing: this tests the instrument",
            )
        )
    available, wanted = outcome.text["windows_available"], outcome.plan.windows + outcome.plan.fresh
    if available < wanted:
        found.append(
            Finding(
                "gap.fewer_windows",
                Severity.WARNING,
                f"the text has {available} windows of {outcome.plan.length:,} tokens, {wanted} were asked for",
                remedies=("give more text with --text, or a smaller --length",),
            )
        )
    order = [Severity.ERROR, Severity.WARNING, Severity.INFO]
    return sorted(found, key=lambda f: order.index(f.severity))


def _setup(outcome: Outcome) -> list[Finding]:
    if not outcome.setup:
        return []
    engine = outcome.decomposition.bucket("engine").effect.kl
    above = engine.lo > BEYOND * outcome.floors.largest_kl
    names = ", ".join(outcome.setup)
    return [
        Finding(
            "gap.setup_difference",
            Severity.ERROR if above else Severity.WARNING,
            f"the engines do not run the same model: they differ in {names}"
            + ("" if above else " (no difference above the noise floor came of it)"),
            "Both report these settings of the checkpoint, and not the same.",
            evidence={
                "differences": {k: list(v) for k, v in outcome.setup.items()},
                "engine_kl": engine.to_json(),
                "floor": outcome.floors.largest_kl,
            },
            causes=("an override on one side", "a checkpoint whose config.json was changed"),
            remedies=("give both engines the same configuration, then measure again",),
        )
    ]


def _margin(outcome: Outcome) -> list[Finding]:
    total, plan = outcome.decomposition.total.dnll, outcome.plan
    found = dppl(total)
    text = f"{found['value']:+.2f} % [{found['lo']:+.2f}, {found['hi']:+.2f}]"
    where = place(total, plan.margin, outcome.decomposition.windows, same=outcome.same)
    evidence = {"dppl_pct": found, "margin_pct": 100 * plan.margin, "windows": outcome.decomposition.windows}
    if where == Place.OUTSIDE:
        return [
            Finding(
                "gap.outside_margin",
                Severity.ERROR,
                f"the candidate with {plan.codec} is not the reference within ±{100 * plan.margin:g} %: Δppl {text}",
                evidence=evidence,
                causes=tuple(outcome.causes),
                remedies=tuple(
                    f"{r['action']}: KL {r['kld']:.3g} instead of what it is, {r['bytes_ratio']:.2f}× smaller than bf16"
                    for r in outcome.recommendations
                    if r["helps"]
                )[:3]
                or ("use a finer codec",),
            )
        ]
    if where == Place.UNDECIDED:
        return [
            Finding(
                "gap.undecided",
                Severity.WARNING,
                f"{outcome.decomposition.windows} windows do not place the total against ±{100 * plan.margin:g} %: Δppl {text}",
                evidence=evidence,
                remedies=(_more(total, plan.margin, outcome.decomposition.windows),),
            )
        ]
    return []


def _more(total: Amount, margin: float, windows: int) -> str:
    needed = windows_needed(total.value, total.hi - total.value, windows, -margin, margin)
    return (
        f"run again with --windows {needed}" if needed and needed > windows else "run again with more windows"
    )


def _closure(outcome: Outcome) -> list[Finding]:
    if outcome.closed_kl.ok and outcome.closed_nll.ok:
        return []
    closure = outcome.decomposition.closure
    open_ = [
        f"{name} {amount.value:+.3g} [{amount.lo:+.3g}, {amount.hi:+.3g}] nats, allowed ±{state.bound:.3g}"
        for name, amount, state in (
            ("KL", closure.kl, outcome.closed_kl),
            ("ΔNLL", closure.dnll, outcome.closed_nll),
        )
        if not state.ok
    ]
    return [
        Finding(
            "gap.not_closed",
            Severity.WARNING,
            f"the buckets do not add up to the total that was measured on its own: {'; '.join(open_)}",
            "What is left over is more than a tenth of the total and the noise floor, or is not known as well as the total.",
            evidence={"closure": closure.to_json()},
            causes=("too few windows", "an engine whose numbers depend on batch or order"),
            remedies=("run again with more windows",),
        )
    ]


def _kernels(outcome: Outcome) -> list[Finding]:
    """Two engines with equal set-ups that still differ by more than rounding explains."""
    kinds = {engine_name(spec).kind for spec in (outcome.plan.reference, outcome.plan.candidate)}
    if len(kinds) == 1 or outcome.setup:
        return []
    engine = outcome.decomposition.bucket("engine")
    parts = {p.name: p.effect.kl for p in engine.parts}
    # Where both engines use one number format there is a single step, and it is the bucket.
    kernels = parts.get("engine.kernels", engine.effect.kl)
    rounding = parts["engine.rounding"].value if "engine.rounding" in parts else 0.0
    floor = max(outcome.floors.largest_kl, rounding)
    if kernels.lo <= BEYOND * floor:
        return []
    return [
        Finding(
            "gap.engine_above_floor",
            Severity.WARNING,
            f"the engines differ by KL {kernels.value:.3g}, more than rounding explains ({floor:.2g})",
            "Neither reports a setting that the other has not.",
            evidence={"kl": kernels.to_json(), "floor": floor},
            causes=("a setting that engines do not report", "a kernel of lower precision"),
            remedies=("switch attention backend and number format one by one, and compare",),
        )
    ]
