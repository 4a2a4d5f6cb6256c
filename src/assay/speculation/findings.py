"""Findings of a judged source: what is wrong, the evidence, the likely cause, the remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator

from assay.speculation.collapse import MIN_DRAFTS, Collapse, zero_windows
from assay.speculation.diagnosis import VLLM, basis_figures, judge_head, quoted
from assay.speculation.health import BROKEN_RATE, WORTH, Assessment, Health
from assay.speculation.judged import Judged
from assay.speculation.measured import Measured
from assay.verdict import Finding, Severity, Verdict

PERFECT_DRAFTS = 50


def findings(judged: Judged) -> list[Finding]:
    """All findings, the gravest first."""
    found = [
        *_state(judged),
        *_unread(judged),
        *_hidden(judged),
        *_depth(judged),
        *_worth(judged),
        *_mismatch(judged),
        *_suspicious(judged),
        *_against_baseline(judged),
        *judged.checkpoint,
    ]
    order = list(Severity)
    return sorted(found, key=lambda f: order.index(f.severity))


def _state(judged: Judged) -> Iterator[Finding]:
    a = judged.assessment
    if a.health is Health.OFF or (a.health is Health.INSUFFICIENT and judged.record.engine is None):
        yield _nothing(judged)
    elif a.health is Health.INSUFFICIENT and not judged.earns:
        name, title, remedy = (
            ("partial", "the source shows only some of the counters", "give the whole metrics page")
            if judged.record.counts.partial
            else (
                "insufficient",
                "too little evidence to judge",
                "let the server answer more requests, then look again",
            )
        )
        yield Finding(
            f"speculation.{name}",
            Severity.WARNING,
            title,
            a.reason,
            evidence=basis_figures(a),
            remedies=(remedy,),
        )
    elif a.seldom or (a.judged and judged.benefit is not None and judged.benefit.seldom):
        yield _seldom(judged)
    if (
        a.health.bad
        and not a.seldom
        and not a.all_or_nothing
        and (own := judge_head(judged)) is not None
    ):
        yield own


def _seldom(judged: Judged) -> Finding:
    """A drafter that drafts at few of the steps."""
    a, record = judged.assessment, judged.evidence.steps
    bad = a.health is Health.DEGRADED and a.seldom
    share = f"{'about ' if record.steps_estimated else ''}{100 * (record.coverage or 0):.3g} %"
    return Finding(
        "speculation.low_coverage",
        Severity.ERROR if bad and not judged.earns else Severity.WARNING,
        f"{share} of the steps had a draft, so a step gives {record.overall or 1:.2f} tokens on"
        " average over all steps",
        detail=a.reason if bad else "",
        evidence={
            **basis_figures(a),
            "coverage": record.coverage,
            "overall_tokens_per_step": record.overall,
        },
        causes=(
            "n-grams or suffixes find nothing to propose where the text does not repeat itself",
            "drafting is switched off for part of the steps (batch size, context, grammar)",
        ),
        remedies=("measure what it is worth: assay spec URL --baseline URL_WITHOUT_SPECULATION",),
    )


def _unread(judged: Judged) -> Iterator[Finding]:
    """Lines that name drafting and that no parser reads."""
    if not judged.unread:
        return
    total = sum(n for _, n in judged.unread)
    yield Finding(
        "speculation.unrecognised",
        Severity.WARNING if judged.assessment.health is Health.UNKNOWN else Severity.INFO,
        f"{total:,} line{'s' * (total > 1)} about drafting in a form that assay does not read",
        detail=f"the first: {judged.unread[0][0]}",
        evidence={
            "lines": total,
            "forms": len(judged.unread),
            "first": [line for line, _ in judged.unread[:5]],
        },
        remedies=(
            "give the server's /metrics page or a response with its statistics",
            "report the line, or read it with a parser of your own (entry point assay.parsers)",
        ),
    )


def _nothing(judged: Judged) -> Finding:
    """Nothing was drafted, or nothing tells whether anything was."""
    clues = {c.id for c in judged.clues}
    off = judged.assessment.health is Health.OFF
    remedy = "start it with speculation"
    if judged.record.engine is not None:
        title = "nothing was drafted: speculation is off, or never came to a draft"
        remedy = (
            "send some requests, then look again; if text is generated and drafts stay 0, drafting"
            " never happens"
        )
    elif off and "speculation_off" in clues:
        title = "speculation is off in the engine's configuration"
    elif off:
        title = "speculation is off: requests were answered, and nothing counts drafts"
    elif "speculation_on" in clues or "depth" in clues:
        title = "speculation is configured, but no line counts any drafts"
        remedy = (
            "check that statistics are logged (vLLM: no --disable-log-stats), and that requests"
            " were answered"
        )
    else:
        title = "nothing in the source counts drafts, nor says that speculation is off"
        remedy = "give the log of the server process, or its /metrics page"
    name = "speculation.off" if off else "speculation.no_evidence"
    return Finding(name, Severity.WARNING, title, evidence=quoted(judged.clues), remedies=(remedy,))


def _hidden(judged: Judged) -> Iterator[Finding]:
    """What totals hide."""
    a = judged.assessment
    all_dead = a.health is Health.BROKEN and len(a.dead_engines) == len(a.per_engine)
    for name in () if all_dead else a.dead_engines:
        own = a.per_engine[name]
        yield Finding(
            "speculation.engine_dead",
            Severity.ERROR,
            f"engine {name} accepts nothing while others do",
            detail=own.reason,
            evidence={"engine": name, **basis_figures(own)},
            causes=("this replica loaded its head differently, or its draft state is corrupt",),
            remedies=(
                (
                    f"restart engine {name}, and compare its start-up lines with those of a"
                    " healthy one"
                ),
            ),
        )
    if a.all_or_nothing:
        yield Finding(
            "speculation.all_or_nothing",
            Severity.ERROR,
            "every window accepted either nothing or everything: no text does that",
            detail=a.reason,
            evidence=basis_figures(a),
            causes=(
                "NaN logits in the target or the draft: every comparison gives the same answer",
            ),
            remedies=(
                "look at the text, which is likely broken too: `assay check URL`",
                "try another attention backend",
            ),
            references=("https://github.com/NVIDIA/TensorRT-LLM/pull/5146",),
        )
    if a.collapse is not None:
        yield _collapsing(a, a.collapse)
    zeros = zero_windows(judged.evidence.windows, a.collapse)
    if zeros:
        yield Finding(
            "speculation.zero_windows",
            Severity.WARNING,
            f"{len(zeros)} of {len(judged.evidence.windows)} windows accepted exactly nothing,"
            " others work",
            evidence={"times": [w.time for w in zeros[:20]]},
            causes=(
                (
                    "a sequence past the draft's context limit switched drafting off for the whole"
                    " batch"
                ),
            ),
            remedies=("compare max_model_len of draft and target",),
            references=(f"{VLLM}issues/58080",),
        )


def _collapsing(a: Assessment, c: Collapse) -> Finding:
    """Acceptance that fell in the middle of a run."""
    dummies = (
        "a sequence grew past the draft's own context limit (drafts become dummies for the"
        " whole batch)"
    )
    corrupt = "the target's state is corrupt: acceptance falls before the text turns into salad"
    longer = "longer contexts than the draft head was trained for"
    return Finding(
        "speculation.collapsing",
        Severity.ERROR if a.health.bad else Severity.WARNING,
        f"acceptance fell from {c.before.percent()} to {c.after.percent()} at window {c.at + 1}"
        f" of {c.windows}",
        detail="every window after it is exactly zero: a switch, not a drift" if c.zero else "",
        evidence={
            "window": c.at + 1,
            "time": c.time,
            "engine": c.replica,
            "before": c.before,
            "after": c.after,
        },
        causes=(*((dummies, corrupt) if c.zero else (corrupt, longer)), "the traffic changed"),
        remedies=(
            "ask at once whether the text is still sane: `assay check URL`",
            "compare max_model_len of draft and target",
        ),
        references=(f"{VLLM}issues/58080", "https://github.com/LMCache/LMCache/issues/4247"),
    )


def dead_positions(a: Assessment) -> list[int]:
    """Deep positions that are certain to accept next to nothing, while position 0 is not."""
    if len(a.positions) < 2 or a.positions[0].hi < 2 * BROKEN_RATE:
        return []
    return [
        i
        for i, r in enumerate(a.positions)
        if i and r.n >= MIN_DRAFTS and r.hi < 2 * BROKEN_RATE and r.value < BROKEN_RATE
    ]


def _depth(judged: Judged) -> Iterator[Finding]:
    b, a = judged.benefit, judged.assessment
    dead = dead_positions(a)
    deep = b is not None and b.too_deep and a.health is Health.HEALTHY and not a.seldom
    if b is not None and b.depth and (deep or dead) and a.health is not Health.BROKEN:
        best = min([b.best, *dead[:1]])
        title = f"{b.depth} speculative tokens are too many: the tail costs more than it earns"
        if not deep:
            title = f"positions {dead[0]} to {dead[-1]} of {b.depth} accept next to nothing"
        detail = (
            f"{best} give {b.multipliers[best - 1]:.2f} times the speed over all steps, {b.depth}"
            f" give {b.multiplier or 0:.2f}"
        )
        if b.cost.source == "assumed":
            detail += f" (assuming that a draft token costs {b.cost.ratio:g} target steps)"
        yield Finding(
            "speculation.k_too_deep",
            Severity.WARNING,
            title,
            detail=detail,
            evidence={
                "per_position": b.rates[: b.measured_depth],
                "dead_positions": dead,
                "best": best,
                "cost_ratio": b.cost.ratio,
            },
            causes=(
                "one head is run several times, or the draft loses the text after a few tokens",
            ),
            remedies=(f"set the number of speculative tokens to {best}",),
            references=(f"{VLLM}issues/47602",),
        )


def _worth(judged: Judged) -> Iterator[Finding]:
    """What the net multiplier says: it costs more than it earns, or pays little."""
    b, printed = judged.benefit, judged.record.printed.multiplier
    net = None if b is None else b.net
    if net is None and printed is not None:
        net = Measured(printed)
    if net is None or (b is None and net.value >= 1):
        return
    loses = b is not None and b.loses
    # A figure without an interval is quoted, and decides nothing.
    told = net.hi is None and net.value < 1 and (b is None or b.measured_multiplier is not None)
    evidence = {
        "net_multiplier": net.value,
        "interval": [net.lo, net.hi],
        "worth_running_above": WORTH,
    }
    if judged.assessment.judged and (loses or told):
        yield Finding(
            "speculation.costs_more",
            Severity.ERROR if loses else Severity.WARNING,
            f"speculation makes generation slower: net multiplier {net}",
            evidence=evidence,
            remedies=("disable speculation, or lower the number of speculative tokens",),
        )
    elif b is not None and b.earns and net.value < WORTH and judged.verdict is Verdict.PASS:
        yield Finding(
            "speculation.pays_little",
            Severity.WARNING,
            f"speculation is hardly worth running: net multiplier {net}",
            detail="it earns more than it costs" + b.origin,
            evidence={**evidence, "cost_source": b.cost.source},
            remedies=(
                "keep it if its memory and its care are not needed elsewhere",
                "measure it: assay spec URL --baseline URL_WITHOUT_SPECULATION",
            ),
        )


def _mismatch(judged: Judged) -> Iterator[Finding]:
    """The number of draft positions in the source against what the command says, and what the user
    gives.
    """
    record = judged.record
    printed = len(record.per_position or ())
    drafted = (
        math.ceil(record.counts.drafted / record.counts.drafts)
        if record.counts.drafted and record.counts.drafts
        else 0
    )
    seen = printed or max(record.num_speculative_tokens or 0, drafted)
    reached = max(
        (record.mean_acceptance_length or 1) - 1, 0
    )  # no step accepts more than was drafted
    depths = sorted(
        {w.num_speculative_tokens for w in judged.evidence.windows if w.num_speculative_tokens}
    )
    stated = {int(n) for c in judged.clues if c.id == "depth" for n in c.text.split(", ")}
    wrong = []
    for name, wanted in ("the start-up lines say", stated), ("you said", {judged.asked} - {None}):
        deepest = max((n for n in wanted if n), default=0)
        if wanted and (
            (printed and printed not in wanted) or seen > deepest or reached > deepest + 0.01
        ):
            wrong.append(f"{name} {', '.join(map(str, sorted(n for n in wanted if n)))}")
    if wrong:
        most = max(seen, math.ceil(reached - 0.01))
        title = f"the source shows {most} speculative tokens a draft, and {' and '.join(wrong)}"
    elif printed and len(depths) > 1:
        shown = ", ".join(map(str, depths))
        title = (
            f"windows of {shown} draft positions in one source: two runs, or a depth that changed"
        )
    else:
        return
    yield Finding(
        "speculation.k_mismatch",
        Severity.WARNING,
        title,
        evidence={
            "seen": seen,
            "start_up": sorted(stated),
            "given": judged.asked,
            "depths": depths,
        },
        causes=(
            (
                "the source is of another run, or the engine changed the number (a head runs a"
                " whole number of times)"
            ),
        ),
        remedies=(
            (
                "hold the command that runs against the one that you meant, and give the log of"
                " one run"
            ),
        ),
    )


def _suspicious(judged: Judged) -> Iterator[Finding]:
    a, record = judged.assessment, judged.record
    rate = a.rate or a.pooled
    if (
        a.health is Health.HEALTHY
        and record.acceptance_rate == 1.0
        and (record.counts.drafted or 0) >= PERFECT_DRAFTS
    ):
        yield Finding(
            "speculation.perfect_acceptance",
            Severity.INFO,
            "every draft token was accepted",
            detail=(
                "right for repetitive text or a draft equal to the target; in normal traffic it"
                " hints at a loop"
            ),
            evidence={"drafted": record.counts.drafted},
            remedies=("see whether the text is degenerate: `assay check URL`",),
            references=(f"{VLLM}issues/55605",),
        )
    if a.design_effect > 4 and rate is not None:
        yield Finding(
            "speculation.windows_disagree",
            Severity.INFO,
            f"windows differ more than chance allows: design effect {a.design_effect:.1f}",
            detail="intervals are widened accordingly; acceptance depends on what is asked",
            evidence={"design_effect": a.design_effect, "windows": record.windows, "rate": rate},
        )
    for note in record.notes:
        yield Finding("speculation.note", Severity.INFO, note)


def _against_baseline(judged: Judged) -> Iterator[Finding]:
    c = judged.comparison
    if c is None or not c.worse or c.fall is None:
        return
    yield Finding(
        "speculation.baseline_worse",
        Severity.WARNING,
        f"acceptance is {-100 * c.fall.value:.1f} points below the baseline "
        f"[{-100 * c.fall.hi:.1f}, {-100 * c.fall.lo:.1f}]",
        evidence={"difference": c.fall, "baseline_health": c.baseline.value},
        causes=(c.reading,),
        references=("https://arxiv.org/abs/2211.17192",),
    )
