"""One run of a check: its stages in their order, until the verdict is certain or the time is spent.

Stages come in the order of what decides most per second, and each is measured on both sides before
it is judged. Once the verdict is certain nothing more is asked; where it is unclear after the whole
plan, further texts are, until it is clear, the interim analyses are used up, or the budget is
spent.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from assay.coherence.judge import Judgement, judge
from assay.coherence.measure import Measurement
from assay.coherence.options import CheckOptions
from assay.coherence.pace import Pace, fit
from assay.coherence.record import CheckRecord, Reference
from assay.coherence.reference import EngineReference
from assay.coherence.report import build_report
from assay.coherence.rules.rule import Rule
from assay.coherence.settings import changed_settings, settings_of
from assay.coherence.stages import (
    EVIDENCE_SECONDS,
    FIRST,
    LEAST_EXTENSION,
    MAX_ANALYSES,
    QUICK_SECONDS,
    QUICK_SECONDS_SLOW,
    SLOW,
    Stage,
    extension,
    stages_of,
)
from assay.deadline import OVERRUN, limit
from assay.errors import AssayError
from assay.progress import NO_PROGRESS, Progress, span
from assay.stats.multiplicity import confidence_of_analysis
from assay.verdict import Finding, Report, Severity, Verdict, worst

EARLY = 0.9999
"""Confidence of the intervals that may end a run before its plan is done: so many interim
analyses add hardly any error.
"""
REFERENCE_CUT = Stage(
    "reference", "texts", "how the reference answers all that the server was asked"
)
_SHORTER = "shortened to fit the budget"
_LEAST_STAGES = frozenset(
    {FIRST, "short texts", "long texts", "streams", "needs", REFERENCE_CUT.name}
)
"""Stages without which nothing passes, as docs/check.md lists them."""
DECIDED_BY_TEXTS = frozenset({Rule.HARD_TEXTS, Rule.DEGENERATE_RATE, Rule.STUTTER, Rule.TOOL_FORM})
"""Rules that further texts make clear."""


def asks_for_texts(judgement: Judgement) -> bool:
    """Whether further texts may change a judgement: some rule is unclear, and all that count
    against it rest on texts.
    """
    unclear = {r.rule for r in judgement.rulings if r.state == "unclear"}
    bad = {r.rule for r in judgement.rulings if r.state == "bad"}
    return bool(unclear) and unclear | bad <= DECIDED_BY_TEXTS


def seconds_of(options: CheckOptions) -> float:
    """Seconds that a check may take; those of `--quick` for a slow server, until it is known how
    fast it is.
    """
    if options.budget is not None:
        return 60 * options.budget
    return QUICK_SECONDS_SLOW if options.quick else inf


def _too_little(lacking: list[str]) -> Finding:
    return Finding(
        "coherence.evidence",
        Severity.WARNING,
        f"nothing speaks against it, and too little for a pass: {', '.join(lacking)} left out",
        evidence={"stages": lacking},
        remedies=("give it more time: --budget MINUTES",),
    )


@dataclass
class Check:
    """One run: both sides, the time, and what was left out of the plan."""

    options: CheckOptions
    server: Measurement
    progress: Progress = NO_PROGRESS
    kept: Reference | None = None
    engine: EngineReference | None = None
    ended: AssayError | KeyboardInterrupt | None = None
    """What ended the run early."""
    pending: list[Stage] = field(default_factory=list)
    """Stages that the reference has not answered yet."""
    interim_analyses: int = 1
    """How often the verdict was asked for."""
    stopped: str = ""
    """Why the run ended before its plan was done."""
    left_out: list[tuple[Stage, str]] = field(default_factory=list)
    """Stages that were not measured or only in part, and why."""
    expected: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        seconds = seconds_of(self.options)
        self._said_so_far = False
        self.budget = None if seconds == inf else seconds
        self._quick_time_known = self.options.budget is not None or not self.options.quick
        self.pace = Pace(
            reference=1.0 if self.options.reference_engine else 0.0, parallel=self.options.parallel
        )

    @property
    def record(self) -> CheckRecord:
        """What was measured of the server so far."""
        return self.server.record

    @property
    def reference(self) -> CheckRecord | None:
        """What is known of the reference, of the same texts as of the server."""
        if self.engine is not None:
            return self.engine.record
        return self.kept.record.like(self.record) if self.kept else None

    def judge(self, confidence: float) -> Judgement:
        """The verdict on what was measured so far."""
        return judge(self.record, self.reference, confidence)

    def run(self) -> None:
        """Measure the plan, and what its unclear rules ask for beyond it."""
        rest = stages_of(self.options, self.server.probes, self.server.max_model_len)
        while rest:
            stage, *later = rest
            chosen, dropped = fit(rest, self.pace, self._left(), self._has_kept)
            rest = later
            if stage in dropped:
                self.left_out.append((stage, "the budget is spent"))
                continue
            self._measure(chosen[0])
            if chosen[0] is not stage:
                self.left_out.append((stage, _SHORTER))
            fatal = self.server.fatal
            if fatal is not None and not self.record.samples and stage.kind == "texts":
                raise fatal
            if not self.options.all and rest and self._is_certain():
                self._show_evidence(rest)
                return
            self._say_so_far()
            slowed = self.pace.slower is not None and self.pace.slower[0] == stage.name
            if (not self.expected or slowed) and self.pace.write:
                self._say_plan(rest)
        self._catch_up()
        if not self.options.only and self.options.suite == "text":
            self._extend()

    def _is_certain(self) -> bool:
        """Whether what was measured fails beyond doubt. The reference's texts are asked for only
        where the server's are bad.
        """
        if self.engine is None:
            return self.judge(EARLY).verdict is Verdict.FAIL
        scores = replace(self.record, probes=(), timed=())
        if judge(scores, self.engine.record, EARLY).verdict is Verdict.FAIL:
            return True
        if judge(self.record, None, EARLY).verdict is not Verdict.FAIL:
            return False
        self._catch_up()
        return self.judge(EARLY).verdict is Verdict.FAIL

    def _show_evidence(self, rest: list[Stage]) -> None:
        """End the run with a certain verdict; texts of the probes that were not asked are added if
        they cost next to nothing.
        """
        seconds = time.monotonic() - self.began
        self.stopped = f"the verdict was certain after {span(seconds)}"
        for stage in rest:
            if seconds <= EVIDENCE_SECONDS and stage.name in ("short texts", "long texts"):
                self._measure(stage)
            else:
                self.left_out.append((stage, self.stopped))

    def _extend(self) -> None:
        """Ask for further texts of both sides while the verdict is unclear by rules that they can
        decide.
        """
        while self.interim_analyses < MAX_ANALYSES:
            if not asks_for_texts(self.judge(confidence_of_analysis(self.interim_analyses))):
                return
            stage = extension(self.options, self.server.probes, self.interim_analyses + 1)
            chosen, _ = fit([stage], self.pace, self._left(), self._has_kept)
            if not chosen or len(chosen[0].tasks) < LEAST_EXTENSION:
                self.left_out.append((stage, "the budget is spent"))
                return
            self._measure(chosen[0])
            self._catch_up()
            self.interim_analyses += 1

    def _measure(self, stage: Stage) -> None:
        """Measure a stage of the server. The reference scores its fixed texts at once and writes
        its texts later.
        """
        reserve = self.pace.reference * sum(self.pace.took[other.name] for other in self.pending)
        begun, written = time.monotonic(), self.record.written_tokens
        with self._limit():
            self.server.run(stage, stage.name + self._eta(stage), begun + self._left() - reserve)
        self.pace.learn(stage, time.monotonic() - begun, self.record.written_tokens - written)
        if not self._quick_time_known and self.pace.write:
            self.budget = QUICK_SECONDS if self.pace.write >= SLOW else QUICK_SECONDS_SLOW
            self._quick_time_known = True
        if self.engine is not None and stage.kind not in ("streams", "needs"):
            self.pending.append(stage)
            if stage.kind in ("scores", "tools"):
                self._catch_up((stage,))

    def _catch_up(self, only: tuple[Stage, ...] = ()) -> None:
        """Measure the reference's side of the stages that wait for it; all texts as one batch,
        which is much faster.
        """
        stages = only or tuple(self.pending)
        self.pending = [stage for stage in self.pending if stage not in stages]
        if self.engine is None or not stages:
            return
        tasks = tuple(task for stage in stages for task in stage.tasks)
        together = [Stage("texts", "texts", "", tasks)] if tasks else []
        together += [stage for stage in stages if not stage.tasks]
        took = 0.0
        try:
            for stage in together:
                with self._limit():
                    self.engine.prepare(stage)
                    begun = time.monotonic()
                    self.engine.run(stage, self.record, begun + self._left())
                took += time.monotonic() - begun
                if self._left() < 0:
                    self.left_out.append(
                        (REFERENCE_CUT, "the budget was spent while the reference answered")
                    )
        except (
            AssayError
        ) as error:  # what the server has shown stays, and the server can be asked on
            self.ended, self.engine = error, None
        self.pace.learn_reference(took, sum(self.pace.took[stage.name] for stage in stages))

    def _left(self) -> float:
        return float("inf") if self.budget is None else self.began + self.budget - time.monotonic()

    def _limit(self) -> AbstractContextManager[None]:
        """Around a stage: what stalls in it is cut off when the budget is overrun."""
        return limit(self._left() + OVERRUN * (self.budget or 0.0))

    def _has_kept(self, stage: Stage) -> bool:
        return self.engine is None or self.engine.has_kept(stage)

    def _say_plan(self, rest: list[Stage]) -> None:
        """Tell the expected time of each stage and in all."""
        chosen, dropped = fit(rest, self.pace, self._left(), self._has_kept)
        self.expected = {
            stage.name: self.pace.seconds(stage, self._has_kept) or 0.0 for stage in chosen
        }
        told = ", ".join(f"{name} {span(seconds)}" for name, seconds in self.expected.items())
        total = sum(self.expected.values()) + time.monotonic() - self.began
        cut = {"shortened": [s for s in chosen if s not in rest], "left out": dropped}
        without = "".join(
            f"; {how}: {', '.join(s.name for s in some)}" for how, some in cut.items() if some
        )
        why = ""
        if self.pace.slower:
            name, before, now = self.pace.slower
            why = f"the server has slowed down ({name}: {now:.3g} tokens/s, {before:.3g} before); "
        with self.progress(f"{why}expected: about {span(total)} in all ({told}){without}", 0):
            pass

    def _say_so_far(self) -> None:
        """Tell the verdict on what was measured, once half of the budget is spent."""
        if self._said_so_far or self.budget is None or self._left() > self.budget / 2:
            return
        self._said_so_far = True
        so_far = self.judge(confidence_of_analysis(self.interim_analyses)).verdict
        texts = len(self.record.samples)
        with self.progress(f"half of the time is spent: {so_far} so far, by {texts} texts", 0):
            pass

    def _eta(self, stage: Stage) -> str:
        """How long it will be until the end, as far as that is known."""
        names = list(self.expected)
        if stage.name not in names:
            return ""
        left = sum(list(self.expected.values())[names.index(stage.name) :])
        return f" (about {span(min(left, self._left()))} left)"

    def report(self, subject: Mapping[str, Any]) -> Report:
        """The report of what there is."""
        self._name_skipped()
        confidence = confidence_of_analysis(self.interim_analyses)
        reference = None
        if self.kept is not None:
            reference = replace(self.kept, record=self.kept.record.like(self.record))
        elif self.engine is not None:
            known = self.engine.record
            if known.samples or known.tools or known.passages:
                reference = Reference(known, self.engine.origin)
        judgement = self.judge(confidence)
        changed: tuple[Finding, ...] = ()
        if reference is not None and reference.settings:
            changed = changed_settings(
                settings_of(subject, self.options.facts()), reference.settings
            )
        times = self._times(confidence)
        report = build_report(
            subject, self.options, self.record, reference, judgement, times, changed
        )
        if report.verdict is Verdict.PASS and (lacking := self._lacking_evidence()):
            report = replace(
                report,
                verdict=Verdict.INCONCLUSIVE,
                findings=(*report.findings, _too_little(lacking)),
                summary="",
            )
        if isinstance(self.ended, AssayError):
            verdict = worst((report.verdict, self.ended.verdict))
            report = replace(
                report, verdict=verdict, findings=(*report.findings, self.ended.to_finding())
            )
        interrupted = isinstance(self.ended, KeyboardInterrupt)
        if interrupted and report.verdict is Verdict.PASS:
            # Half a run cannot acquit.
            report = replace(
                report, verdict=Verdict.INCONCLUSIVE, summary="what was measured holds so far"
            )
        return replace(report, interrupted=interrupted)

    def _lacking_evidence(self) -> list[str]:
        """Names of the stages that a pass rests on and that were not measured at all."""
        least = {*_LEAST_STAGES, *(["fixed texts"] if self.options.reference_engine else ())}
        if self.options.suite == "tools":
            least |= {stage.name for stage, _ in self.left_out if stage.kind == "tools"}
        return [
            stage.name for stage, why in self.left_out if stage.name in least and why != _SHORTER
        ]

    def _name_skipped(self) -> None:
        """Probes that were never asked are skipped, with the reason."""
        reason = self.stopped or (
            "the run was interrupted" if self.ended else "the budget was spent before"
        )
        self.server.record = replace(
            self.record,
            probes=tuple(
                (
                    probe
                    if probe.samples or probe.skipped or probe.failed
                    else replace(probe, skipped=reason)
                )
                for probe in self.record.probes
            ),
        )

    def _times(self, confidence: float) -> dict[str, Any]:
        """What the run took, and what it left out."""
        return {
            "seconds": time.monotonic() - self.began,
            "budget_s": self.budget,
            "expected_s": self.expected,
            "stages_s": self.pace.took,
            "looks": self.interim_analyses,
            "confidence": confidence,
            "stopped": self.stopped or None,
            "slower": (
                self.pace.slower
                and dict(
                    zip(
                        ("stage", "tokens_per_s_before", "tokens_per_s"),
                        self.pace.slower,
                        strict=True,
                    )
                )
            ),
            "left_out": [
                {"stage": stage.name, "why": why, "unknown": stage.without}
                for stage, why in self.left_out
            ],
        }
