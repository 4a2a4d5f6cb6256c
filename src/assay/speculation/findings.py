"""Findings of a judged source: what is wrong, the evidence, the likely cause, the remedy."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from assay.speculation.benefit import Benefit, Comparison, Measured
from assay.speculation.health import (
    BROKEN_RATE,
    MIN_DRAFTS,
    WORTH,
    Assessment,
    HeadState,
    Health,
    head_evidence,
    zero_windows,
)
from assay.speculation.read import Clue
from assay.speculation.record import Evidence, Record
from assay.verdict import Finding, Severity

if TYPE_CHECKING:
    from assay.checkpoint.flags.versions import Version
    from assay.checkpoint.opening import Opened

VLLM = "https://github.com/vllm-project/vllm/"
_SILENT = (
    "the engine left the head's parameters uninitialised without saying so: the config announces a"
    " head that the checkpoint does not hold (vLLM 0.25.1 serves a head without its layer, or"
    " without any tensor, in silence)"
)


@dataclass(frozen=True)
class Diagnosis:
    """What is said of a head in one state; its usual causes come in order of likelihood."""

    name: str
    title: str
    causes: tuple[str, ...]
    remedies: tuple[str, ...]
    references: tuple[str, ...] = ()


DIAGNOSES: Mapping[HeadState, Diagnosis] = {
    HeadState.DEAD: Diagnosis(
        "head_dead",
        "no draft token is accepted: the head proposes nothing that fits",
        (
            _SILENT,
            (
                "the head's tensors were skipped or cast at load: their names or dtype differ from"
                " the quantization scheme"
            ),
            "an engine fault in the draft path (KV-cache group, block table, attention backend)",
        ),
        (
            "disable speculation until it is fixed: every draft costs time and earns nothing",
            (
                "see whether the head's tensors are there and of the declared dtype: `assay verify"
                " CHECKPOINT`"
            ),
            (
                "make a missing head loud: vLLM --model-loader-extra-config"
                " '{\"enable_weights_track\": true}'"
            ),
        ),
        (
            f"{VLLM}pull/35548",
            "https://github.com/sgl-project/sglang/issues/35797",
            "https://github.com/z-lab/paroquant/issues/47",
            "https://github.com/vllm-project/llm-compressor/issues/1843",
        ),
    ),
    HeadState.NOISE: Diagnosis(
        "head_noise",
        "draft tokens are accepted at chance level",
        (
            "the head's parameters are partly uninitialised",
            (
                "the draft does not belong to this target (another base model, another tokenizer, a"
                " wrong shared embedding or head)"
            ),
            (
                "the head is quantized and its scales were not read (rounding alone costs a few"
                " points)"
            ),
        ),
        (
            "disable speculation until it is fixed",
            "compare with a run of the unquantized checkpoint: --baseline SOURCE",
            (
                "keep the head in BF16 when quantizing, and list it in the config's ignore list"
                " under its fused names"
            ),
        ),
        (f"{VLLM}issues/41789", f"{VLLM}pull/38494", f"{VLLM}pull/43304"),
    ),
    HeadState.DIVERGED: Diagnosis(
        "head_diverged",
        "draft and target disagree too often for drafting to pay",
        (
            (
                "the head's norms are read by another convention, or a part of it is missing:"
                " position 0 near 10 %"
            ),
            (
                "the target is broken itself, or changed under the draft (fine-tuning); INT4, INT8"
                " and fp8 cost a head that reads its target's states a few points at most"
            ),
            "the draft is weak for this text: other domain, chat template, a temperature above 1",
            "an engine fault that hits later draft steps only",
        ),
        (
            "lower the number of speculative tokens, or use a draft made for this target",
            "measure how far the target itself moved: `assay compare`",
        ),
        (f"{VLLM}pull/41044", f"{VLLM}issues/47602", "https://arxiv.org/abs/2211.17192"),
    ),
    HeadState.UNCLEAR: Diagnosis(
        "low_acceptance",
        "too few draft tokens are accepted for drafting to pay",
        ("the head proposes tokens that the target rejects; there are too few hits to tell why",),
        ("collect more drafts",),
    ),
}
WORKS = 0.25
"""A position 0 that is surely above this, with hits that go on, is that of a head that was loaded
as it was trained.
"""
WORKING = Diagnosis(
    "low_acceptance",
    "the head works, and fewer than half of its first drafts are accepted: usual for sampled text,"
    " few for greedy text",
    (
        (
            "the text is sampled: at temperature 0.7 sound heads had a position 0 of 36 to 47 %,"
            " and one of 57 to 67 % at 0"
        ),
        "the draft is weak for this text: another domain, chat template or language",
        "the target changed under the draft (fine-tuning), or is broken itself",
    ),
    (
        (
            "say how the traffic is sampled, --temperature 0.7: a head is then judged by what sound"
            " heads reach there"
        ),
        "measure what drafting is worth: assay spec URL --baseline URL_WITHOUT_SPECULATION",
        "lower the number of speculative tokens if the tail is hardly accepted",
    ),
    ("https://arxiv.org/abs/2211.17192",),
)
"""What is said instead of `diverged` where counts show a head that works: they cannot tell sampling
from a weak draft.
"""
_SEEN_AT_START = {
    "weights_missing": "the engine says that the head's weights are missing",
    "weights_skipped": "head weights were skipped at load",
    "weights_uninitialised": "head weights were not initialised",
    "weights_cast": "head weights were cast to another dtype without a scale",
    "draft_vocab": "the draft's vocabulary does not fit the target's",
}
PERFECT_DRAFTS = 50


def likely_causes(
    state: HeadState | Diagnosis, clues: Sequence[Clue], checkpoint: Sequence[Finding] = ()
) -> list[str]:
    """Causes in order of likelihood: what was seen comes before what is usual."""
    usual = state.causes if isinstance(state, Diagnosis) else DIAGNOSES[state].causes
    seen = [f"the checkpoint: {f.title}" for f in checkpoint if f.severity.value != "info"]
    by_id = {c.id: c for c in clues}
    for name, text in _SEEN_AT_START.items():
        if clue := by_id.get(name):
            seen.append(f"{text} ({clue.count} lines, the first: {clue.text})")
    complete = any(
        f.id == "speculation.head_file" and f.evidence.get("status") == "ok" for f in checkpoint
    )
    return seen + [c for c in usual if not (complete and c is _SILENT)]


def quoted(clues: Sequence[Clue]) -> dict[str, str]:
    """Start-up messages that bear on speculation, as evidence."""
    return {c.id: c.text for c in clues}


@dataclass(frozen=True)
class Judged:
    """All that the findings are made from: `unread` lines with their number, `asked` speculative
    tokens.
    """

    evidence: Evidence
    assessment: Assessment
    clues: Sequence[Clue] = ()
    benefit: Benefit | None = None
    comparison: Comparison | None = None
    checkpoint: Sequence[Finding] = ()
    unread: Sequence[tuple[str, int]] = ()
    asked: int | None = None
    temperature: float | None = None

    @property
    def record(self) -> Record:
        """The record of the whole source."""
        return self.evidence.record

    @property
    def advice(self) -> str | None:
        """What to do, in one line; None where nothing can be said."""
        a = self.assessment
        if a.health is Health.BROKEN:
            return "disable speculation until the head is repaired"
        if a.health is Health.DEGRADED and a.dead_engines:
            return f"repair {', '.join(a.dead_engines)} first; the other engines are worth keeping"
        if a.health is Health.DEGRADED and a.collapse is not None:
            return "find out what happened at the collapse first; until then disable speculation"
        return None if self.benefit is None or not a.judged else self.benefit.advice


def findings(judged: Judged) -> list[Finding]:
    """All findings, the gravest first."""
    found = [
        *_state(judged),
        *_unread(judged),
        *_hidden(judged),
        *_depth(judged),
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
    elif a.health is Health.INSUFFICIENT:
        name, title, remedy = (
            ("partial", "the source shows only some of the counters", "give the whole metrics page")
            if judged.record.partial
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
            evidence=_figures(a),
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
        Severity.ERROR if bad else Severity.WARNING,
        f"{share} of the steps had a draft, so a step gives {record.overall or 1:.2f} tokens on"
        " average over all steps",
        detail=a.reason if bad else "",
        evidence={
            **_figures(a),
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


def judge_head(judged: Judged) -> Finding | None:
    """The finding about the head itself; None where another finding (a dead engine, a collapse)
    says it all.
    """
    a, record = judged.assessment, judged.record
    only_late = a.collapse is not None and a.collapse.before.lo >= 0.5
    if a.health is Health.DEGRADED and (a.dead_engines or only_late):
        return None
    head = head_evidence(record)
    if a.health is Health.DEGRADED and head.state is not HeadState.DIVERGED:
        head = replace(head, state=HeadState.UNCLEAR)
    own = DIAGNOSES[head.state]
    if head.state is HeadState.DIVERGED and head.first is not None and head.first.lo >= WORKS:
        own = _working(judged)
    dead = head.state is HeadState.UNCLEAR and a.health is Health.BROKEN and not record.leading
    shown = DIAGNOSES[HeadState.DEAD] if dead else own
    bound = (
        f" over {head.drafts:,} drafts (true rate at most {head.upper:.2g})" if head.upper else ""
    )
    return Finding(
        f"speculation.{shown.name}",
        Severity.ERROR,
        shown.title,
        detail=f"{a.reason}{bound}",
        evidence={**_figures(a), **head.to_json(), **quoted(judged.clues)},
        causes=likely_causes(own, judged.clues, judged.checkpoint),
        remedies=own.remedies,
        references=own.references,
    )


def _working(judged: Judged) -> Diagnosis:
    """`WORKING`, with what is known of the temperature."""
    told = next((c.text for c in judged.clues if c.id == "temperature"), None)
    if judged.temperature is not None:
        title = (
            "the head works, and less is accepted than of sound heads at temperature"
            f" {judged.temperature:g}"
        )
        return replace(
            WORKING, title=title, causes=WORKING.causes[1:], remedies=WORKING.remedies[1:]
        )
    if told and told not in ("0", "0.0"):
        first = (
            f"the text is sampled: the log names temperature {told}, at which sound heads are"
            " accepted less often"
        )
        return replace(WORKING, causes=(first, *WORKING.causes[1:]))
    return WORKING


def _figures(a: Assessment) -> dict[str, object]:
    """The figures that a finding quotes; `results.evidence` holds all of them."""
    return {"basis": a.basis, "rate": a.rate, "tokens_per_step": a.tokens_per_step}


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
            evidence={"engine": name, **_figures(own)},
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
            evidence=_figures(a),
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
        c = a.collapse
        dummies = (
            "a sequence grew past the draft's own context limit (drafts become dummies for the"
            " whole batch)"
        )
        corrupt = "the target's state is corrupt: acceptance falls before the text turns into salad"
        longer = "longer contexts than the draft head was trained for"
        yield Finding(
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
    measured = None if b is None else b.measured_multiplier
    if measured is None and judged.record.multiplier is not None:
        measured = Measured(judged.record.multiplier)
    # Where the windows give an interval, all of it must lie below 1.
    if (
        measured is not None
        and a.judged
        and (measured.value if measured.hi is None else measured.hi) < 1.0
    ):
        yield Finding(
            "speculation.costs_more",
            Severity.WARNING,
            f"speculation makes generation slower: net multiplier {measured}",
            evidence={
                "net_multiplier": measured.value,
                "interval": [measured.lo, measured.hi],
                "worth_running_above": WORTH,
            },
            remedies=("disable speculation, or lower the number of speculative tokens",),
        )


def _mismatch(judged: Judged) -> Iterator[Finding]:
    """The number of draft positions in the source against what the command says, and what the user
    gives.
    """
    record = judged.record
    printed = len(record.per_position or ())
    drafted = math.ceil(record.drafted / record.drafts) if record.drafted and record.drafts else 0
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
        and (record.drafted or 0) >= PERFECT_DRAFTS
    ):
        yield Finding(
            "speculation.perfect_acceptance",
            Severity.INFO,
            "every draft token was accepted",
            detail=(
                "right for repetitive text or a draft equal to the target; in normal traffic it"
                " hints at a loop"
            ),
            evidence={"drafted": record.drafted},
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


@dataclass(frozen=True)
class HeadFile:
    """The head as the checkpoint stores it: a status of `results.mtp`, and findings."""

    status: str
    findings: tuple[Finding, ...]

    def softened(self) -> HeadFile:
        """The same with errors as warnings: for a run whose acceptance is fine whatever the file
        says.
        """
        soft = [
            replace(f, severity=max(f.severity, Severity.WARNING, key=list(Severity).index))
            for f in self.findings
        ]
        return replace(self, findings=tuple(soft))


def examine_head(path: str, clues: Sequence[Clue] = ()) -> HeadFile:
    """The head at `path`, with all its values: a draft of its own, or the multi-token-prediction
    head of a checkpoint.
    """
    from assay.checkpoint.draft import is_draft
    from assay.checkpoint.mtp import examine
    from assay.checkpoint.mtp_findings import check_mtp
    from assay.checkpoint.opening import open_checkpoint

    opened = open_checkpoint(path)
    if is_draft(opened.checkpoint):
        return _examine_draft(path)
    report = examine(path)
    status = str(report.status)
    found = list(check_mtp(report, _quantized(path), _version(clues)))
    bad = _head_values(opened) if status == "ok" else []
    found += bad
    # Statuses that are no fault but tell something about a dead head.
    plain = {
        "ok": (
            "the checkpoint holds a complete head of the declared dtype: look at the engine, not at"
            " the file"
        ),
        "none": "the checkpoint announces no head: the draft comes from elsewhere",
    }
    if status in plain and not bad:
        evidence = {"status": status}
        found.append(
            Finding("speculation.head_file", Severity.INFO, plain[status], evidence=evidence)
        )
    return HeadFile(status, tuple(found))


def _head_values(opened: Opened) -> list[Finding]:
    from assay.checkpoint.mtp import head_prefixes
    from assay.checkpoint.values.judgement import judge_values
    from assay.checkpoint.values.norms import check_norms
    from assay.checkpoint.values.scan import scan

    held, layout = opened.checkpoint, opened.layout
    if layout is None:  # on the Hub
        return []
    prefixes = head_prefixes(held)
    jobs = [
        (t, layout.files[t.file].real) for n, t in held.tensors.items() if n.startswith(prefixes)
    ]
    statistics, _ = scan(jobs)
    return [*judge_values(statistics), *check_norms(statistics, held.model_type)]


def _examine_draft(path: str) -> HeadFile:
    from assay.checkpoint.options import VerifyOptions
    from assay.checkpoint.verify import verify

    about = (
        "unverified",
        "not_examined",
        "tokenizer",
        "chat_template",
        "extra",
    )  # of files, not of the head
    report = verify(path, VerifyOptions(values=True, allow_unverified=True))
    shown = [
        f
        for f in report.findings
        if f.severity is not Severity.INFO and not f.id.partition(".")[2].startswith(about)
    ]
    if not shown:
        title = (
            "the draft's file is whole, and its values are sane: look at the engine, and at the"
            " target"
        )
        shown = [Finding("speculation.head_file", Severity.INFO, title, evidence={"status": "ok"})]
        return HeadFile("ok", tuple(shown))
    return HeadFile("draft", tuple(shown))


def _quantized(path: str) -> bool:
    """Whether the config declares a quantization."""
    try:
        config = json.loads((Path(path) / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    parts = [config, config.get("text_config")] if isinstance(config, dict) else []
    return any(isinstance(p, dict) and p.get("quantization_config") for p in parts)


def _version(clues: Sequence[Clue]) -> Version | None:
    """The engine's version in the form that the checkpoint rules take; None where no start-up line
    names it.
    """
    from assay.checkpoint.flags.versions import Version

    text = next((c.text for c in clues if c.id == "version"), "")
    match = re.search(r"\d+\.\d+(?:\.\d+)?", text)
    if match is None or "sglang" in text.lower() or text.startswith("build"):
        return None
    return Version.parse(match[0])
