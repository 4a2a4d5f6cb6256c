"""`assay kv eval`: what a codec does to the distribution of a model, and how many bytes its cache takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from assay.engines.hf.scorer import HfScorer
from assay.engines.scoring import Engagement
from assay.environment import describe
from assay.fidelity.compare import assess
from assay.fidelity.floors import Floors
from assay.fidelity.plan import MarginOptions, Plan, label_of
from assay.fidelity.report import blocks, headline
from assay.fidelity.result import CandidateResult, findings_of, verdict_of
from assay.fidelity.score import WindowObservation, engaged
from assay.lab.kv.accounting import NOTE
from assay.lab.kv.cache_hook import Mode
from assay.lab.kv.codec import Samples, Site, cache_shape
from assay.lab.kv.hook_plan import HookPlan, hook_spec, path_of
from assay.lab.kv.lab import Measured, Trials, engine_spec, scoring
from assay.lab.kv.spec import KvSpec, parse_spec
from assay.lab.options import EvalPlan
from assay.options import declared_options
from assay.progress import NO_PROGRESS, Progress
from assay.verdict import Metric, Report, Verdict


def comparison(plan: EvalPlan) -> Plan:
    """The plan of the comparison that this is: the model with its exact cache against itself with the codec."""
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


def run_eval(plan: EvalPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Score the model with the codec in its KV cache against itself without; count the bytes of the streams."""
    spec, compared = parse_spec(plan.codec), comparison(plan)  # whose margins and sizes are checked now
    spec.require(plan.streams)
    if plan.calibration is None:
        require_no_calibration(spec, plan.streams)
    hook = hook_spec(
        compared.reference,
        codec=plan.codec,
        mode=plan.mode,
        length=plan.length,
        calibration=plan.calibration,
        streams=plan.streams,
        skip_layers=plan.skip_layers,
    )
    seen: list[WindowObservation] = []
    interrupted = False
    measured: Measured | None = None
    with scoring(
        plan.model, plan.text, windows=plan.windows, length=plan.length, calibration=plan.calibration
    ) as opened:
        if isinstance(opened.engine, HfScorer):
            HookPlan.from_config(hook.config).coded(cache_shape(opened.engine.engine.model))
        hook = replace(hook, config={**hook.config, "windows": len(opened.windows)})
        trials = Trials(opened.engine, opened.windows, Mode(plan.mode), plan.batch)
        try:
            measured = trials.measure_hook(
                hook,
                table_tokens=plan.table_tokens,
                progress=progress,
                label=plan.codec,
                on_window=seen.append,
            )
        except KeyboardInterrupt:
            interrupted = True
        note = measured.engagement.notes[NOTE] if measured else {}
        results: dict[str, Any] = {
            "codec": str(spec),
            "mode": plan.mode,
            "streams": plan.streams,
            "skip_layers": list(plan.skip_layers),
            "text": {**opened.text, "length": plan.length},
            "cache": note.get("cache"),
            "calibration": opened.calibration,
            "table_tokens": plan.table_tokens,
        }
        subject = {"model": plan.model, "plan": plan.facts()}
        if not seen:
            return Report("kv eval", Verdict.INCONCLUSIVE, subject, results=results, interrupted=interrupted)
        # Placements that spare every layer of this model are no self-test: nothing took part.
        same = bool(note.get("lossless")) and spec.changes_nothing
        took_part = engaged(
            seen,
            measured.engagement if measured else Engagement(),
            path=trials.job.path,
            hooked=measured is not None,
            same=same or interrupted,
            label=plan.codec,
        )
        # The engine stays open until here: its tokenizer says what tokens are.
        facts, decode = opened.engine.describe(), opened.engine.tokenizer.decode
        result = assess(compared, Floors(), decode, seen, plan.codec, took_part, facts, self_test=same)
    return _report(plan, result, results, subject, measured, interrupted)


def require_no_calibration(spec: KvSpec, streams: str) -> None:
    """UsageError where a codec cannot do without a calibration: now, not when the exact cache has been scored."""
    for stream in streams:
        recipe = spec.of(stream)
        if recipe:
            recipe.fit(Samples(Site(stream, 0, 1, 1, 64)))


def _report(
    plan: EvalPlan,
    result: CandidateResult,
    results: dict[str, Any],
    subject: dict[str, Any],
    measured: Measured | None,
    interrupted: bool,
) -> Report:
    body = result.to_json() | results
    figures = list(headline([result]))
    if measured:
        body["bytes"] = measured.bytes.to_json()
        body["engaged"]["per_layer"] = {str(k): v for k, v in measured.engagement.per_layer.items()}
        size = measured.bytes
        figures.append(
            Metric(
                "cache",
                f"{size.ratio:.2f}× smaller than bf16: {size.stored / 1024:.0f} of {size.bf16 / 1024:.0f} KiB "
                f"for {size.tokens:,} tokens, {16 / size.ratio:.2f} bits a value",
            )
        )
        if size.tables:
            figures.append(
                Metric(
                    "tables", f"{size.tables / 2**20:.2f} MiB, counted against {plan.table_tokens:,} tokens"
                )
            )
    return Report(
        command="kv eval",
        verdict=verdict_of(result, plan.allow_marginal),
        subject=subject,
        findings=findings_of(result, plan.allow_marginal),
        results=body,
        environment=describe(),
        headline=figures,
        blocks=blocks([result], comparison(plan)),
        interrupted=interrupted,
        summary=f"{label_of(engine_spec(plan.model))} with {plan.codec}",
    )
