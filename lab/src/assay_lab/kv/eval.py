"""`assay kv eval`: what one codec does to the distribution of a model, and the bytes it takes.

The plan is resolved once into an `EvalRun`; its stages hand on values: scored windows, the
comparison with its verdict, the report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from assay.engines.ray_scorer import on_ray
from assay.engines.scoring import Engagement
from assay.environment import describe
from assay.fidelity.assess import Scores, assess
from assay.fidelity.breakdown.floors import Floors
from assay.fidelity.budget import Budget
from assay.fidelity.candidate import FIRST_ANALYSIS
from assay.fidelity.compare_report import certain_findings, implausible
from assay.fidelity.control import Control, against_control, control_findings, control_metrics
from assay.fidelity.engaged import engaged
from assay.fidelity.findings import findings_of
from assay.fidelity.interim import InterimAnalyses
from assay.fidelity.names import label_of
from assay.fidelity.observation import WindowObservation
from assay.fidelity.plan import QUICK_MINUTES, MarginOptions, Plan
from assay.fidelity.report import blocks, headline
from assay.fidelity.result import CandidateResult, verdict_of
from assay.fidelity.summary import is_certain, margins_of
from assay.options import declared_options
from assay.progress import NO_PROGRESS, Progress
from assay.stats.equivalence import Margins
from assay.stats.multiplicity import confidence_of_analysis
from assay.verdict import Finding, Metric, Report, Verdict, worst
from assay_lab.kv.cache_bytes import LENGTHS, NOTE, CacheBytes
from assay_lab.kv.codecs.samples import LayerStream, Samples
from assay_lab.kv.evaluator import CodecEvaluator
from assay_lab.kv.hook_plan import check_ranks, path_of
from assay_lab.kv.interruption import Unfinished
from assay_lab.kv.measured import Measured
from assay_lab.kv.opening import ModelOnText, Work, engine_spec, open_evaluator
from assay_lab.kv.pages import refuse_wrapped
from assay_lab.kv.spec import KvSpec, parse_spec
from assay_lab.options import EvalPlan


def comparison(plan: EvalPlan) -> Plan:
    """The plan of the comparison that this is: the model with its exact cache against itself with
    the codec.
    """
    spec = engine_spec(plan.model)
    return Plan(
        reference=spec,
        candidates=(spec,),
        text=plan.text,
        windows=plan.windows,
        length=plan.length,
        path=path_of(plan.mode).value,
        batch=plan.batch,
        seed=plan.seed,
        **{name: getattr(plan, name) for name in declared_options(MarginOptions)},
    )


@dataclass(frozen=True)
class EvalRun:
    """A plan of `kv eval`, resolved: codecs are parsed, and everything that needs no model is
    checked.
    """

    plan: EvalPlan
    codec: KvSpec
    control: KvSpec | None
    compared: Plan
    margins: Margins
    budget: Budget

    @classmethod
    def of(cls, plan: EvalPlan) -> EvalRun:
        """Resolve a plan; UsageError for what cannot be run."""
        refuse_wrapped(plan.codec)
        codec, compared = parse_spec(plan.codec), comparison(plan)
        control = parse_spec(plan.control) if plan.control else None
        for one in filter(None, (codec, control)):
            one.require(plan.streams)
            check_ranks(plan.model, str(one))
            if plan.calibration is None:
                require_no_calibration(one, plan.streams)
        budget = Budget.of(plan.budget, plan.quick, QUICK_MINUTES)
        return cls(plan, codec, control, compared, margins_of(plan), budget)

    @property
    def work(self) -> Work:
        """The measurements that the time is planned for."""
        codecs = [self.codec, *([self.control] if self.control else [])]
        together = all(codec.token_by_token for codec in codecs)
        return Work(self.budget, len(codecs), together=together)

    def on(self, evaluator: CodecEvaluator) -> EvalRun:
        """With windows, length and block as the budget allows."""
        size = (len(evaluator.windows), evaluator.length, evaluator.setup.block)
        plan = replace(self.plan, windows=size[0], length=size[1], block=size[2])
        return replace(self, plan=plan, compared=comparison(plan))


@on_ray
def run_eval(plan: EvalPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Score the model with the codec in its KV cache against itself without; count the bytes of the
    streams.

    Interrupted, the report holds what was scored, and the same command goes on from there.
    """
    run = EvalRun.of(plan)
    request = ModelOnText.of(plan, any_engine=True)
    with open_evaluator(request, run.work, progress) as evaluator:
        run = run.on(evaluator)
        scored = score(run, evaluator)
        facts = facts_of(run, scored, evaluator)
        if not scored.seen:
            return nothing_scored(run, scored, facts)
        # The engine stays open until here: its tokenizer says what tokens are.
        judged = judge(run, scored, evaluator)
    return report(run, scored, judged, facts)


@dataclass(frozen=True)
class Scored:
    """What was scored: with the codec, with the control, and what cut it short.

    `own_cut`: the codec's own measurement was cut short. `certain`: more windows would not change
    the verdict.
    """

    measured: Measured | None
    control: Measured | None
    cut: Unfinished
    own_cut: bool
    certain: bool

    @property
    def seen(self) -> Sequence[WindowObservation]:
        """The windows scored with the codec."""
        return self.measured.seen if self.measured else ()

    @property
    def engagement(self) -> Engagement:
        """What took part with the codec."""
        return self.measured.engagement if self.measured else Engagement()

    @property
    def note(self) -> Mapping[str, Any]:
        """What the codec's hook left."""
        found: Mapping[str, Any] = self.engagement.notes.get(NOTE, {})
        return found


def score(run: EvalRun, evaluator: CodecEvaluator) -> Scored:
    """Score the windows with the codec, then with the control. UsageError and errors before the
    first window are raised; later ones end the measurement.
    """
    plan, after, certain = run.plan, FIRST_ANALYSIS, False

    def enough(seen: Sequence[WindowObservation]) -> bool:
        nonlocal after, certain
        if not (plan.all or run.control) and after <= len(seen) < len(evaluator.windows):
            after = 2 * len(seen)
            certain = is_certain(seen, run.margins, evaluator.blocks)
        return certain or run.budget.ends_before_next()

    placed: dict[str, Any] = {
        "streams": plan.streams,
        "skip_layers": plan.skip_layers,
        "table_tokens": plan.table_tokens,
    }
    with Unfinished(lambda: evaluator.partial, run.budget) as cut:
        evaluator.measure(plan.codec, enough=enough, **placed)
    measured, control, own_cut = evaluator.partial, None, bool(cut)
    if plan.control and not cut:
        with Unfinished(lambda: measured, run.budget) as cut:
            evaluator.measure(plan.control, **placed)
        control = evaluator.partial
    missing = len(evaluator.windows) - len(measured.seen) if measured else 0
    if missing and not (certain or cut):
        run.budget.leave_out(
            f"{missing} of {len(evaluator.windows)} passages",
            "differences that fewer passages cannot resolve",
        )
    return Scored(measured, control, cut, own_cut, certain)


def facts_of(run: EvalRun, scored: Scored, evaluator: CodecEvaluator) -> dict[str, Any]:
    """What `results` says of the run beside the comparison."""
    plan, text = run.plan, evaluator.text
    return {
        "codec": str(run.codec),
        "mode": plan.mode,
        "block": plan.block,
        "streams": plan.streams,
        "skip_layers": list(plan.skip_layers),
        "text": {**text, "length": plan.length},
        "chars_per_token": text.get("characters_per_token"),
        "cache": scored.note.get("cache"),
        "calibration": evaluator.fitting.provenance,
        "table_tokens": plan.table_tokens,
        **run.budget.results(),
    }


def nothing_scored(run: EvalRun, scored: Scored, facts: dict[str, Any]) -> Report:
    """The report of a run that ended before its first window."""
    cut, plan = scored.cut, run.plan
    return Report(
        "kv eval",
        cut.verdict(Verdict.INCONCLUSIVE),
        {"model": plan.model, "plan": plan.facts()},
        [*cut.findings(), *run.budget.findings()],
        facts,
        interrupted=cut.interrupted,
    )


@dataclass(frozen=True)
class Judged:
    """The comparison with its verdict; `against` is the control's part in it."""

    result: CandidateResult
    against: Control | None
    verdict: Verdict
    findings: list[Finding]


def judge(run: EvalRun, scored: Scored, evaluator: CodecEvaluator) -> Judged:
    """Compare the scored windows, with the confidence that is left after earlier looks."""
    plan, cut, windows = run.plan, scored.cut, evaluator.windows
    result = _compared(run, scored, evaluator)
    found = [
        *cut.findings(),
        *run.budget.findings(),
        *certain_findings([result], len(windows)),
        *findings_of(result, plan.allow_marginal),
        *evaluator.notices(),
        *implausible(evaluator.text, result.summary.ppl_reference),
    ]
    verdict, against = verdict_of(result, plan.allow_marginal), None
    if scored.control and plan.control:
        other = replace(result, label=plan.control, seen=scored.control.seen)
        against = against_control(result, other, plan.control_margin, plan.margin_ppl)
    if against:
        found += control_findings([against])
        verdict = worst([verdict, against.verdict])
    return Judged(result, against, cut.verdict(verdict), found)


def _compared(run: EvalRun, scored: Scored, evaluator: CodecEvaluator) -> CandidateResult:
    plan, seen = run.plan, scored.seen
    # Placements that spare every layer of this model are no self-test: nothing took part.
    same = bool(scored.note.get("lossless")) and run.codec.changes_nothing
    took_part = engaged(
        seen,
        scored.engagement,
        path=evaluator.job.path,
        hooked=not scored.own_cut,
        same=same or bool(scored.cut),
        label=plan.codec,
    )
    about = evaluator.fitting.about
    settings = json.dumps([plan.mode, plan.streams, plan.skip_layers, about])
    analyses = InterimAnalyses(run.compared, f"{run.codec} {settings}", len(seen))
    scores = Scores(
        plan.codec,
        seen,
        took_part,
        evaluator.engine.describe(),
        evaluator.engine.tokenizer.decode,
        evaluator.blocks,
        self_test=same,
    )
    confidence = confidence_of_analysis(analyses.number)
    result = assess(scores, run.compared, Floors(), confidence=confidence)
    if not scored.cut:
        analyses.record(result.summary)
    return replace(result, certain=scored.certain)


def report(run: EvalRun, scored: Scored, judged: Judged, facts: Mapping[str, Any]) -> Report:
    """The report of a run that scored windows."""
    plan, result, against = run.plan, judged.result, judged.against
    size = scored.measured.bytes if scored.measured else None
    body: dict[str, Any] = result.to_json() | dict(facts)
    if against:
        body["control"] = against.to_json()
    if size:
        body["bytes"] = size.to_json()
        body["table_tokens"] = size.table_tokens
        per_layer = scored.engagement.per_layer
        body["engaged"]["per_layer"] = {str(k): v for k, v in per_layer.items()}
    return Report(
        command="kv eval",
        verdict=judged.verdict,
        subject={"model": plan.model, "plan": plan.facts()},
        findings=judged.findings,
        results=body,
        environment=describe(),
        headline=[
            *headline([result]),
            *cache_figures(size),
            *control_metrics([against] if against else []),
        ],
        blocks=blocks([result], run.compared),
        interrupted=scored.cut.interrupted,
        summary=f"{label_of(run.compared.reference)} with {plan.codec}",
    )


def require_no_calibration(spec: KvSpec, streams: str) -> None:
    """UsageError where a codec cannot do without a calibration: now, not when the exact cache has
    been scored.
    """
    for stream in streams:
        recipe = spec.of(stream)
        if recipe:
            recipe.fit(Samples(LayerStream(stream, 0, 1, 1, 64)))


def cache_figures(size: CacheBytes | None) -> list[Metric]:
    """How large the cache is, and what its tables are worth."""
    if size is None:
        return []
    found = [
        Metric(
            "cache",
            f"{size.ratio:.2f}× smaller than bf16: {size.stored / 1024:.0f} of"
            f" {size.bf16 / 1024:.0f} KiB for {size.tokens:,} tokens, {16 / size.ratio:.2f} bits a"
            " value",
        )
    ]
    if size.tables:
        at = ", ".join(f"{size.ratio_at(n):.2f}× at {n // 1024}k" for n in LENGTHS)
        even = (
            "never"
            if size.break_even_tokens is None
            else f"from {size.break_even_tokens:,} tokens on"
        )
        found += [
            Metric(
                "tables",
                f"{size.tables / 2**20:.2f} MiB, as if {size.sharing:.0f} sequences of"
                f" {size.tokens:,} tokens shared them; an encoder needs"
                f" {size.encoder_tables / 2**20:.2f} MiB more",
            ),
            Metric("one sequence with its tables", f"{at}; smaller than bf16 {even}"),
        ]
    return found
