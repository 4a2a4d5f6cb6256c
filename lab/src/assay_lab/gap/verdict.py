"""The verdict of a decomposition, and what there is to say of it."""

from __future__ import annotations

from dataclasses import replace

from assay.fidelity.compare_report import implausible
from assay.stats.resolution import windows_needed
from assay.verdict import Finding, Severity, Verdict
from assay_lab.gap.buckets import Amount
from assay_lab.gap.engine_steps import engine_name
from assay_lab.gap.floors import Place, place
from assay_lab.gap.report import dppl_text, span_text
from assay_lab.gap.result import GapResult, dppl

BEYOND = 2.0
"""A KL within so many times a floor is not told from it."""
_OPEN = {"gap.not_repeated", "gap.not_foretold", "gap.undecided"}


def verdict_of(outcome: GapResult) -> Verdict:
    """fail: a difference of set-up above the floor, or a total outside the margin; inconclusive:
    the buckets were not confirmed, or the total is undecided."""
    found = findings_of(outcome)
    if any(f.severity is Severity.ERROR for f in found):
        return Verdict.FAIL
    return Verdict.INCONCLUSIVE if _OPEN & {f.id for f in found} else Verdict.PASS


def findings_of(outcome: GapResult) -> list[Finding]:
    """Gravest first."""
    found = [
        *_setup(outcome),
        *_margin(outcome),
        *_repeatability(outcome),
        *_foretold(outcome),
        *_kernels(outcome),
    ]
    if outcome.same:
        title = (
            "reference and candidate are one engine and no codec changes anything: this tests the"
            " instrument"
        )
        found.append(Finding("gap.self_test", Severity.INFO, title))
    available, wanted = outcome.text["windows_available"], outcome.plan.windows + outcome.plan.fresh
    if available < wanted:
        found.append(
            Finding(
                "gap.fewer_windows",
                Severity.WARNING,
                f"the text has {available} windows of {outcome.plan.length:,} tokens, {wanted} were"
                " asked for",
                remedies=("give more text with --text, or a smaller --length",),
            )
        )
    if (perplexity := outcome.text.get("ppl_reference")) is not None:
        found += [
            replace(f, id="gap.implausible_reference")
            for f in implausible(outcome.text, perplexity)
        ]
    order = [Severity.ERROR, Severity.WARNING, Severity.INFO]
    return sorted(found, key=lambda f: order.index(f.severity))


def _setup(outcome: GapResult) -> list[Finding]:
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


def _margin(outcome: GapResult) -> list[Finding]:
    total, plan, windows = (
        outcome.decomposition.total.dnll,
        outcome.plan,
        outcome.decomposition.windows,
    )
    within, text = f"±{100 * plan.margin:g} %", dppl_text(total)
    where = place(total, plan.margin, windows, same=outcome.same)
    evidence = {"dppl_pct": dppl(total), "margin_pct": 100 * plan.margin, "windows": windows}
    if where is Place.UNDECIDED:
        title = f"{windows} windows do not place the total against {within}: Δppl {text}"
        more = _more(total, plan.margin, windows)
        return [
            Finding("gap.undecided", Severity.WARNING, title, evidence=evidence, remedies=(more,))
        ]
    if where is Place.INSIDE:
        return []
    candidate = f"the candidate with {plan.codec}" if plan.codec else "the candidate"
    helpful = [
        f"{r['action']}: KL {r['kld']:.3g}, {r['bytes_ratio']:.2f}× smaller than bf16"
        for r in outcome.recommendations
        if r["helps"]
    ]
    otherwise = (
        "use a finer codec"
        if plan.codec
        else "switch the settings that are named as causes, one by one"
    )
    return [
        Finding(
            "gap.outside_margin",
            Severity.ERROR,
            f"{candidate} is not the reference within {within}: Δppl {text}",
            evidence=evidence,
            causes=tuple(outcome.causes[:5]),
            remedies=tuple(helpful[:3]) or (otherwise,),
        )
    ]


def _more(total: Amount, margin: float, windows: int) -> str:
    needed = windows_needed(total.value, total.hi - total.value, windows, -margin, margin)
    return (
        f"run again with --windows {needed}"
        if needed and needed > windows
        else "run again with more windows"
    )


def _repeatability(outcome: GapResult) -> list[Finding]:
    left = outcome.decomposition.repeatability
    if left is None or outcome.repeats:
        return []
    open_ = [
        f"{name} {span_text(amount, plus=True)} nats, allowed ±{state.bound:.3g}"
        for name, amount, state in (
            ("KL", left.kl, outcome.repeats_kl),
            ("ΔNLL", left.dnll, outcome.repeats_nll),
        )
        if state and not state.ok
    ]
    return [
        Finding(
            "gap.not_repeated",
            Severity.WARNING,
            f"measured once more, the total is not the sum of the buckets: {'; '.join(open_)}",
            "The difference is more than a tenth of the total and the noise floor, or is not known"
            " as well as the total.",
            evidence={"repeatability": left.to_json()},
            causes=("too few windows", "an engine whose numbers depend on batch or order"),
            remedies=("run again with more windows",),
        )
    ]


def _foretold(outcome: GapResult) -> list[Finding]:
    failed = [check for check in outcome.checks if not check.holds]
    if not failed:
        return []
    named = "; ".join(f"{c.name}: off by {span_text(c.difference, plus=True)} nats" for c in failed)
    return [
        Finding(
            "gap.not_foretold",
            Severity.WARNING,
            f"the buckets do not foretell what was measured apart from them: {named}",
            "Buckets sum whatever they are; this test can fail.",
            evidence={"checks": [c.name for c in failed]},
            causes=(
                "codec and engine act on each other (the bucket interaction)",
                "too few windows, or text of several kinds",
                "an engine whose numbers depend on batch or order",
            ),
            remedies=("run again with more windows (--windows, --fresh)",),
        )
    ]


def _kernels(outcome: GapResult) -> list[Finding]:
    """Two engines with equal set-ups that still differ by more than rounding explains."""
    kinds = {
        engine_name(spec, codec=False).kind
        for spec in (outcome.plan.reference, outcome.plan.candidate)
    }
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
            f"the engines differ by KL {kernels.value:.3g}, more than rounding explains"
            f" ({floor:.2g})",
            "Neither reports a setting that the other has not.",
            evidence={"kl": kernels.to_json(), "floor": floor},
            causes=("a setting that engines do not report", "a kernel of lower precision"),
            remedies=("switch attention backend and number format one by one, and compare",),
        )
    ]
